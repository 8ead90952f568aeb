"""One sample with all per-token data of the store: sampler, every teacher, mask, policy versions.

Arrays travel as base64 of little-endian bytes, which a page turns into typed arrays without parsing numbers. A signal
that is damaged, freed or missing is named beside what can be read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import MopdError
from mopd_dataplane.fields import ALIGNMENT, PAYLOAD, column_names
from mopd_dataplane.query.show import version_spans
from mopd_dataplane.query.text import visible
from mopd_dataplane.store.commit.token_stats import read_token_stats
from mopd_dataplane.store.format.arrow_rows import list_views
from mopd_dataplane.store.read.decode import Numbers, find_teacher_decoder

if TYPE_CHECKING:
    import pyarrow as pa

    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder

PIECE_CHARACTERS = 400
"""Longest text of one token that travels; a page shows its start."""
MASK_SIZES = "sampling_mask_sizes"
OF_TOKENS = ("logprob", "topk")
"""Kinds of signals that give each of the student's tokens a number."""
EXCERPT_CHARACTERS = 240
"""Characters of the last message of a prompt that a line of a table shows."""
EXCERPT_TOKENS = 48
MOST_STATS = 12
"""Passes over one sample whose statistics travel: teachers that scored it, then the first steps that trained it."""
STATS_SHOWN = {
    "logprob_gap": ("trainer − sampler log-prob", "nat"),
    "student_entropy": ("student entropy", "nat"),
    "teacher_entropy": ("teacher entropy", "nat"),
    "reverse_kl": ("reverse KL, exact", "nat"),
    "forward_kl": ("forward KL, exact", "nat"),
    "top1_agreement": ("same likeliest token", ""),
}
"""Title and unit of each statistic."""
PROMPT_CHARACTERS = 200_000
"""Longest prompt that travels; a page says how much of it is left out."""


@dataclass(frozen=True)
class Payload:
    """Arrays of one sample. R response tokens, M of them trained."""

    uid: str
    prompt_len: int
    tokens: NDArray[np.int32]
    """[L] prompt then response."""
    logprobs: NDArray[np.float32] | None
    """[R] as sampled."""
    mask: NDArray[np.uint8]
    """[R] 1 where the policy wrote."""
    version_starts: list[int]
    versions: list[int]
    mask_sizes: NDArray[np.int32] | None
    """[M] ids that top-k and top-p kept for each trained token."""

    @property
    def response(self) -> NDArray[np.int32]:
        """[R]"""
        return self.tokens[self.prompt_len :]


def packed(array: NDArray[Any], kind: str = "<f4") -> dict[str, str]:
    """An array for the page: its bytes in base64, and what they are."""
    return {"kind": kind, "data": base64.b64encode(np.ascontiguousarray(array, kind).tobytes()).decode()}


def read_payload(store: Store, row: dict[str, Any], snapshot: Snapshot) -> Payload:
    """Arrays of the sample of a row of the index, checked against their checksum. Raises DamagedError."""
    names = store.dataset("tokens", snapshot).schema.names
    sizes = MASK_SIZES if MASK_SIZES in names else None
    columns = [*column_names(PAYLOAD), *([sizes] if sizes else [])]
    rows = store.read_tokens([row["sample_row"]], columns, snapshot, verify=True)
    sizes_read = rows[sizes] if sizes else None
    return Payload(
        row["uid"], row["prompt_len"], _values(rows["tokens"]),
        _values(rows["logprobs"]) if rows["logprobs"].null_count == 0 else None,
        _values(rows["loss_mask"]), rows["version_starts"][0].as_py(), rows["versions"][0].as_py(),
        _values(sizes_read) if sizes_read is not None and sizes_read.null_count == 0 else None,
    )  # fmt: skip


def _values(column: pa.ChunkedArray) -> NDArray[Any]:
    return np.asarray(column.chunk(0).flatten() if column.num_chunks == 1 else column.combine_chunks().flatten())


def pieces_of(decoder: Decoder | Numbers, ids: NDArray[np.int32]) -> list[str]:
    """Text that each token adds, harmless to look at; ids stand for themselves where they cannot be decoded."""
    try:
        pieces = decoder.pieces(ids.tolist())
    except OverflowError:  # a negative id
        pieces = Numbers().pieces(ids.tolist())
    return [visible(piece if len(piece) <= PIECE_CHARACTERS else f"{piece[:PIECE_CHARACTERS]}…") for piece in pieces]


