"""Contract of an importer (interchange/rows.py), checked on rows of its format."""

from collections.abc import Iterable, Mapping
from typing import Any

from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.rows import Reader, Row

PLACE = "file.jsonl:7"


def check_importer(reader: Reader, rows: Iterable[Mapping[str, Any]]) -> None:
    """Read rows that the format allows, and raise AssertionError for what an import could not use.

    rows: at least one, as parsed from JSON or Parquet.
    """
    copies = [dict(row) for row in rows]
    assert copies, "give at least one row of the format"
    for fields in copies:
        before = repr(fields)
        rows_read = list(reader(fields, PLACE))
        assert rows_read, f"no response in {before:.200}"
        assert repr(fields) == before, "the reader changed the row that it was given"
        assert list(reader(fields, PLACE)) == rows_read, "the same row read twice gives other responses"
        for row in rows_read:
            _check_row(row)
    for malformed in ({}, {name: object() for name in copies[0]}):
        try:
            list(reader(malformed, PLACE))
        except InputError as error:
            if PLACE not in str(error):
                raise AssertionError(f"the error does not name the place: {error}") from error
        except Exception as error:
            raise AssertionError(f"a malformed row raises {error!r}, expected InputError") from error
        else:
            raise AssertionError(f"a malformed row ({sorted(malformed)}) was read as if it were whole")


def _check_row(row: Row) -> None:
    assert isinstance(row, Row), f"{type(row).__name__} is no Row"
    assert row.location == PLACE, f"place is {row.location!r}, expected the one that was given"
    assert (row.prompt_ids is None) == (row.response_ids is None), "prompt_ids and response_ids: both or neither"
    if row.prompt_ids is None or row.response_ids is None:
        assert row.prompt is not None, "neither ids nor a prompt"
        assert row.response is not None, "neither ids nor a response"
        return
    for name, values in (("logprobs", row.logprobs), ("loss_mask", row.loss_mask)):
        length = len(row.response_ids)
        assert values is None or len(values) == length, f"{name} has {len(values or ())} values, {length} tokens"
