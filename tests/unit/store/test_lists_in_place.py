"""Lists that are read from their files by byte range are what Lance reads, and all that is laid out otherwise is left
to Lance."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import store_builders as build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lance.file import LanceFileReader
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import payload_crc
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.lance_pages import NotPlain, Page, list_counts, read_pages
from mopd_dataplane.store.read import list_files, row_reader
from mopd_dataplane.store.read import lists as lists_module
from mopd_dataplane.store.read.list_files import ListFiles
from mopd_dataplane.store.read.lists import FileLists, HeldLists, Lists

KINDS = {"ids": pa.int32(), "mask": pa.uint8()}
COLUMNS = tuple(KINDS)
Row = tuple[list[int] | None, list[int]]


def checksum(arrays: Sequence[NDArray[Any] | None]) -> int:
    return payload_crc(*arrays)


def table_of(rows: Sequence[Row]) -> pa.Table:
    fields = [
        pa.field(name, pa.list_(pa.field("item", kind, nullable=False)), name == "ids") for name, kind in KINDS.items()
    ]
    columns = {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}
    return pa.table({"uid": pa.array([f"{n:032x}" for n in range(len(rows))]), **columns}).cast(
        pa.schema([pa.field("uid", pa.string()), *fields])
    )


def write(uri: str, parts: Sequence[Sequence[Row]], storage: str = "2.0") -> lance.LanceDataset:
    for part in parts:
        lance.write_dataset(table_of(part), uri, mode="append", data_storage_version=storage)
    return lance.dataset(uri)


def crcs_of(rows: Sequence[Row]) -> NDArray[np.int64]:
    typed = [(None if ids is None else np.array(ids, np.int32), np.array(mask, np.uint8)) for ids, mask in rows]
    return np.array([checksum(arrays) for arrays in typed])


def located(dataset: lance.LanceDataset, rows: Sequence[Row], row_numbers: Sequence[int]) -> Any:
    numbers = np.array(row_numbers, np.int64)
    return ListFiles(dataset, COLUMNS, checksum).locate(numbers, COLUMNS, crcs_of(rows)[numbers])


def values(column: Lists, places: Sequence[int]) -> list[list[int] | None]:
    arrays = [column.array(position) for position in places]
    return [None if array is None else array.tolist() for array in arrays]


a_row = st.tuples(
    st.none() | st.lists(st.integers(-5, 2**31 - 1), max_size=40), st.lists(st.integers(0, 255), max_size=40)
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.lists(a_row, min_size=1, max_size=30), min_size=1, max_size=4),
    page_bytes=st.sampled_from([16, 64, 1 << 20]),
    merged=st.booleans(),
    short=st.sampled_from([(), ("mask",), COLUMNS]),
    gap=st.sampled_from([0, 3, 512]),
    data=st.data(),
)
def test_lists_in_place_are_what_was_written(tmp_path_factory, parts, page_bytes, merged, short, gap, data):
    """Over files, pages that cut lists in two, nulls, empty lists, and files merged by copying their pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANCE_FILE_WRITER_MAX_PAGE_BYTES", str(page_bytes))
        dataset = write(str(tmp_path_factory.mktemp("lists") / "d"), parts)
    if merged:
        dataset.optimize.compact_files(compaction_mode="try_binary_copy")
        dataset = lance.dataset(dataset.uri)
    rows = [row for part in parts for row in part]
    row_numbers = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_files, "SHORT", short)
        patch.setattr(list_files, "GAP", gap)
        column_lists = located(dataset, rows, row_numbers)
    assert column_lists is not None, "read in place"
    for index, name in enumerate(COLUMNS):
        expected = [rows[row][index] for row in row_numbers]
        assert values(column_lists[name], range(len(row_numbers))) == expected
        assert column_lists[name].lengths.tolist() == [len(own or ()) for own in expected]
        through_lance = HeldLists.of_arrow([dataset.take(row_numbers, columns=[name])[name]])
        order = data.draw(st.permutations(range(len(row_numbers))))
        in_order = [item for own in order for item in expected[own] or ()]
        for column in (column_lists[name], through_lance):
            assert copied(column.at(np.array(order)), KINDS[name]) == in_order


def copied(column: Lists, kind: pa.DataType) -> list[int]:
    """What `copy` makes of all lists, one after the other."""
    target = np.full(int(column.lengths.sum()), 77, kind.to_pandas_dtype())
    column.copy(slice(None), (np.cumsum(column.lengths) - column.lengths).tolist(), target.data)
    items: list[int] = target.tolist()
    return items