def excerpts(
    store: Store, rows: Sequence[dict[str, Any]], snapshot: Snapshot, decoder: Decoder | Numbers
) -> dict[str, dict[str, str]]:
    """End of the prompt and start of the response of each sample by uid, for lines of a table; `error` where damaged.
    Of a prompt in messages, the last message without the template around it.

    All are read at once; only when something among them is damaged, each by itself.
    """
    if not rows:
        return {}
    try:
        read = store.read_tokens([row["sample_row"] for row in rows], ["tokens"], snapshot, verify=True)
    except (MopdError, OSError) as error:
        if len(rows) == 1:
            return {rows[0]["uid"]: {"error": str(error)}}
        alone = [excerpts(store, [row], snapshot, decoder) for row in rows]
        return {uid: texts_by_uid for part in alone for uid, texts_by_uid in part.items()}
    asked = _last_messages(store, {row["prompt_id"] for row in rows}, snapshot)
    texts_by_uid = {}
    for row, view in zip(rows, list_views(read["tokens"]), strict=True):
        tokens = np.asarray(view)
        prompt_ids, said = tokens[: row["prompt_len"]][-EXCERPT_TOKENS:], tokens[row["prompt_len"] :][:EXCERPT_TOKENS]
        texts = {"prompt": prompt_ids, "response": said}
        shown = {key: "".join(pieces_of(decoder, ids)) for key, ids in texts.items()}
        if row["prompt_id"] in asked:
            shown["prompt"] = visible(asked[row["prompt_id"]])
        texts_by_uid[row["uid"]] = shown
    return texts_by_uid


def _last_messages(store: Store, prompt_ids: set[str], snapshot: Snapshot) -> dict[str, str]:
    """Prompt -> the end of its last message, of those of some prompts that are messages."""
    names = ", ".join(map(literal, sorted(prompt_ids)))
    prompts = store.table("prompts", ["prompt_id", "messages"], f"prompt_id IN ({names}) AND messages != ''", snapshot)
    last = {row["prompt_id"]: json.loads(row["messages"])[-1].get("content") for row in prompts.to_pylist()}
    return {name: text[-EXCERPT_CHARACTERS:] for name, text in last.items() if isinstance(text, str)}


def score_rows(store: Store, sample_row: int, snapshot: Snapshot) -> pa.Table:
    """Rows of `scores` of one sample; found by its row, which takes a third of the time that its uid does."""
    return store.table("scores", filter=f"sample_row = {int(sample_row)}", snapshot=snapshot)


def read_teachers(
    store: Store, row: dict[str, Any], scores: pa.Table, snapshot: Snapshot, kinds: Sequence[str] = OF_TOKENS
) -> list[dict[str, Any]]:
    """What each teacher stored of these kinds, as Store.read_signal returns it; `kinds`, all of its kinds; `errors` by
    kind."""
    said: dict[str, dict[str, Any]] = {}
    for score in scores.sort_by([("teacher", "ascending"), ("kind", "ascending")]).to_pylist():
        teacher = said.setdefault(score["teacher"], {"name": score["teacher"], "kinds": [], "errors": {}})
        teacher["kinds"].append(score["kind"])
        teacher["mean_reverse_kl"] = finite(score["mean_reverse_kl"])
        if score["kind"] not in kinds:
            continue  # hidden states are read for one position at a time; another package's kind is only named
        try:
            signal = store.read_signal(score["teacher"], score["kind"], [row["sample_row"]], snapshot, verify=True)[0]
        except (MopdError, OSError) as error:
            teacher["errors"][score["kind"]] = str(error)
            continue
        teacher[score["kind"]] = signal
    return list(said.values())


def at_trained(mask: NDArray[np.uint8], values: NDArray[Any], missing: Any) -> NDArray[Any]:
    """[R] from [M] values of trained tokens."""
    out = np.full(len(mask), missing, values.dtype)
    out[mask.astype(bool)] = values
    return out


