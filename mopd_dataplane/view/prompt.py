"""All answers to a prompt side by side: one group, or over policy versions; and how two answers differ."""

from __future__ import annotations

from collections.abc import Collection
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import MopdError, UnknownNameError
from mopd_dataplane.view.sample import (
    Payload,
    at_trained,
    packed,
    pieces_of,
    prompt_shown,
    read_payload,
    read_teachers,
    score_rows,
)

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers
    from mopd_dataplane.view.index import Index
    from mopd_dataplane.view.shown import Shown

MOST_ANSWERS = 64
"""Answers of one page; more are paged."""
MOST_TOKENS = 600
"""Tokens of each answer that the page of a prompt shows; the page of the sample shows all."""
DIFF_TOKENS = 4000
"""Longest stretch, after what is equal at both ends, that is aligned token by token."""


def prompt_text(store: Store, prompt_id: str, snapshot: Snapshot) -> dict[str, Any]:
    """The row of `prompts`, empty when there is none."""
    rows = store.table("prompts", filter=f"prompt_id = {literal(prompt_id)}", snapshot=snapshot).to_pylist()
    return {key: value for key, value in rows[0].items() if key != "created_at"} if rows else {}


def answers(
    store: Store,
    index: Index,
    decoder: Decoder | Numbers,
    *,
    prompt_id: str,
    group: str = "",
    stage: str = "",
    offset: int = 0,
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Answers to a prompt in the order of policy versions, with the first token in which each leaves the first one.

    group: that group alone, of `stage`: a group is named after its prompt and iteration, which stages may share.
    only: uids of the answers to read; all by default. Raises UnknownNameError when nobody answered it.
    """
    siblings = {"group_id": group, "stage": stage} if group else {"prompt_id": prompt_id}
    condition = " and ".join(f"{name} = {literal(value)}" for name, value in siblings.items())
    order = "stage, iteration, policy_version_first, group_index, sample_row"
    (total,) = index.execute(f"select count(*) from rollouts where {condition}").fetchone() or (0,)
    rows = index.select_rows(condition, order, offset, MOST_ANSWERS)
    if only is not None:
        rows = [row for row in rows if row["uid"] in only]
    if not rows:
        raise UnknownNameError(f"no sample answers {group or prompt_id!r} in this snapshot")
    text = prompt_text(store, rows[0]["prompt_id"], index.snapshot)
    shown = [_answer(store, index, decoder, row) for row in rows]
    first = next((answer["response"] for answer in shown if answer["response"] is not None), None)
    for answer in shown:
        response = answer.pop("response")
        answer["leaves_at"] = None if first is None or response is None else first_difference(first, response)
    return {
        "prompt": prompt_shown(text),
        "prompt_id": rows[0]["prompt_id"],
        "total": total,
        "answers": shown,
        "groups": _groups(index, rows[0]["prompt_id"]),
        "sql": index.statement(condition, "", MOST_ANSWERS),
        "trend": _trend(index, rows[0]["prompt_id"]),
    }


def _answer(store: Store, index: Index, decoder: Decoder | Numbers, row: dict[str, Any]) -> dict[str, Any]:
    about = {name: row[name] for name in index.columns}
    try:
        payload = read_payload(store, row, index.snapshot)
    except (MopdError, OSError) as error:
        return {"row": about, "damage": str(error), "response": None, "pieces": [], "ratios": {}}
    ratios = {}
    for teacher in read_teachers(store, row, score_rows(store, row["sample_row"], index.snapshot), index.snapshot):
        if "logprob" in teacher and payload.logprobs is not None:
            ratios[teacher["name"]] = packed(log_ratio(payload, teacher["logprob"])[:MOST_TOKENS])
    pieces = pieces_of(decoder, payload.response[:MOST_TOKENS])
    return {"row": about, "damage": "", "response": payload.response, "pieces": pieces, "ratios": ratios,
            "cut": max(0, len(payload.response) - MOST_TOKENS)}  # fmt: skip


def log_ratio(payload: Payload, teacher: NDArray[np.float32]) -> NDArray[np.float32]:
    """[R] teacher minus sampler log-prob; NaN where nothing was trained."""
    assert payload.logprobs is not None
    trained = payload.mask.astype(bool)
    return at_trained(payload.mask, (teacher - payload.logprobs)[trained].astype(np.float32), np.nan)


def first_difference(first: NDArray[np.int32], other: NDArray[np.int32]) -> int | None:
    """Response position in which two answers part; None when they are equal.

    >>> first_difference(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    shared = min(len(first), len(other))
    apart = np.flatnonzero(first[:shared] != other[:shared])
    if len(apart):
        return int(apart[0])
    return None if len(first) == len(other) else shared


def _groups(index: Index, prompt_id: str) -> list[dict[str, Any]]:
    return index.rows(
        """select group_id, stage, iteration, count(*) as answers, min(policy_version_first) as version,
                  avg(reward) as reward, max(reward) - min(reward) as spread, avg(kl) as kl, avg(response_len) as length
           from rollouts where prompt_id = ? group by group_id, stage, iteration order by stage, iteration, group_id""",
        [prompt_id],
    )


def _trend(index: Index, prompt_id: str) -> list[dict[str, Any]]:
    return index.rows(
        """select stage, policy_version_first as version, avg(kl) as kl, avg(reward) as reward,
                  avg(response_len) as length, count(*) as answers
           from rollouts where prompt_id = ? and policy <> 'reference'
           group by stage, policy_version_first order by stage, version""",
        [prompt_id],
    )


def difference(a: list[Any], b: list[Any]) -> list[tuple[str, int, int, int, int]]:
    """Edits that turn answer a into answer b: (equal, replace, delete or insert, a from, a to, b from, b to).

    a, b: token ids, or the texts of tokens.
    Stretches longer than DIFF_TOKENS after what is equal at both ends count as replaced.

    >>> difference([1, 2, 3], [1, 4, 3])
    [('equal', 0, 1, 0, 1), ('replace', 1, 2, 1, 2), ('equal', 2, 3, 2, 3)]
    """
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    middle_a, middle_b = a[start : len(a) - end], b[start : len(b) - end]
    parts = [("equal", 0, start, 0, start)] if start else []
    if max(len(middle_a), len(middle_b)) > DIFF_TOKENS:
        parts.append(("replace", start, len(a) - end, start, len(b) - end))
    else:
        matcher = SequenceMatcher(None, middle_a, middle_b, autojunk=False)
        parts += [(tag, i + start, j + start, k + start, m + start) for tag, i, j, k, m in matcher.get_opcodes()]
    if end:
        parts.append(("equal", len(a) - end, len(a), len(b) - end, len(b)))
    return parts


def compared(one: Shown, a: str, other: Shown, b: str) -> dict[str, Any]:
    """Answers a of one store and b of another, aligned token by token; by their text if the stores are two, since
    tokenizers may differ.

    Raises UnknownNameError, DamagedError.
    """
    tokens, pieces = [], []
    for shown, uid in ((one, a), (other, b)):
        index = shown.index()
        response = read_payload(shown.store, index.row(uid), index.snapshot).response
        tokens.append(response.tolist())
        pieces.append(pieces_of(shown.decoder, response))
    return {
        "a": {"uid": a, "pieces": pieces[0]},
        "b": {"uid": b, "pieces": pieces[1]},
        "parts": difference(*(tokens if one.store is other.store else pieces)),
    }
