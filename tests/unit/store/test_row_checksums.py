"""Row checksums: over content alone, the same however rows are cut and merged, and another one for any other value."""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.store.format.row_checksums import row_crcs, with_row_crcs, wrong_rows

SCHEMA = pa.schema(
    [
        pa.field("uid", pa.string(), nullable=False), pa.field("n", pa.int32()), pa.field("x", pa.float32()),
        pa.field("y", pa.float64()), pa.field("at", pa.timestamp("us", tz="UTC")), pa.field("text", pa.string()),
        pa.field("rows", pa.list_(pa.int64())), pa.field("names", pa.list_(pa.string())), pa.field("b", pa.bool_()),
    ]
)  # fmt: skip
TIME = datetime(2026, 11, 22, tzinfo=UTC)
ROW = st.fixed_dictionaries(
    {
        "uid": st.text(max_size=5), "n": st.none() | st.integers(-(2**31), 2**31 - 1),
        "x": st.none() | st.floats(width=32), "y": st.none() | st.floats(),
        "at": st.none() | st.integers(0, 10**9).map(lambda s: TIME + timedelta(microseconds=s)),
        "text": st.none() | st.text(max_size=9), "rows": st.none() | st.lists(st.integers(0, 2**40), max_size=4),
        "names": st.none() | st.lists(st.text(max_size=3), max_size=3), "b": st.none() | st.booleans(),
    }
)  # fmt: skip


def table(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def by_hand(row: dict) -> int:
    """The definition, one value at a time."""
    names = sorted(name for name, value in row.items() if value is not None)
    head, tail = b"", b""
    for name in names:
        value = row[name]
        if isinstance(value, str):
            content = value.encode()
        elif isinstance(value, list):
            content = json.dumps(value).encode() if name == "names" else b"".join(struct.pack("<q", v) for v in value)
        else:
            head += _number(name, value)
            continue
        head += struct.pack("<q", len(content))
        tail += content
    return crc32c("\0".join(names).encode() + head + tail)


def _number(name: str, value: float | datetime) -> bytes:
    if isinstance(value, datetime):
        return struct.pack("<q", round((value - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)))
    if name == "x":
        return struct.pack("<q", struct.unpack("<i", np.float32(value).tobytes())[0])
    return struct.pack("<d", value) if name == "y" else struct.pack("<q", int(value))


@settings(deadline=None)
@given(st.lists(ROW, max_size=12))
def test_it_is_what_its_definition_says(rows: list[dict]) -> None:
    assert row_crcs(table(rows)).tolist() == [by_hand(row) for row in rows]


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=8), st.data())
def test_cutting_merging_order_and_later_columns_change_nothing(rows: list[dict], data: st.DataObject) -> None:
    whole = table(rows)
    cut = data.draw(st.integers(0, len(rows)))
    merged = pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])
    order = data.draw(st.permutations(SCHEMA.names))
    later = whole.append_column("later", pa.nulls(len(rows), pa.int64()))
    crcs = row_crcs(whole).tolist()
    assert row_crcs(merged).tolist() == crcs
    assert row_crcs(whole.select(order)).tolist() == crcs
    assert row_crcs(later).tolist() == crcs
    assert list(wrong_rows(with_row_crcs(whole))) == []


@settings(deadline=None)
@given(ROW, st.data())
def test_another_value_is_another_sum(row: dict, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEMA.names))
    other = {**row, name: data.draw(ROW)[name]}
    before, after = table([row]), table([other])
    same = repr(before[name].to_pylist()) == repr(after[name].to_pylist())
    assert same or row_crcs(before)[0] != row_crcs(after)[0]


@pytest.mark.parametrize(("moved", "to"), [({"text": "ab", "uid": "c"}, {"text": "a", "uid": "bc"}),
                                           ({"text": None, "uid": ""}, {"text": "", "uid": ""})])  # fmt: skip
def test_shifted_boundaries_and_nulls_differ(moved: dict, to: dict) -> None:
    assert row_crcs(table([moved]))[0] != row_crcs(table([to]))[0]


def test_the_wrong_row_is_named_with_both_sums() -> None:
    rows = with_row_crcs(table([{"uid": "a", "n": 1}, {"uid": "b", "n": 2}]))
    changed = rows.set_column(1, SCHEMA.field("n"), pa.array([1, 3], pa.int32()))
    ((row, actual_crc, committed),) = wrong_rows(changed)
    assert (row, committed) == (1, rows["row_crc"][1].as_py())
    assert actual_crc == by_hand({"uid": "b", "n": 3})
