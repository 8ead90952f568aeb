"""Dimensions and lengths of per-token fields, checked before any value is cast."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.fields import PAYLOAD, RECORDED, Field, value
from mopd_dataplane.records import Sample
from mopd_dataplane.tables import SAMPLES

Places = tuple[int, str]
"""Length of an axis, and the name of its positions in a message."""

OF_SAMPLE: Mapping[str, Callable[[Sample], Places]] = {
    "token": lambda sample: (len(sample.tokens), "tokens"),
    "read": lambda sample: (max(len(sample.tokens) - 1, 0), "tokens but the last"),
    "response": lambda sample: (sample.response_len, "response tokens"),
    "trained": lambda sample: (sample.loss_tokens, "loss tokens"),
}
"""Axis → its length for a sample, for axes whose length follows from its tokens and its mask."""


def check_dimensions(array: NDArray[Any], field: Field, where: str) -> None:
    """Check that an array has the dimensions of its field: one, or two for a field with a row per position.

    Raises MismatchError if not.
    """
    dimensions = 2 if field.width else 1
    if array.ndim != dimensions:
        raise MismatchError(
            f"{where}: {field.name} has shape {list(array.shape)}; {dimensions} "
            f"dimension{'s are' if field.width else ' is'} needed: {field.doc.partition(';')[0]}"
        )


def check_length(array: NDArray[Any], field: Field, places: Places, where: str) -> None:
    """Check that there is a value, or a row, for each position of the field's axis. Raises MismatchError if not."""
    check_dimensions(array, field, where)
    count, name = places
    if len(array) != count:
        raise MismatchError(
            f"{where}: {field.name} has shape {list(array.shape)}; a {'row' if field.width else 'value'} for each of "
            f"{count} {name}"
        )


def check_sample_shapes(sample: Sample, where: str) -> None:
    """Check that the arrays of a sample fit prompt_len, its tokens and its mask. Raises MismatchError if not.

    Arrays whose length depends on other values (version spans, sampling masks) have only their dimensions checked.
    """
    arrays = {f: array for f in (*PAYLOAD, *RECORDED) if (array := value(sample, f.name)) is not None}
    for field, array in arrays.items():
        check_dimensions(array, field, where)
    if not 0 <= sample.prompt_len <= len(sample.tokens):
        raise MismatchError(f"{where}: prompt_len {sample.prompt_len} outside 0 to {len(sample.tokens)} tokens")
    for field, array in arrays.items():
        if field.axis in OF_SAMPLE:
            check_length(array, field, OF_SAMPLE[field.axis](sample), where)
        if field.width:
            check_width(array, field, SAMPLES.schema.field(field.width).type, where)


def check_width(array: NDArray[Any], field: Field, column: pa.DataType, where: str) -> None:
    """Check that rows have a value, and no more than their width column can hold. Raises MismatchError if not."""
    width, most = array.shape[1], int(np.iinfo(column.to_pandas_dtype()).max)
    if width > most or (len(array) and not width):
        raise MismatchError(f"{where}: {field.name} has {width} values a row; allowed: 1 to {most}")
