"""A copy holds the samples that fit and everything that speaks of them, and nothing of the others."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from mopd_dataplane import Store
from mopd_dataplane.errors import DamagedError, InputError, MismatchError, UnknownNameError
from mopd_dataplane.run.whole_copy import copy_whole
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.store.maintain.copy_samples import copy_samples

WHERE = "domain = 'chain_sum'"
KILLED = """
import os, signal, sys
from mopd_dataplane.base import fault_points
from mopd_dataplane.run.whole_copy import copy_whole
from mopd_dataplane.store.maintain.copy_samples import copy_samples
from mopd_dataplane.store.dataset import Store
fault_points.observe(lambda point: point == sys.argv[3] and os.kill(os.getpid(), signal.SIGKILL))
source, target, _, where = Store.open(sys.argv[1]), *sys.argv[2:]
list(copy_samples(source, target, where) if where else copy_whole(source, target))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., Store]) -> Store:
    store = make_store(tmp_path_factory.mktemp("copies") / "source", prompts=3)
    counts = store.samples(["loss_tokens"])["loss_tokens"].to_pylist()
    write_token_stats(store, [
        TokenStats(sample_row=row, stage="student", step=1, values={"student_entropy": np.full(count, row / 8)})
        for row, count in enumerate(counts)
    ])  # fmt: skip
    return store


def rows_of(store: Store, name: str) -> pa.Table:
    """A table as plain Lance reads it, with the bytes of its blobs."""
    dataset = lance.dataset(store.location.of(name), storage_options=store.location.storage_options or None)
    rows = dataset.to_table()
    if "hidden" not in rows.column_names:
        return rows
    blobs = dataset.take_blobs("hidden", indices=list(range(rows.num_rows)))
    return rows.set_column(rows.column_names.index("hidden"), "hidden", pa.array([blob.readall() for blob in blobs]))


def joined(store: Store, name: str) -> list[dict[str, object]]:
    """Rows of a table with the uid that each row it names by number has, found by plain Lance; in order of uid."""
    rows = []
    for row in rows_of(store, name).to_pylist():
        for column, table in (("sample_row", "samples"), ("payload_row", _payload_of(name, row))):
            if column in row:
                ids = lance.dataset(
                    store.location.of(table), storage_options=store.location.storage_options or None
                ).to_table(columns=["uid"], with_row_id=True)
                row[column] = dict(zip(ids["_rowid"].to_pylist(), ids["uid"].to_pylist(), strict=True))[row[column]]
        rows.append({key: value for key, value in row.items() if key != "row_crc"})
    return sorted(rows, key=str)


def _payload_of(name: str, row: dict[str, object]) -> str:
    return "tokens" if name == "samples" else f"signals/{row.get('teacher')}/{row.get('kind')}"


def check(source: Store, copy: Store, chosen: set[str]) -> None:
    assert copy.verify().ok
    assert {row["uid"] for row in rows_of(copy, "samples").to_pylist()} == chosen
    for name in ("samples", "scores", "rewards", "token_stats"):
        assert joined(copy, name) == [row for row in joined(source, name) if row["uid"] in chosen]
    payload = [name for name in source.names() if name == "tokens" or name.startswith("signals/")]
    for name in [*payload, "labels"]:
        expected = [row for row in rows_of(source, name).to_pylist() if row["uid"] in chosen]
        assert not expected or sorted(rows_of(copy, name).to_pylist(), key=str) == sorted(expected, key=str)
    assert rows_of(copy, "plans").num_rows == 0
    for name in ("teachers", "steps", "events"):
        assert rows_of(copy, name).num_rows == rows_of(source, name).num_rows


def uids(store: Store, where: str | None = None) -> set[str]:
    return set(store.samples(["uid"], where)["uid"].to_pylist())


def test_what_fits_is_copied_and_nothing_else(source: Store, tmp_path: Path) -> None:
    chosen = uids(source, WHERE)
    assert 0 < len(chosen) < len(uids(source))
    list(copy_samples(source, str(tmp_path / "copy"), WHERE))
    copy = Store.open(tmp_path / "copy")
    check(source, copy, chosen)
    assert {prompt.domain for prompt in copy.prompts() if prompt.split == "train"} == {"chain_sum"}
    others = uids(source) - chosen
    for file in (path for path in (tmp_path / "copy").rglob("*") if path.is_file() and "policies" not in path.parts):
        assert not any(uid.encode() in file.read_bytes() for uid in others), file
    assert (copy.path("policies/student/v1") / "tokenizer.json").read_bytes() == (
        source.path("policies/student/v1") / "tokenizer.json"
    ).read_bytes()


def ids_and_versions(store: Store) -> dict[str, object]:
    """What names rows and versions, as plain Lance tells it: row ids with their uids, versions, tags."""
    options = store.location.storage_options or None
    tables: dict[str, object] = {}
    for name in store.names():
        dataset = lance.dataset(store.location.of(name), storage_options=options)
        key = dataset.schema.names[0]
        rows = dataset.to_table(columns=[key], with_row_id=True).to_pydict()
        tags = {tag: info["version"] for tag, info in dataset.tags.list().items()}
        tables[name] = (dataset.version, sorted(zip(rows["_rowid"], rows[key], strict=True)), tags)
    return tables