ROWS: list[Row] = [([row] * (row % 7), [row % 2] * (row % 5)) for row in range(60)]


def test_a_file_of_another_format_is_left_to_lance(tmp_path: Path) -> None:
    assert located(write(str(tmp_path / "d"), [ROWS], storage="2.2"), ROWS, range(60)) is None


def test_a_file_whose_first_row_has_another_checksum_is_left_to_lance(tmp_path: Path) -> None:
    dataset = write(str(tmp_path / "d"), [ROWS])
    files = ListFiles(dataset, COLUMNS, checksum)
    row_numbers, crcs = np.arange(10, 20), crcs_of(ROWS)[10:20]
    assert files.locate(row_numbers, COLUMNS, crcs + 1) is None
    assert files.locate(row_numbers, COLUMNS, crcs) is None, "and stays so"


def test_a_table_with_deleted_rows_is_left_to_lance(tmp_path: Path) -> None:
    dataset = write(str(tmp_path / "d"), [ROWS])
    dataset.delete("uid = '" + f"{3:032x}" + "'")
    assert located(lance.dataset(dataset.uri), ROWS, [0]) is None


def test_a_column_younger_than_a_file_is_left_to_lance(tmp_path: Path) -> None:
    dataset = write(str(tmp_path / "d"), [ROWS])
    dataset.drop_columns(["mask"])
    dataset = lance.dataset(dataset.uri)
    dataset.add_columns(table_of(ROWS).schema.field("mask").with_nullable(True))
    assert located(lance.dataset(dataset.uri), ROWS, [0]) is None


def test_a_file_that_ends_early_is_damage(tmp_path: Path) -> None:
    dataset = write(str(tmp_path / "d"), [ROWS])
    column_lists = located(dataset, ROWS, range(60))
    [file] = (tmp_path / "d" / "data").iterdir()
    os.truncate(file, 100)
    target = np.empty(sum(len(ids or ()) for ids, _ in ROWS), np.int32)
    firsts = np.cumsum([0, *(len(ids or ()) for ids, _ in ROWS[:-1])]).tolist()
    with pytest.raises(DamagedError, match=r"\.lance, .* bytes from byte .*: the file ends before; run `mopd store"):
        column_lists["ids"].copy(slice(None), firsts, target.data)


def test_a_file_that_is_gone_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_module, "OPEN_FILES", 1)
    dataset = write(str(tmp_path / "d"), [ROWS[:30], ROWS[30:]])
    column_lists = located(dataset, ROWS, range(60))
    assert values(column_lists["mask"], [29, 59, 29]) == [ROWS[29][1], ROWS[59][1], ROWS[29][1]], "opened again"
    for file in (tmp_path / "d" / "data").iterdir():
        file.unlink()
    with pytest.raises(DamagedError, match="No such file or directory; run `mopd store verify`"):
        values(column_lists["mask"], [59, 29])


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_module, "OPEN_FILES", 3)
    dataset = write(str(tmp_path / "d"), [ROWS[first : first + 5] for first in range(0, 60, 5)])

    def open_files() -> list[str]:
        names = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if fd.isdigit() and os.path.islink(f"/proc/self/fd/{fd}")
        ]
        return [name for name in names if name.startswith(str(tmp_path / "d" / "data"))]

    column_lists = located(dataset, ROWS, range(60))
    assert values(column_lists["ids"], range(60)) == [ids for ids, _ in ROWS]
    assert 1 <= len(open_files()) <= 3
    del column_lists
    assert open_files() == []


def test_lists_that_are_not_in_memory_are_asked_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[int, int]] = []
    monkeypatch.setattr(lists_module, "GAP_BYTES", 0)
    monkeypatch.setattr(lists_module, "ASK_BYTES", 200)
    monkeypatch.setattr(lists_module.OpenFiles, "absent", lambda *_: True)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, nbytes, advice: requests.append((start, nbytes)))
    dataset = write(str(tmp_path / "d"), [ROWS])
    row_numbers = [*range(20), 40, 41]
    id_lists: FileLists = located(dataset, ROWS, row_numbers)["ids"]
    requests.clear()
    id_lists.read_ahead()
    [start, apart] = [int(id_lists.positions[index]) for index in (1, 20)]
    before = 4 * sum(row % 7 for row in range(20))
    assert requests == [(start, 200), (start + 200, before - 200), (apart, 4 * (40 % 7 + 41 % 7))]


