"""Each teacher's likeliest tokens at one position, from `topk` or from hidden state times head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import DamagedError, MopdError
from mopd_dataplane.query.heads import head_logits, log_softmax, read_states
from mopd_dataplane.query.text import visible
from mopd_dataplane.store.format.dataset_format import FREED

if TYPE_CHECKING:
    import pyarrow as pa

    from mopd_dataplane.records import Snapshot, Teacher
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers

INSIDE_A_CHUNK = "it has other tokens, and no distribution where one of them goes on past this token"
SHOWN = 12
"""Candidates of one teacher."""


def candidates(
    store: Store, row: dict[str, Any], scores: pa.Table, places: Sequence[tuple[int, int]], snapshot: Snapshot
) -> list[list[dict[str, Any]]]:
    """At each place, for each teacher that stored `topk` or `hidden`: `source`, `ids`, `logprobs`, `rank` and `tail`,
    or an `error`.

    places: the id that was sampled, and its place among the trained tokens.
    """
    kinds: dict[str, list[str]] = {}
    for score in scores.to_pylist():
        kinds.setdefault(score["teacher"], []).append(score["kind"])
    teachers = store.teachers()
    by_position: list[list[dict[str, Any]]] = [[] for _ in places]
    for name in sorted(kinds):
        source = next((kind for kind in ("hidden", "topk") if kind in kinds[name]), None)
        if source is None:
            continue
        about = {"teacher": name, "source": source}
        try:
            ordinals = [ordinal for _, ordinal in places]
            said: Iterable[tuple[Any, Any]]
            if source == "hidden":
                said = _from_states(store, teachers[name], row["sample_row"], ordinals, snapshot)
            else:
                stored = store.read_signal(name, "topk", [row["sample_row"]], snapshot)[0]
                said = [(stored[0][ordinal], stored[1][ordinal]) for ordinal in ordinals]
            for answers, (ids, logprobs), (token, _) in zip(by_position, said, places, strict=True):
                is_used = ids >= 0
                shown = ranked(ids[is_used], logprobs[is_used], token, whole=source == "hidden")
                answers.append(about | (shown if is_used.any() else {"error": INSIDE_A_CHUNK}))
        except (MopdError, OSError, ValueError) as error:
            gone = source == "hidden" and freed(store, name, [row["uid"]])
            said_of_it = "its hidden states were freed when they had served" if gone else str(error)
            for answers in by_position:
                answers[:] = [answer for answer in answers if answer["teacher"] != name]
                answers.append(about | {"error": said_of_it})
    return by_position


def freed(store: Store, teacher: str, uids: Iterable[str]) -> set[str]:
    """Samples whose hidden states of a teacher can be read no more, as of now."""
    uid_set = set(uids)
    keys = f"teacher = {literal(teacher)} AND kind = 'hidden' AND uid IN ({', '.join(map(literal, sorted(uid_set)))})"
    scored = store.table("scores", ["uid", "payload_row", "payload_crc"], keys)
    headers = store.signal_headers(teacher, "hidden", scored).to_pylist() if scored.num_rows else []
    return uid_set - {row["uid"] for row in headers if row["codec"] != FREED}


def _from_states(
    store: Store, teacher: Teacher, row: int, ordinals: Sequence[int], snapshot: Snapshot
) -> Iterator[tuple[Any, Any]]:
    states, stored = read_states(store, teacher, [(row, ordinal) for ordinal in ordinals], snapshot)
    if not stored.all():
        raise DamagedError(
            f"teacher {teacher.name!r}: the hidden states of sample row {row} were freed after training ([retain])"
        )
    for state in states:
        logprobs = log_softmax(head_logits(store.path(teacher.head_file), state))
        yield np.arange(len(logprobs)), logprobs


def ranked(ids: Any, logprobs: Any, token: int, *, whole: bool) -> dict[str, Any]:
    """The SHOWN likeliest of ids [K] with log-probs [K], and where the token stands among them. whole: K is all."""
    order = np.argsort(-logprobs, kind="stable")
    rank = np.flatnonzero(ids[order] == token)
    top = order[:SHOWN]
    return {
        "ids": ids[top].tolist(),
        "logprobs": [float(value) for value in logprobs[top]],
        "k": len(ids),
        "whole": whole,
        "rank": int(rank[0]) + 1 if len(rank) else None,
        "own": float(logprobs[order[rank[0]]]) if len(rank) else None,
        "tail": float(np.clip(1 - np.exp(logprobs[top].astype(np.float64)).sum(), 0, 1)),
        "entropy": float(-(np.exp(logprobs.astype(np.float64)) * logprobs).sum()) if whole else None,
    }


def with_pieces(said: dict[str, Any], decoder: Decoder | Numbers) -> dict[str, Any]:
    """An answer of `candidates` with the text of each id as `pieces`, harmless to look at; an error as it is."""
    if "ids" not in said:
        return said
    return said | {"pieces": [visible(text) for text in decoder.texts([[token] for token in said["ids"]])]}
