"""Checks of a sample's values before any cast: values that numpy would wrap, round or overflow are refused by name."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.fields import IDS, INT32, PAYLOAD, RECORDED
from mopd_dataplane.fields import value as value_of
from mopd_dataplane.records import Sample
from mopd_dataplane.store.format.shapes import check_sample_shapes

_FEW = 4096
"""Number of uids up to which they are looked up by name; for more, all of them are read."""
INT64 = (-(1 << 63), (1 << 63) - 1)
INT16 = (0, (1 << 15) - 1)
"""Range of counts in a column of int16."""
LOWEST = float(np.finfo(np.float32).min)
"""Lowest log-prob that a column of float32 can hold."""
_WHOLES = {
    "group_index": INT16, "iteration": INT32, "writer_seq": INT64, "top_k": IDS, "prompt_len": IDS, "turns": INT16,
    "interruptions": INT16,
}  # fmt: skip
_INTEGER, _NUMBER = (int, np.integer), (int, float, np.number)
"""Types of values; a union that is created at every check takes three times as long as a tuple."""
_TEXTS = (
    "uid", "prompt_id", "group_id", "domain", "effort", "stage", "writer", "policy", "tokenizer", "finish_reason",
    "resume", "abandoned", "sampler",
)  # fmt: skip


def whole_numbers(values: ArrayLike, low: int, high: int, what: str) -> NDArray[Any]:
    """Return the values as an array of integers of any width.

    Raises MismatchError naming the first value that is outside low .. high, or no whole number.
    """
    array = np.asarray(values)
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iub":
        raise MismatchError(
            f"{what} holds {array.dtype} values ({array.flat[0]!r:.40} first); whole numbers are needed"
        )
    least, most = _range_of(array.dtype)
    if low <= least and most <= high:
        return array
    if low == 0 and least < 0:  # one pass: as unsigned, negative values are the largest
        outside = array.view(f"u{array.itemsize}").max() > min(high, most)
    else:
        outside = array.min() < low or array.max() > high
    if outside:
        index = int(np.argmax((array < low) | (array > high)))
        raise MismatchError(f"{what} holds {array.flat[index]} at place {index}; allowed: {low} to {high}")
    return array


@lru_cache(maxsize=16)
def _range_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the smallest and largest value of an integer dtype."""
    return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


def log_probs(values: ArrayLike, what: str) -> NDArray[Any]:
    """Return the values as floats. Raises EngineError naming the first that is no log-prob: NaN, above 0, below
    LOWEST."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "fiu":
        raise EngineError(f"{what} holds {array.dtype} values ({array.flat[0]!r:.40} first); log-probs are needed")
    if array.size and not (array.max() <= 0 and array.min() >= LOWEST):  # a NaN fails both
        index = int(np.argmin((array <= 0) & (array >= LOWEST)))
        raise EngineError(
            f"{what} holds log-prob {array.flat[index]} at response position {index}; allowed: finite and <= 0; "
            "check the policy's weights and dtype"
        )
    return array


def check_values(sample: Sample) -> None:
    """Check shapes and values of a sample. Raises MismatchError, or EngineError for log-probs."""
    where = f"sample {sample.uid!s:.40}"
    _check_types(sample, where)
    for name, (low, high) in _WHOLES.items():
        value = getattr(sample, name)
        if isinstance(value, bool) or not isinstance(value, _INTEGER) or not low <= value <= high:
            raise MismatchError(f"{where}: {name} is {value!r:.40}; allowed: whole numbers, {low} to {high}")
    check_sample_shapes(sample, where)
    for field in (*PAYLOAD, *RECORDED):
        if field.values is not None and (array := value_of(sample, field.name)) is not None:
            whole_numbers(array, *field.values, f"{where}: {field.name}")
    if sample.logprobs is not None:
        log_probs(sample.logprobs, where)
    for name, most, kind in (("temperature", math.inf, "at least 0"), ("top_p", 1.0, "0 to 1")):
        value = getattr(sample, name)
        if not isinstance(value, _NUMBER) or not math.isfinite(value) or not 0 <= value <= most:
            raise MismatchError(f"{where}: {name} is {value!r:.40}; allowed: finite numbers, {kind}")


def _check_types(sample: Sample, where: str) -> None:
    """Check that texts can be written and that arrays are numpy arrays. Raises MismatchError naming the field."""
    for name in _TEXTS:
        text = getattr(sample, name)
        if not isinstance(text, str) and not (text is None and name == "sampler"):
            raise MismatchError(f"{where}: {name} is {text!r:.40}; a text is needed")
        if text and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise MismatchError(f"{where}: {name} is {text!r:.40}: {error}") from None
    for field in (*PAYLOAD, *RECORDED):
        array = value_of(sample, field.name)
        if not isinstance(array, np.ndarray) and not (array is None and field.null):
            raise MismatchError(f"{where}: {field.name} is {array!r:.40}; a numpy array is needed")


def other_content(dataset: lance.LanceDataset | None, uids: Sequence[str], crcs: Sequence[int]) -> list[int]:
    """Return the indices of samples whose uid names other content: in the dataset, or at an earlier index.

    dataset: a version of `samples`; None when there is no store yet. crcs: payload_crc of each sample.
    """
    crc_by_uid: dict[str, int] = {}
    if dataset is not None and len(uids):
        few = len(uids) <= _FEW
        names = ", ".join(f"'{uid}'" for uid in dict.fromkeys(uids)) if few else ""
        rows = dataset.to_table(columns=["uid", "payload_crc"], filter=f"uid IN ({names})" if few else None)
        rows = rows.filter(pc.is_in(rows["uid"], value_set=pa.array(uids, pa.string())))
        crc_by_uid |= zip(rows["uid"].to_pylist(), rows["payload_crc"].to_pylist(), strict=True)
    return [
        index for index, (uid, crc) in enumerate(zip(uids, crcs, strict=True)) if crc_by_uid.setdefault(uid, crc) != crc
    ]