def test_nothing_is_asked_for_while_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write(str(tmp_path / "d"), [ROWS])
    located(dataset, ROWS, range(60))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("asked for"))
    assert located(dataset, ROWS, range(60)) is not None


def test_verify_finds_a_changed_payload_and_delivers_what_it_checked(store: Store) -> None:
    assert store.root is not None
    samples = [build.sample(i, response=400) for i in range(4)]
    rows = store.commit_samples(samples).rows
    column_lists = store.token_reader(rows).lists(rows, ["tokens", "versions"], verify=True)
    [file] = (store.root / "tokens" / "data").iterdir()
    content = file.read_bytes()
    offset = content.index(samples[2].tokens.tobytes())
    file.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
    assert values(column_lists["tokens"], range(4)) == [sample.tokens.tolist() for sample in samples], "from memory"
    with pytest.raises(DamagedError, match=f"tokens: payload of sample {samples[2].uid} has crc32c"):
        Store.open(store.uri).token_reader(rows).lists(rows, ["tokens"], verify=True)


def test_damaged_file_metadata_is_left_to_lance(tmp_path: Path) -> None:
    """What is read in spite of a flipped byte is what was written."""
    dataset = write(str(tmp_path / "d"), [ROWS])
    [file] = (tmp_path / "d" / "data").iterdir()
    content = file.read_bytes()
    left = 0
    for offset in range(len(content) - 2600, len(content), 3):
        file.write_bytes(content[:offset] + bytes([content[offset] ^ 0xFF]) + content[offset + 1 :])
        column_lists = located(dataset, ROWS, range(60))
        left += column_lists is None
        if column_lists is not None and offset >= len(content) - 40:
            assert values(column_lists["ids"], range(60)) == [ids for ids, _ in ROWS]
    assert left > 200


STRANGE: dict[str, Callable[[Page], Page]] = {
    "beyond any file": lambda page: page._replace(positions=(1 << 64,)),
    "of another size": lambda page: page._replace(sizes=(page.sizes[0] + 8,)),
    "of more rows": lambda page: page._replace(rows=page.rows + 1),
    "in two buffers": lambda page: page._replace(positions=page.positions * 2, sizes=page.sizes * 2),
    "encoded otherwise": lambda page: page._replace(encoding=page.encoding[:-1]),
    "not encoded": lambda page: page._replace(encoding=b""),
}


@pytest.mark.parametrize("how", STRANGE)
def test_pages_that_make_no_sense_are_left_to_lance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    dataset = write(str(tmp_path / "d"), [ROWS])
    monkeypatch.setattr(
        list_files, "read_pages", lambda path, column: [STRANGE[how](page) for page in read_pages(path, column)]
    )
    assert located(dataset, ROWS, range(60)) is None


@pytest.mark.parametrize("storage", ["2.0", "2.1", "2.2"])
def test_pages_are_where_lance_says(tmp_path: Path, storage: str) -> None:
    """Read by two: from the file as its format says, and by Lance's own reader; a younger format is not read at all."""
    dataset = write(str(tmp_path / "d"), [ROWS[first : first + 20] for first in (0, 20, 40)], storage)
    dataset.optimize.compact_files()
    [fragment] = lance.dataset(dataset.uri).get_fragments()
    [file] = fragment.data_files()
    path = Path(dataset.uri) / "data" / file.path
    columns = LanceFileReader(str(path)).metadata().columns
    if storage != "2.0":
        with pytest.raises(NotPlain):
            read_pages(path, 0)
        return
    for index, column in enumerate(columns):
        pages = [(page.positions, page.sizes) for page in read_pages(path, index)]
        assert pages == [
            (tuple(b.position for b in page.buffers), tuple(b.size for b in page.buffers)) for page in column.pages
        ]
    with pytest.raises(NotPlain, match=f"has {len(columns)} columns"):
        read_pages(path, len(columns))
    counts = list_counts(read_pages(path, file.column_indices[1])[0].encoding)
    assert counts.null_shift > counts.items > 0


@pytest.mark.parametrize("content", [b"", b"short", bytes(64), b"\xff" * 64 + b"LANC"])
def test_what_is_no_lance_file_is_no_plain_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises((NotPlain, OSError)):
        read_pages(tmp_path / "file", 0)


