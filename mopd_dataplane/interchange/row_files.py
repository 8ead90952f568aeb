"""Reads JSONL, Parquet and Arrow files row by row, each with its location, and checks the types of fields."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from mopd_dataplane.base.file_urls import PathOrUrl, open_file, suffix_of
from mopd_dataplane.errors import InputError

SUFFIXES = (".jsonl", ".parquet", ".arrow")
LINE_BYTES = 256 << 20
"""Longest line of a JSONL file, in bytes: about twenty million tokens."""
LONGEST = 1 << 24
"""Most characters of a text, and most token ids of a row: tokenising takes about a hundred times the text's memory."""
_ROWS = 64
LARGEST = float(np.finfo(np.float32).max)

Fields = dict[str, Any]


def read_rows(file: PathOrUrl) -> Iterator[tuple[str, Fields]]:
    """Yield (location, fields) of every row: line numbers of JSONL, row numbers of Parquet and Arrow, from 1.

    Raises InputError with the location of a row that cannot be read.
    """
    with open_file(file) as content:
        yield from rows_in(content, file)


def rows_in(content: BinaryIO, file: PathOrUrl) -> Iterator[tuple[str, Fields]]:
    """Yield the rows of an open file like read_rows; the suffix of its name selects the format."""
    try:
        yield from _tabular(content, file) if suffix_of(file) in (".parquet", ".arrow") else _jsonl(content, file)
    except OSError as error:
        raise InputError(f"{file} cannot be read to its end ({error})") from None


def _jsonl(lines: BinaryIO, file: PathOrUrl) -> Iterator[tuple[str, Fields]]:
    number = 0
    while line := lines.readline(LINE_BYTES + 1):
        number += 1
        if line.strip():
            yield f"{file}:{number}", read_line(line, f"{file}:{number}")


def read_line(line: bytes, location: str) -> Fields:
    """Parse a line of a JSONL file. Raises InputError when it holds no object."""
    if len(line) > LINE_BYTES:
        raise InputError(f"{location}: longer than {LINE_BYTES:,} bytes; is this one JSON object a line?")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{location}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f"{location}: a {type(fields).__name__}; each line must be one JSON object")
    return fields


def _tabular(content: BinaryIO, file: PathOrUrl) -> Iterator[tuple[str, Fields]]:
    number = 0
    try:
        for batch in _batches(content, suffix_of(file)):
            for start in range(0, batch.num_rows, _ROWS):
                for fields in batch.slice(start, _ROWS).to_pylist():
                    number += 1
                    yield f"{file}:{number}", fields
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise InputError(f"{file}: row {number + 1} cannot be read ({error})") from None


def _batches(content: BinaryIO, suffix: str) -> Iterable[Any]:
    """Yield the record batches of a Parquet file, an Arrow file, or an Arrow stream.

    A folder of Hugging Face datasets holds Arrow streams.
    """
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        parquet: Iterable[Any] = pq.ParquetFile(content).iter_batches(batch_size=_ROWS)
        return parquet
    whole = content.read(len(_ARROW_FILE)) == _ARROW_FILE
    content.seek(0)
    opened: Any = pa.ipc.open_file(content) if whole else pa.ipc.open_stream(content)
    return (opened.get_batch(i) for i in range(opened.num_record_batches)) if whole else opened


_ARROW_FILE = b"ARROW1"
"""First bytes of an Arrow file; a stream begins differently."""


def text(fields: Fields, name: str, location: str, *, default: str | None = None) -> str:
    """Return a string field. Raises InputError when it has another type, or is missing without a default."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise InputError(f"{location}: field {name!r} is {_shown(value)}, expected text")
    check_text(value, name, location)
    return value


def check_text(value: str, name: str, location: str) -> None:
    """Check that a text is not too long to tokenise, and has no half of a surrogate pair, which JSON can write and our
    files cannot. Raises InputError."""
    if len(value) > LONGEST:
        raise InputError(
            f"{location}: field {name!r} has {len(value):,} characters; at most {LONGEST:,} are taken: leave the row "
            "out, or cut it"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{location}: field {name!r} is no valid Unicode at character {error.start}") from None


def _checked(
    fields: Fields, name: str, location: str, fits: Callable[[Any], bool], expected: str, default: Any = None
) -> Any:
    """Return a field, or the default if it is missing. Raises InputError when it does not fit."""
    value = fields.get(name)
    if value is not None and not fits(value):
        raise InputError(f"{location}: field {name!r} is {_shown(value)}, expected {expected}")
    return default if value is None else value


def integer(fields: Fields, name: str, location: str, *, default: int = 0) -> int:
    """Return an integer field, or the default if it is missing."""
    return int(_checked(fields, name, location, _is_whole, "an integer", default))


def _is_whole(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def number(fields: Fields, name: str, location: str) -> float | None:
    """Return a finite number, or None if the field is missing."""
    value = _checked(fields, name, location, _is_number, "a finite number")
    return None if value is None else float(value)


def _is_number(value: Any) -> bool:
    """Check if a value is a number that fits a float32 column; JSON has integers of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def stored(fields: Fields, column: pa.Field, location: str) -> Any:
    """Return a field in the type of its column: as text, integer or number."""
    kind = column.type
    read: Callable[[Fields, str, str], Any]
    read = text if pa.types.is_string(kind) else integer if pa.types.is_integer(kind) else number
    return read(fields, column.name, location)


def integers(value: Any, name: str, location: str) -> list[int]:
    """Return a list of non-negative integers that fit 32 bits."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InputError(f"{location}: field {name!r} is {_shown(value)}, expected a list of token ids")
    if len(value) > LONGEST:
        raise InputError(
            f"{location}: field {name!r} has {len(value):,} values; at most {LONGEST:,} are taken: leave the row out, "
            "or cut it"
        )
    for position, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 1 << 31:
            raise InputError(
                f"{location}: {name}[{position}] is {_shown(item)}, expected an integer from 0 to 2^31 - 1"
            )
    return list(value)


def floats(value: Any, name: str, location: str) -> list[float]:
    """Return a list of finite numbers."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InputError(f"{location}: field {name!r} is {_shown(value)}, expected a list of numbers")
    for position, item in enumerate(value):
        if not _is_number(item):
            raise InputError(f"{location}: {name}[{position}] is {_shown(item)}, expected a finite number")
    return [float(item) for item in value]


def objects(fields: Fields, name: str, location: str) -> list[Fields]:
    """Return a list of objects; an empty one if the field is missing."""
    items: list[Fields] = _checked(fields, name, location, _is_objects, "a list of objects", [])
    return items


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def part(fields: Fields, name: str, location: str) -> Fields:
    """Return an object; an empty one if the field is missing."""
    member: Fields = _checked(fields, name, location, lambda value: isinstance(value, dict), "an object", {})
    return member


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{value!r:.60}"