def topk_columns(payload: Payload, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> dict[str, Any]:
    """Columns from a teacher's top-k [M, K]: rank of the sampled token (1 first, 0 not among them), mass outside."""
    trained = payload.response[payload.mask.astype(bool)]
    order = np.argsort(-logprobs, axis=1, kind="stable")
    hit = np.take_along_axis(ids, order, 1) == trained[:, None]
    rank = np.where(hit.any(1), hit.argmax(1) + 1, 0).astype(np.int32)
    tail = np.clip(1 - np.exp(logprobs.astype(np.float64)).sum(1), 0, 1).astype(np.float32)
    tail[(ids < 0).all(1)] = np.nan
    return {
        "k": int(ids.shape[1]),
        "rank": packed(at_trained(payload.mask, rank, -1), "<i4"),
        "tail": packed(at_trained(payload.mask, tail, np.nan)),
    }


@lru_cache(maxsize=4)
def _teacher_decoder(store: Store, digest: str) -> Decoder | Numbers:
    return find_teacher_decoder(store, digest)


def alignment_shown(
    store: Store, teacher: str, ends: NDArray[np.uint8], tokens: NDArray[np.int32], teacher_ends: NDArray[np.uint8]
) -> dict[str, Any]:
    """The response in a teacher's own tokens: `ids` and `pieces` [Q], `teacher_ends` [Q] and the student's `ends` [R],
    1 at the last token of each chunk."""
    decoder = _teacher_decoder(store, store.teachers()[teacher].tokenizer_digest)
    return {
        "ids": packed(tokens, "<i4"), "pieces": pieces_of(decoder, tokens), "ends": packed(ends, "<u1"),
        "teacher_ends": packed(teacher_ends, "<u1"),
    }  # fmt: skip


def describe(
    store: Store, row: dict[str, Any], snapshot: Snapshot, decoder: Decoder | Numbers, prompt: dict[str, Any]
) -> dict[str, Any]:
    """Everything the page of a sample needs. `damage` says what of the sample itself could not be read."""
    about = {name: value for name, value in row.items() if name not in ("payload_row", "payload_crc")}
    view: dict[str, Any] = {
        "uid": row["uid"], "row": about, "prompt": prompt_shown(prompt), "damage": "", "teachers": [],
    }  # fmt: skip
    try:
        payload = read_payload(store, row, snapshot)
    except (MopdError, OSError) as error:
        return view | {"damage": str(error)}
    view |= {
        "prompt_len": payload.prompt_len,
        "prompt_pieces": "".join(pieces_of(decoder, payload.tokens[: payload.prompt_len]))[:PROMPT_CHARACTERS],
        "ids": packed(payload.response, "<i4"),
        "pieces": pieces_of(decoder, payload.response),
        "mask": packed(payload.mask, "<u1"),
        "sampler": packed(payload.logprobs) if payload.logprobs is not None else None,
        "spans": version_spans(payload.version_starts, payload.versions, len(payload.mask)),
        "kept": packed(at_trained(payload.mask, payload.mask_sizes, -1), "<i4")
        if payload.mask_sizes is not None
        else None,
    }
    for teacher in read_teachers(
        store, row, score_rows(store, row["sample_row"], snapshot), snapshot, (*OF_TOKENS, ALIGNMENT)
    ):
        logprob, topk = teacher.pop("logprob", None), teacher.pop("topk", None)
        teacher["logprob"] = packed(logprob) if logprob is not None else None
        if topk is not None:
            teacher["topk"] = topk_columns(payload, *topk)
        if (own_tokens := teacher.pop(ALIGNMENT, None)) is not None:
            try:
                teacher[ALIGNMENT] = alignment_shown(store, teacher["name"], *own_tokens)
            except (MopdError, OSError) as error:
                teacher["errors"][ALIGNMENT] = str(error)
        view["teachers"].append(teacher)
    view["stats"] = stats_of(store, row["uid"], payload.mask, snapshot)
    return view


def prompt_shown(prompt: dict[str, Any]) -> dict[str, Any]:
    """Columns of a row of `prompts` for a page: texts that are harmless to look at, and `cut`, characters left out."""
    texts = {key: str(prompt.get(key, "")) for key in ("text", "answer", "teacher_context")}
    shown: dict[str, Any] = {key: visible(text[:PROMPT_CHARACTERS]) for key, text in texts.items()}
    return shown | {"cut": max(0, len(texts["text"]) - PROMPT_CHARACTERS), "messages": _messages(prompt)}


def _messages(prompt: dict[str, Any]) -> list[dict[str, str]]:
    """Role and text of each message of a chat, harmless to look at; empty where the prompt is text alone."""
    messages = json.loads(prompt.get("messages") or "[]")
    return [
        {"role": visible(str(message.get("role", ""))), "text": visible(_content(message)[:PROMPT_CHARACTERS])}
        for message in messages
    ]


def _content(message: dict[str, Any]) -> str:
    """The text of a message; of one in parts, and of calls of tools, their JSON."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return text + (f"\n{json.dumps(calls, ensure_ascii=False)}" if calls else "")


def stats_of(store: Store, uid: str, mask: NDArray[np.uint8], snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Stored statistics by key: `title`, `unit`, `diverging` and `values` [R], NaN where nothing was trained.

    Of several steps that trained the sample each has its own.
    """
    stats: dict[str, dict[str, Any]] = {}
    for row in read_token_stats(store, uid, snapshot)[:MOST_STATS]:
        where = f"step {row['step']}" if row["step"] >= 0 else f"scored by {row['teacher']}"
        key = f"{row['stage']}/{row['step']}/{row['teacher']}"
        for name, (title, unit) in STATS_SHOWN.items():
            if row[name] is not None and len(row[name]) == int(mask.sum()):
                stats[f"{name}/{key}"] = {
                    "title": f"{title}, {where}", "unit": unit, "diverging": name == "logprob_gap",
                    "values": packed(at_trained(mask, row[name], np.nan)),
                }  # fmt: skip
    return stats


def finite(value: float | None) -> float | None:
    """The number, or None for what JSON has no word for."""
    return None if value is None or not np.isfinite(value) else float(value)
