"""What the store relies on in pylance, and what it must not rely on. Re-test on every pylance bump.

Each test states a behaviour measured on pylance 14.0.2; docs/decisions/0002-exactly-once.md builds on them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance.commit import CommitConflictError
from lance.fragment import RowIdSequence, write_fragments
from lance.optimize import Compaction, CompactionOptions

from mopd_dataplane.store.format.manifests import manifest

KEY = {b"lance-schema:unenforced-primary-key": b"true"}
SCHEMA = pa.schema([pa.field("uid", pa.string(), False, KEY), pa.field("v", pa.int64(), False)])


def rows(*uids: str) -> pa.Table:
    return pa.table({"uid": list(uids), "v": list(range(len(uids)))}, schema=SCHEMA)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    path = str(tmp_path / "table")
    lance.write_dataset(rows("a", "b"), path, data_storage_version="2.2", enable_stable_row_ids=True)
    return path


def ids(uri: str) -> dict[str, int]:
    """Row id of each uid, in the order of the scan."""
    table = lance.dataset(uri).scanner(columns=["uid"], with_row_id=True).to_table()
    return dict(zip(table["uid"].to_pylist(), table["_rowid"].to_pylist(), strict=True))


def ids_in_metadata(uri: str) -> list[int]:
    """Row ids as the fragments' metadata gives them, by public interface alone."""
    metadata = [fragment.metadata.row_id_meta for fragment in lance.dataset(uri).get_fragments()]
    return [row for part in metadata for row in RowIdSequence.from_inline_metadata(part).to_pyarrow().to_pylist()]


def swap(dataset: lance.LanceDataset, table: pa.Table) -> lance.LanceDataset:
    """The store's commit: all fragments of this version and the new ones, as one Merge without retries."""
    fresh = write_fragments(table, dataset, mode="append", data_storage_version="2.2")
    fragments = [fragment.metadata for fragment in dataset.get_fragments()]
    for offset, fragment in enumerate(fresh):
        fragment.id = max(f.id for f in fragments) + 1 + offset
    operation = lance.LanceOperation.Merge(fragments + fresh, dataset.lance_schema)
    return lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)


def merge(dataset: lance.LanceDataset, table: pa.Table) -> int:
    builder = dataset.merge_insert("uid").when_not_matched_insert_all().conflict_retries(0)
    return int(builder.execute(table)["num_inserted_rows"])


def uids(uri: str) -> list[str]:
    return sorted(lance.dataset(uri).to_table(columns=["uid"])["uid"].to_pylist())


OVERTAKERS: dict[str, Callable[[str], object]] = {
    "swap": lambda uri: swap(lance.dataset(uri), rows("x")),
    "append": lambda uri: lance.write_dataset(rows("x"), uri, mode="append"),
    "merge_insert": lambda uri: merge(lance.dataset(uri), rows("x")),
    "compaction": lambda uri: lance.dataset(uri).optimize.compact_files(),
    "add_columns": lambda uri: lance.dataset(uri).add_columns({"n": "cast(null as int)"}),
    "schema_metadata": lambda uri: lance.dataset(uri).update_schema_metadata({"mopd:key": "2"}),
}


@pytest.mark.parametrize("commit", OVERTAKERS)
def test_a_commit_takes_the_next_number_and_names_its_manifest_after_it(uri: str, commit: str) -> None:
    """manifests.py looks for the newest version one number after the other, and asks Lance's note first."""
    swap(lance.dataset(uri), rows("c"))
    before = lance.dataset(uri).version
    OVERTAKERS[commit](uri)
    newest = lance.dataset(uri).version
    assert newest > before
    assert all(manifest(Path(uri), version).exists() for version in range(1, newest + 1))
    assert not manifest(Path(uri), newest + 1).exists()
    assert json.loads((Path(uri) / "_versions" / "latest_version_hint.json").read_bytes()) == {"version": newest}


@pytest.mark.parametrize("overtaker", OVERTAKERS)
def test_swap_is_refused_when_overtaken(uri: str, overtaker: str) -> None:
    swap(lance.dataset(uri), rows("c"))  # a second fragment, so that compaction has work
    stale = lance.dataset(uri)
    OVERTAKERS[overtaker](uri)
    with pytest.raises((CommitConflictError, OSError), match="commit conflict"):
        swap(stale, rows("x"))
    assert uids(uri).count("x") <= 1


@pytest.mark.parametrize("late", ["compaction", "append"])
def test_a_swap_is_never_undone_by_a_late_commit(uri: str, late: str) -> None:
    swap(lance.dataset(uri), rows("c"))
    stale = lance.dataset(uri)
    swap(lance.dataset(uri), rows("x"))
    commit = stale.optimize.compact_files if late == "compaction" else lambda: stale.insert(rows("y"))
    with pytest.raises(OSError, match="commit conflict"):
        commit()
    assert uids(uri) == ["a", "b", "c", "x"]


