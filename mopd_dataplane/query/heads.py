"""Logits of a teacher from its stored hidden states and its head file.

Reads the head in numpy, block by block, so that no torch is loaded and memory stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mopd_kernels.layout import codec_named
from numpy.typing import NDArray

from mopd_dataplane.base.tensor_header import TensorEntry, read_tensor_header
from mopd_dataplane.errors import DamagedError, UnknownNameError
from mopd_dataplane.store.format.dataset_format import FREED

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot, Teacher
    from mopd_dataplane.store.dataset import Store

HEAD_ROWS = 16_384
"""Rows of a head multiplied at a time."""
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}


def read_states(
    store: Store, teacher: Teacher, positions: Sequence[tuple[int, int]], snapshot: Snapshot
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """[n, D] stored hidden states, and [n] whether each is stored: False where it was freed.

    positions: the row of a sample in `samples`, and which of its trained tokens.
    Raises UnknownNameError (a sample without hidden states, a head on an object store), DamagedError.
    """
    if store.root is None:
        raise UnknownNameError(
            "the teacher's LM head lies on an object store and is read from folders only; copy the store to a folder"
        )
    states, stored = np.zeros((len(positions), teacher.hidden_size), np.float32), np.zeros(len(positions), np.bool_)
    rows = list(dict.fromkeys(row for row, _ in positions))
    if not rows:
        return states, stored
    signals = store.signal_rows(teacher.name, "hidden", rows, snapshot).to_pylist()
    reader = store.hidden_reader(teacher.name, snapshot)
    payload_rows = [signal["payload_row"] for signal in signals]
    reader.locate(payload_rows)
    codecs = reader.describe(payload_rows)["codec"].to_pylist()
    of_row = {row: (signal, codec) for row, signal, codec in zip(rows, signals, codecs, strict=True)}
    for at, (row, ordinal) in enumerate(positions):
        signal, codec = of_row[row]
        if codec == FREED:
            continue
        buffer = bytearray(signal["bytes"] // max(1, signal["rows"]))
        reader.read_into(signal["payload_row"], ordinal * len(buffer), memoryview(buffer))
        stored[at] = True
        states[at] = decode_row(np.frombuffer(bytes(buffer), np.uint8), codec, teacher.hidden_size)
    return states, stored


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """[..., V] log-probs of logits, summed in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted.astype(np.float64)).sum(-1, keepdims=True)
    return np.asarray(shifted - np.log(total), np.float32)


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


def head_logits(path: Path, states: NDArray[np.float32]) -> NDArray[np.float32]:
    """[..., V] logits of states [..., D] from a head file (safetensors: `weight` [V, D], optional `bias`, softcap and
    scale).

    Raises DamagedError when the file is not a head of this width.
    """
    try:
        header = read_tensor_header(path)
        about, weight = header.metadata, header.tensors["weight"]
        rows, width = weight.shape
        matrix = _tensor(path, weight).reshape(rows, width)
        bias = _tensor(path, header.tensors["bias"]) if "bias" in header.tensors else None
    except DamagedError as error:
        raise DamagedError(f"head file {error}; or score again to rewrite it") from None
    except (OSError, ValueError, KeyError) as error:
        raise DamagedError(f"head file {path}: {error!r}; score again to rewrite it") from None
    if width != states.shape[-1]:
        raise DamagedError(
            f"head file {path} has rows of {width} values, the stored states have {states.shape[-1]}; score again to "
            "rewrite it"
        )
    logits = np.empty((*states.shape[:-1], rows), np.float32)
    for start in range(0, rows, HEAD_ROWS):
        logits[..., start : start + HEAD_ROWS] = states @ _floats(matrix[start : start + HEAD_ROWS]).T
    if bias is not None:
        logits += _floats(bias)
    logits *= float(about.get("logit_scale", 1.0))
    softcap = float(about.get("logit_softcap", 0.0))
    return (np.tanh(logits / softcap) * softcap).astype(np.float32) if softcap else logits


def _tensor(path: Path, entry: TensorEntry) -> NDArray[Any]:
    kind = np.dtype(_DTYPES[entry.dtype])
    return np.memmap(path, kind, "r", offset=entry.start, shape=((entry.end - entry.start) // kind.itemsize,))


def _floats(values: NDArray[Any]) -> NDArray[np.float32]:
    return _bf16(np.asarray(values)) if values.dtype == np.uint16 else np.asarray(values, np.float32)