@pytest.mark.parametrize("few", [[0, 59], [59, 3, 3, 30]])
def test_list_ends_of_other_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: list[int]) -> None:
    """A look-up costs what is looked up, however large the table is."""
    monkeypatch.setattr(list_files, "GAP", 0)
    dataset = write(str(tmp_path / "d"), [ROWS])
    files = ListFiles(dataset, COLUMNS, checksum)
    rows, crcs = np.array(few), crcs_of(ROWS)[few]
    assert files.locate(rows, COLUMNS, crcs) is not None
    read: list[int] = []
    gather = lists_module.OpenFiles.gather

    def spy(
        self: lists_module.OpenFiles, number: int, pieces: Sequence[lists_module.Piece], memory: memoryview
    ) -> None:
        read.append(memory.nbytes)
        gather(self, number, pieces, memory)

    monkeypatch.setattr(lists_module.OpenFiles, "gather", spy)
    files.locate(rows, COLUMNS, crcs)
    assert sum(read) <= len(COLUMNS) * len(few) * 16


def test_a_process_that_may_open_few_files_closes_its_own(tmp_path: Path) -> None:
    dataset = write(str(tmp_path / "d"), [ROWS[first : first + 5] for first in range(0, 60, 5)])
    column_lists = located(dataset, ROWS, range(60))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    column_lists["ids"].files._close()
    assert column_lists["ids"].array(1) is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    try:
        assert values(column_lists["ids"], range(60)) == [ids for ids, _ in ROWS]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_samples_are_looked_up_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they lie, and that it is their own; when they are read again, Lance is asked for nothing."""
    monkeypatch.setattr(row_reader, "IN_PLACE_BYTES", 0)
    samples = [build.sample(i) for i in range(8)]
    store.commit_samples(samples)
    store.add_teacher(build.teacher("a"))
    store.commit_signals("a", "logprob", [build.signal(s, i, "logprob") for i, s in enumerate(samples)])
    tokens, signal = store.token_reader(np.arange(8)), store.signal_reader("a", "logprob", np.arange(8))
    taken: list[list[int]] = []
    take = row_reader.take_rows

    def spy(dataset: lance.LanceDataset, rows: Any, names: Sequence[str]) -> pa.Table:
        taken.append(list(rows))
        return take(dataset, rows, names)

    monkeypatch.setattr(row_reader, "take_rows", spy)
    # metadata and payload of the tokens, payload of the signal
    for rows, looked_up in (([1, 5], [[1, 5]] * 3), ([5, 1], []), ([1, 2, 5], [[2]] * 3)):
        row_array = np.array(rows)
        column_lists = tokens.lists(row_array, ["tokens", "versions"], verify=False)
        assert values(column_lists["tokens"], range(len(rows))) == [samples[row].tokens.tolist() for row in rows]
        column_lists = signal.lists(row_array, verify=False)
        assert column_lists["logprob"].lengths.tolist() == [20] * len(rows)
        assert taken == looked_up
        taken.clear()


def test_a_payload_of_another_sample_is_damage(store: Store) -> None:
    store.commit_samples([build.sample(i) for i in range(3)])
    samples = store.table("samples").to_pylist()
    swapped = pa.Table.from_pylist([samples[1] | {"uid": "d" * 32}], store.dataset("samples").schema)
    lance.write_dataset(swapped, store.uri + "/samples", mode="append")
    reader = Store.open(store.uri).token_reader(np.arange(4))
    reader.lists(np.arange(3), ["tokens"], verify=False)
    with pytest.raises(DamagedError, match=f"tokens row 1 holds sample {samples[1]['uid']}, expected {'d' * 32}"):
        reader.lists(np.array([3]), ["tokens"], verify=False)


def test_a_reader_reads_in_place_once_a_read_was_large(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit_samples([build.sample(i) for i in range(4)])
    monkeypatch.setattr(row_reader, "IN_PLACE_BYTES", 3 * 25 * row_reader.TOKEN_BYTES)
    reader = store.token_reader(np.arange(4))
    kinds = []
    for rows in ([0], [1, 2, 3], [0]):
        column_lists = reader.lists(np.array(rows), ["tokens"], verify=False)
        kinds.append(type(column_lists["tokens"]))
    assert kinds == [HeldLists, FileLists, FileLists]


def test_a_long_range_is_read_ahead_in_requests_that_the_kernel_takes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, nbytes, advice: ranges.append((start, start + nbytes)))
    files = lists_module.OpenFiles()
    (tmp_path / "file").touch()
    first, last = 7, 7 + 2 * lists_module.ASK_BYTES + 5
    files.ask(files.add(tmp_path / "file"), first, last - first)
    assert [first, *(end for _, end in ranges)] == [*(start for start, _ in ranges), last], "without a gap"
    assert max(end - start for start, end in ranges) <= lists_module.ASK_BYTES