@pytest.mark.slow
def test_a_whole_store_goes_to_an_object_store_and_back(
    make_store: Callable[..., Store], s3: str, tmp_path: Path
) -> None:
    """Merged, pinned at an older version and with a snapshot: everything that names rows and versions stays true."""
    source = make_store(tmp_path / "source", prompts=1)
    source.snapshot(tag="before")
    source.add_event("later", "student", "note", 0, None, {})
    source.compact(now=True)
    list(copy_whole(source, s3))
    list(copy_whole(Store.open(s3), str(tmp_path / "back")))
    for copy in (Store.open(s3), Store.open(tmp_path / "back")):
        assert copy.verify().ok
        assert ids_and_versions(copy) == ids_and_versions(source)
        for name in source.names():
            assert rows_of(copy, name).equals(rows_of(source, name)), name
        at = copy.snapshot(tag="before")
        assert at.versions == source.snapshot(tag="before").versions
        assert copy.samples(snapshot=at).equals(source.samples(snapshot=source.snapshot(tag="before")))
    assert (tmp_path / "back" / "policies" / "student" / "v1" / "tokenizer.json").is_file()


@pytest.mark.parametrize("point", ["whole_copy.version", pytest.param("whole_copy.pinned", marks=pytest.mark.slow)])
def test_a_whole_copy_that_was_killed_goes_on(make_store: Callable[..., Store], tmp_path: Path, point: str) -> None:
    source, target = make_store(tmp_path / "source", prompts=1), str(tmp_path / "copy")
    done = subprocess.run([sys.executable, "-c", KILLED, source.uri, target, point, ""], timeout=120)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(UnknownNameError, match="no store at"):
        Store.open(target)
    list(copy_whole(source, target))
    assert ids_and_versions(Store.open(target)) == ids_and_versions(source)
    assert not list(Path(target).rglob("*.copied"))


def test_a_manifest_that_is_not_the_acknowledged_one_is_not_copied(
    make_store: Callable[..., Store], tmp_path: Path
) -> None:
    """Its copy would be acknowledged anew, and look sound."""
    make_store(tmp_path / "source", prompts=1)
    newest = min((tmp_path / "source" / "steps" / "_versions").glob("*.manifest"))
    content = bytearray(newest.read_bytes())
    offset = content.index(b"informative only")
    content[offset] ^= 1  # the text of a column's description: the dataset opens all the same
    newest.write_bytes(content)
    with pytest.raises(DamagedError, match="as when acknowledged"):
        list(copy_whole(Store.open(tmp_path / "source"), str(tmp_path / "copy")))


@pytest.mark.parametrize("point", ["copy.payload", pytest.param("copy.signals", marks=pytest.mark.slow)])
def test_a_copy_that_was_killed_goes_on(source: Store, tmp_path: Path, point: str) -> None:
    target = str(tmp_path / "copy")
    done = subprocess.run([sys.executable, "-c", KILLED, source.uri, target, point, WHERE], timeout=120)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(UnknownNameError, match="no store at"):
        Store.open(target)
    with pytest.raises(MismatchError, match="unfinished copy"):
        list(copy_samples(source, target, "domain = 'spell_backward'"))
    list(copy_samples(source, target, WHERE))
    check(source, Store.open(target), uids(source, WHERE))


def test_what_cannot_be_copied_is_refused_and_nothing_is_left(source: Store, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    half = (f"{WHERE} iteration = 0", f"{WHERE}; drop table samples", f"({WHERE})) and iteration = 0", f"{WHERE}) --")
    for where, error in (
        ("no such", InputError), ("domain = 'x'", UnknownNameError), ("nocol = 1", InputError),
        *((some, InputError) for some in half),
    ):  # fmt: skip
        with pytest.raises(error):
            list(copy_samples(source, str(target), where))
    with pytest.raises(InputError, match="one lies in the other"):
        list(copy_whole(source, f"{source.uri}/inside"))
    (tmp_path / "link").symlink_to(source.uri)
    with pytest.raises(InputError, match="one lies in the other"):
        list(copy_whole(source, f"{tmp_path}/link/inside"))
    assert not target.exists()
    target.mkdir()
    (target / "mine").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        list(copy_whole(source, str(target)))
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_a_damaged_row_is_named_and_the_copy_is_no_store(make_store: Callable[..., Store], tmp_path: Path) -> None:
    make_store(tmp_path / "source", prompts=1)
    [file] = (tmp_path / "source" / "prompts" / "data").iterdir()
    content = file.read_bytes()
    offset = content.index(b"chain_sum")
    file.write_bytes(content[:offset] + b"C" + content[offset + 1 :])
    damaged = Store.open(tmp_path / "source")
    for copied, name in ((copy_samples(damaged, str(tmp_path / "some"), "true"), "some"),
                         (copy_whole(damaged, str(tmp_path / "all")), "all")):  # fmt: skip
        with pytest.raises(DamagedError, match=r"prompts .*: row crc32c .*, .* was committed"):
            list(copied)
        with pytest.raises(UnknownNameError):
            Store.open(tmp_path / name)