def test_swap_keeps_schema_metadata_and_key_marks(uri: str) -> None:
    lance.dataset(uri).update_schema_metadata({"mopd:key": "2"})
    schema = swap(lance.dataset(uri), rows("c")).schema
    assert schema.metadata[b"mopd:key"] == b"2"
    assert schema.field("uid").metadata == KEY


def test_plain_append_never_looks_at_the_key(uri: str) -> None:
    lance.write_dataset(rows("a"), uri, mode="append")
    assert uids(uri) == ["a", "a", "b"]


def test_append_on_a_stale_version_is_not_fenced(uri: str) -> None:
    stale = lance.dataset(uri)
    lance.write_dataset(rows("x"), uri, mode="append")
    fresh = write_fragments(rows("x"), stale, mode="append", data_storage_version="2.2")
    lance.LanceDataset.commit(stale, lance.LanceOperation.Append(fresh), read_version=stale.version, max_retries=0)
    assert uids(uri).count("x") == 2


def test_keyed_merge_refuses_a_stale_handle(uri: str) -> None:
    stale = lance.dataset(uri)
    merge(lance.dataset(uri), rows("x"))
    with pytest.raises(OSError, match="Too many concurrent writers"):
        merge(stale, rows("x"))


def test_scalar_index_switches_the_duplicate_check_off(uri: str) -> None:
    lance.dataset(uri).create_scalar_index("uid", "BTREE")
    stale = lance.dataset(uri)
    assert merge(lance.dataset(uri), rows("x")) == 1
    assert merge(stale, rows("x")) == 1, "pylance now keeps keys unique with an index: reconsider decision 0002"
    assert uids(uri).count("x") == 2


def test_composite_key_is_honoured_by_merge(tmp_path: Path) -> None:
    position = b"lance-schema:unenforced-primary-key:position"
    fields = [pa.field(n, pa.string(), False, {**KEY, position: str(i + 1).encode()}) for i, n in enumerate("abc")]
    uri, schema = str(tmp_path / "t"), pa.schema(fields)
    lance.write_dataset(schema.empty_table(), uri, data_storage_version="2.2")
    stale = lance.dataset(uri)
    table = pa.table({"a": ["u"], "b": ["t"], "c": ["k"]}, schema=schema)
    lance.dataset(uri).merge_insert(["a", "b", "c"]).when_not_matched_insert_all().execute(table)
    with pytest.raises(OSError, match="Too many concurrent writers"):
        stale.merge_insert(["a", "b", "c"]).when_not_matched_insert_all().conflict_retries(0).execute(table)


def test_offsets_are_in_the_order_of_commits_while_nobody_else_commits(uri: str) -> None:
    for number in range(5):
        lance.write_dataset(rows(f"n{number}"), uri, mode="append")
    before = lance.dataset(uri).to_table()["uid"].to_pylist()
    lance.dataset(uri).optimize.compact_files(compaction_mode="try_binary_copy")
    assert len(lance.dataset(uri).get_fragments()) == 1
    assert lance.dataset(uri).to_table()["uid"].to_pylist() == before
    assert lance.dataset(uri).take([6, 0, 6])["uid"].to_pylist() == [before[6], before[0], before[6]]


@pytest.mark.parametrize("mode", ["try_binary_copy", "reencode"])
def test_a_merge_that_meets_an_append_moves_rows_and_keeps_their_ids(uri: str, mode: str) -> None:
    swap(lance.dataset(uri), rows("c", "d"))
    before = ids(uri)
    dataset = lance.dataset(uri)
    options: CompactionOptions = {"compaction_mode": mode}  # type: ignore[typeddict-item]
    done = [task.execute(dataset) for task in Compaction.plan(dataset, options).tasks]
    lance.write_dataset(rows("x"), uri, mode="append")
    Compaction.commit(dataset, done)
    assert list(ids(uri)) != sorted(ids(uri)), "a merge no longer moves rows: row_ids.py may be simpler"
    assert ids(uri) == before | {"x": 4}
    assert ids_in_metadata(uri) == list(ids(uri).values())


def test_commits_give_out_ids_in_order_and_none_twice(uri: str) -> None:
    swap(lance.dataset(uri), rows("c"))
    stale = lance.dataset(uri)
    abandoned = write_fragments(rows("gone"), stale, mode="append", data_storage_version="2.2")
    lance.write_dataset(rows("d"), uri, mode="append")
    late = write_fragments(rows("e"), stale, mode="append", data_storage_version="2.2")
    lance.LanceDataset.commit(stale, lance.LanceOperation.Append(late), read_version=stale.version)
    assert ids(uri) == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}
    assert abandoned[0].row_id_meta is None
    lance.dataset(uri).delete("uid = 'e'")
    lance.write_dataset(rows("f"), uri, mode="append")
    assert ids(uri)["f"] == 5
    lance.dataset(uri, version=lance.dataset(uri).version - 1).restore()
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    lance.write_dataset(rows("g"), uri, mode="append")
    assert ids(uri)["g"] == 6
    lance.write_dataset(rows("h"), uri, mode="overwrite", data_storage_version="2.2")
    assert ids(uri) == {"h": 7}


