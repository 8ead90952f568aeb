"""Each teacher's likeliest tokens at one position, from `topk` or from hidden state times head.

Reads a row of states and the head in numpy, block by block, so that no torch is loaded and memory stays small.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mopd_kernels.layout import codec_named
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError, MopdError, UnknownNameError
from mopd_dataplane.query.lineage import literal
from mopd_dataplane.query.text import visible
from mopd_dataplane.store.format.dataset_format import FREED
from mopd_dataplane.tables import signal_table

if TYPE_CHECKING:
    import pyarrow as pa

    from mopd_dataplane.records import Snapshot, Teacher
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers

SHOWN = 12
"""Candidates of one teacher."""
HEAD_ROWS = 16_384
"""Rows of a head multiplied at a time."""
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}


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
                answers.append(about | ranked(ids, logprobs, token, whole=source == "hidden"))
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
    keys = f"uid IN ({', '.join(map(literal, sorted(uid_set)))})"
    table = store.table(signal_table(teacher, "hidden"), ["uid", "codec"], keys).to_pylist()
    return uid_set - {row["uid"] for row in table if row["codec"] != FREED}


def _from_states(
    store: Store, teacher: Teacher, row: int, ordinals: Sequence[int], snapshot: Snapshot
) -> Iterator[tuple[Any, Any]]:
    where = store.signal_rows(teacher.name, "hidden", [row], snapshot)
    codec, count, size = where["codec"][0].as_py(), where["rows"][0].as_py(), where["bytes"][0].as_py()
    if store.root is None:
        raise UnknownNameError(
            "the teacher's head lies on an object store; copy the store to a folder to multiply by it"
        )
    width = size // max(1, count)
    reader = store.hidden_reader(teacher.name, snapshot)
    for ordinal in ordinals:
        buffer = bytearray(width)
        reader.read_into(where["payload_row"][0].as_py(), ordinal * width, memoryview(buffer))
        state = decode_row(np.frombuffer(bytes(buffer), np.uint8), codec, teacher.hidden_size)
        logits = head_logits(store.path(teacher.head_file), state)
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum())
        yield np.arange(len(logprobs)), logprobs.astype(np.float32)


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


def decode_row(encoded: NDArray[np.uint8], codec: str, width: int) -> NDArray[np.float32]:
    """[D] float32 of one stored hidden state, as mopd_kernels decodes it. Raises ValueError for an unknown codec."""
    form = codec_named(codec)
    start = form.codes_offset(width)
    scales, codes = encoded[: form.groups(width) * form.scale_bytes], encoded[start : start + form.codes_bytes(width)]
    if codec == "fp32":
        return codes.view("<f4").astype(np.float32)
    if codec == "bf16":
        return _bf16(codes.view("<u2"))
    if codec == "mxfp4":
        nibbles = np.stack((codes & 15, codes >> 4), 1).reshape(-1)[:width]
        values = _FP4[nibbles & 7] * np.where(nibbles >= 8, -1.0, 1.0).astype(np.float32)
        factor = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    else:
        values = codes.view(np.int8).astype(np.float32) if codec == "int8" else _e4m3(codes)
        factor = scales.view("<f4")
    values = (values * np.repeat(factor, form.group)[:width]).astype(np.float32)
    return _turned(values, form.rotation(width))


def _bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    exponent, fraction = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32) / 8
    size = np.where(exponent == 0, np.ldexp(fraction, -6), np.ldexp(1 + fraction, exponent - 7))
    return np.where(codes >= 128, -size, size).astype(np.float32)


def _turned(row: NDArray[np.float32], span: int) -> NDArray[np.float32]:
    """Each span times the orthonormal Hadamard matrix of its size, which is its own inverse."""
    turned = row / np.float32(np.sqrt(span))
    half = 1
    while half < span:
        pairs = turned.reshape(-1, 2, half)
        turned = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
        half *= 2
    return turned.reshape(-1)


def head_logits(path: Path, state: NDArray[np.float32]) -> NDArray[np.float32]:
    """[V] logits of one state from a head file (safetensors: `weight` [V, D], optional `bias`, softcap and scale).

    Raises DamagedError when the file is not a head of this width.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        about, weight = header.get("__metadata__", {}), header["weight"]
        rows, width = weight["shape"]
        matrix = _tensor(path, 8 + size, weight).reshape(rows, width)
        bias = _tensor(path, 8 + size, header["bias"]) if "bias" in header else None
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise DamagedError(f"head file {path}: {error!r}; score again to rewrite it") from None
    if width != len(state):
        raise DamagedError(f"head file {path} is {width} wide, the stored states are {len(state)}")
    logits = np.empty(rows, np.float32)
    for start in range(0, rows, HEAD_ROWS):
        logits[start : start + HEAD_ROWS] = _floats(matrix[start : start + HEAD_ROWS]) @ state
    if bias is not None:
        logits += _floats(bias)
    logits *= float(about.get("logit_scale", 1.0))
    softcap = float(about.get("logit_softcap", 0.0))
    return (np.tanh(logits / softcap) * softcap).astype(np.float32) if softcap else logits


def _tensor(path: Path, start: int, entry: dict[str, Any]) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    kind = np.dtype(_DTYPES[entry["dtype"]])
    return np.memmap(path, kind, "r", offset=start + begin, shape=((end - begin) // kind.itemsize,))


def _floats(values: NDArray[Any]) -> NDArray[np.float32]:
    return _bf16(np.asarray(values)) if values.dtype == np.uint16 else np.asarray(values, np.float32)