def test_a_file_that_stands_for_another_can_have_its_ids(uri: str) -> None:
    swap(lance.dataset(uri), rows("c", "d"))
    dataset = lance.dataset(uri)
    [first, second] = [fragment.metadata for fragment in dataset.get_fragments()]
    [fresh] = write_fragments(rows("A", "B"), dataset, mode="append", data_storage_version="2.2")
    fresh.id, fresh.row_id_meta = first.id, first.row_id_meta
    operation = lance.LanceOperation.Merge([fresh, second], dataset.lance_schema)
    lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)
    assert ids(uri) == {"A": 0, "B": 1, "c": 2, "d": 3}


def test_a_dataset_made_without_stable_ids_does_not_get_them(tmp_path: Path) -> None:
    path = str(tmp_path / "old")
    lance.write_dataset(rows("a"), path, data_storage_version="2.2")
    lance.write_dataset(rows("b"), path, mode="append", enable_stable_row_ids=True)
    assert not lance.dataset(path).has_stable_row_ids


def test_a_tag_keeps_a_version_through_compaction_and_cleanup(uri: str) -> None:
    dataset = lance.dataset(uri)
    dataset.tags.create("pin", dataset.version)
    pinned = dataset.version
    swap(lance.dataset(uri), rows("c"))
    latest = lance.dataset(uri)
    latest.optimize.compact_files()
    latest.cleanup_old_versions(older_than=timedelta(0), error_if_tagged_old_versions=False)
    assert lance.dataset(uri, version=pinned).to_table()["uid"].to_pylist() == ["a", "b"]


@pytest.mark.skipif(sys.platform != "linux" or not Path("/usr/bin/strace").exists(), reason="needs strace")
def test_lance_itself_syncs_nothing(tmp_path: Path) -> None:
    code = (
        "import lance, pyarrow as pa, sys; "
        "lance.write_dataset(pa.table({'v': [1]}), sys.argv[1], data_storage_version='2.2')"
    )
    trace = tmp_path / "trace"
    subprocess.run(
        [
            "strace",
            "-f",
            "-o",
            str(trace),
            "-e",
            "trace=fsync,fdatasync,syncfs,sync_file_range",
            sys.executable,
            "-c",
            code,
            str(tmp_path / "t"),
        ],
        check=True,
        timeout=120,
        capture_output=True,
    )
    assert "sync" not in trace.read_text(), "pylance now syncs: the barrier may be doing work twice"


def without(dataset: lance.LanceDataset, *gone: str) -> lance.LanceDataset:
    """The store's removal: files that hold one of the rows, replaced in an Update by files without them."""
    removed, fresh = [], []
    for fragment in dataset.get_fragments():
        fragment_rows = fragment.scanner(with_row_id=True).to_table()
        stays = [uid not in gone for uid in fragment_rows["uid"].to_pylist()]
        if all(stays):
            continue
        removed.append(fragment.fragment_id)
        remaining_rows = fragment_rows.filter(pa.array(stays))
        if remaining_rows.num_rows:
            [file] = write_fragments(
                remaining_rows.drop_columns(["_rowid"]).cast(SCHEMA), dataset, mode="append", data_storage_version="2.2"
            )
            file.row_id_meta = RowIdSequence(remaining_rows["_rowid"].combine_chunks()).to_inline_metadata()
            fresh.append(file)
    operation = lance.LanceOperation.Update(removed_fragment_ids=removed, new_fragments=fresh)
    return lance.LanceDataset.commit(dataset, operation, read_version=dataset.version, max_retries=0)


def test_rows_taken_out_by_an_update_leave_the_ids_of_the_others(uri: str) -> None:
    lance.write_dataset(rows("c", "d"), uri, mode="append")
    assert ids(uri) == {"a": 0, "b": 1, "c": 2, "d": 3}
    without(lance.dataset(uri), "a", "d")
    assert ids(uri) == {"b": 1, "c": 2}
    without(lance.dataset(uri), "b", "c")
    assert ids(uri) == {}
    lance.write_dataset(rows("e"), uri, mode="append")
    assert ids(uri) == {"e": 4}, "an id is never given again"


def test_an_update_and_an_insert_refuse_each_other_and_an_append_goes_through(uri: str) -> None:
    before = lance.dataset(uri)
    swap(before, rows("c"))
    with pytest.raises((CommitConflictError, OSError), match="commit conflict"):
        without(before, "a")
    before = lance.dataset(uri)
    without(before, "a")
    with pytest.raises((CommitConflictError, OSError), match="commit conflict"):
        swap(before, rows("d"))
    before = lance.dataset(uri)
    lance.write_dataset(rows("e"), uri, mode="append")
    without(before, "b")
    assert set(ids(uri)) == {"c", "e"}
