"""Next steps that messages about stores, copies, queues and queries name: each is taken, and works."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import store_builders as build
from advice import advises

from mopd_dataplane import Store, create_store, open_store
from mopd_dataplane.base import files
from mopd_dataplane.base.fault_points import observe
from mopd_dataplane.records import sample_uid
from mopd_dataplane.run import delete as deleting
from mopd_dataplane.run import whole_copy
from mopd_dataplane.run.whole_copy import copy_whole
from mopd_dataplane.store.commit import merge_check
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain import copy_target, remove_rows, verify_apart
from mopd_dataplane.store.maintain.copy_samples import copy_samples
from mopd_dataplane.store.queue.queue_log import logs_folder
from mopd_dataplane.store.queue.values import Write
from mopd_dataplane.store.read.decode import Decoder, find_decoder
from mopd_dataplane.store.rollouts.conditions import check_number

MakeStore = Callable[..., Store]


@pytest.fixture
def store(tmp_path: Path, make_store: MakeStore) -> Store:
    """A small store of the test's own."""
    return make_store(tmp_path / "store", prompts=2)


def test_places_for_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with advises("; give a folder without control characters (newline, tab)"):
        StoreLocation("runs/\n")
    (tmp_path / "file").write_bytes(b"")
    with advises(" is a file, and a store is a folder; give another path for the store"):
        create_store(str(tmp_path / "file" / "store"))
    with advises(" is not a folder that can be written to; give another path for the store"):
        create_store("/proc/store")
    too_long = str(tmp_path / ("x" * 300))
    with advises(" cannot be a store: "):
        StoreLocation(too_long).check_new()
    with advises("; give a folder that can be read"):
        create_store(too_long)
    with advises("://; give a folder, or an object store: s3://bucket/prefix, gs:// or az://"):
        create_store("ftp://host/store")
    with advises("and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"):
        create_store("s3://me:secret@bucket/store")
    with advises(": not the URI of an object store with these storage options; give s3://bucket/prefix"):
        StoreLocation("s3://bucket/prefix", {"nonsense": "x"})
    StoreLocation("s3://bucket/prefix")
    create_store(str(tmp_path / "store"))


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    def refuse(path: Path) -> bytes:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", refuse)
        with advises("; give a folder that can be read"):
            open_store(store.uri)
    assert open_store(store.uri).uuid == store.uuid


def test_half_a_copy_is_deleted_or_continued(tmp_path: Path, store: Store) -> None:
    target = str(tmp_path / "copy")
    parts = copy_whole(store, target)
    next(parts)
    parts.close()
    with advises(
        " is an unfinished copy; continue it with the command that began it, or delete it, or give another path"
    ):
        create_store(target)
    create_store(str(tmp_path / "another"))
    with advises(" is the unfinished copy of another store, or of samples with where "):
        list(copy_samples(store, target, "domain = 'chain_sum'"))
    list(copy_samples(store, str(tmp_path / "some"), "domain = 'chain_sum'"))
    list(copy_whole(store, target))
    assert open_store(target).sql("FROM samples").num_rows == store.sql("FROM samples").num_rows


def test_targets_of_copies(tmp_path: Path, store: Store) -> None:
    with advises(" are one folder, or one lies in the other; give a path outside of both"):
        list(copy_whole(store, f"{store.uri}/inside"))
    target = tmp_path / "copy"
    target.mkdir()
    (target / "letter").write_bytes(b"")
    with advises(" is not empty; give a path where nothing is yet"):
        list(copy_whole(store, str(target)))
    (target / "letter").unlink()
    descriptor = os.open(target, os.O_RDONLY)
    assert files.try_lock(descriptor)
    with advises(" is being written by "):
        list(copy_whole(store, str(target)))
    list(copy_whole(store, str(tmp_path / "another")))
    os.close(descriptor)
    list(copy_whole(store, str(target)))


def test_a_copy_that_another_process_took_over(tmp_path: Path, store: Store) -> None:
    location = StoreLocation(str(tmp_path / "copy"))
    first = copy_target.Ownership(location, {"state": "a"})
    second = copy_target.Ownership(location, {"state": "a"})
    with advises("another process has taken over the copy "):
        first.check()
    second.check()
    list(copy_whole(store, str(tmp_path / "elsewhere")))


def test_a_store_that_changes_while_it_is_copied(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(100))
    with monkeypatch.context() as restless:
        restless.setattr(whole_copy, "_moving", lambda source: next(looks))
        with advises(" attempts to read its state; run the same command again"):
            list(copy_whole(store, str(tmp_path / "copy")))
    list(copy_whole(store, str(tmp_path / "copy")))


def test_a_uid_of_its_own(store: Store) -> None:
    store.commit_samples([build.sample(1)])
    with advises("a uid names one content for ever: give the new sample a uid of its own (records.sample_uid)"):
        store.commit_samples([build.sample(1, response=9)])
    store.commit_samples([build.sample(1, uid=sample_uid(0, "student", "p1", 1, 0), response=9)])


def test_a_commit_whose_file_was_deleted(store: Store) -> None:
    before = set(Path(store.uri).glob("tokens/data/*.lance"))

    def lose(point: str) -> None:
        if point == "tokens.append.written":
            for file in {*Path(store.uri).glob("tokens/data/*.lance")} - before:
                file.unlink()

    observe(lose)
    try:
        with advises("machine that does not see file locks; nothing was committed: run the same command again"):
            store.commit_samples([build.sample(1)])
    finally:
        observe(None)
    assert open_store(store.uri).commit_samples([build.sample(1)]).inserted == 1


def test_a_merge_that_lost_rows_is_done_again() -> None:
    rows = pa.table({"uid": ["a", "b", "c"], "n": [1, 2, 3]})
    with advises(": a copy has lost or doubled rows; nothing was changed, run it again"):
        merge_check._compare("table", rows, rows.slice(1))
    with advises(": rows were copied wrong; nothing was changed, run it again"):
        merge_check._compare("table", rows, rows.set_column(1, "n", [[1, 2, 4]]))
    merge_check._compare("table", rows, rows)


def test_a_deletion_that_lost_rows_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    uids = store.sql("SELECT uid FROM samples ORDER BY uid")["uid"].to_pylist()
    where = f"uid = '{uids[0]}'"
    chosen, _ = deleting.preview(store, where)
    whole = remove_rows._kept

    def lossy(fragment: Any, stays: Any) -> Any:
        for batch in whole(fragment, stays):
            yield batch.slice(1)

    with monkeypatch.context() as broken:
        broken.setattr(remove_rows, "_kept", lossy)
        with advises(" rows that stay were copied; run again"):
            list(deleting.delete(store, chosen, where))
    [unfinished] = store.deletions.unfinished()
    list(deleting.resume(store, unfinished))
    assert open_store(store.uri).sql("SELECT uid FROM samples ORDER BY uid")["uid"].to_pylist() == uids[1:]
    assert open_store(store.uri).verify().ok


@pytest.mark.slow
def test_an_audit_that_died_early_runs_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(verify_apart, "_attempt", lambda *arguments: (None, None, "was killed"))
        with advises(" before it read anything of the store; run it again"):
            verify_apart.verify_apart(store)
    assert verify_apart.verify_apart(store).ok


def test_names_of_queues_and_writes(tmp_path: Path) -> None:
    with advises(" is no name of a queue; give up to 64 of a-z, 0-9, '_', '.' and '-'"):
        logs_folder(tmp_path, "My Queue")
    logs_folder(tmp_path, "my.queue-1_a")
    with advises(" is no write of a queue; give what put returned, LOG:NUMBER"):
        Write.parse("seven")
    assert Write.parse("log:7") == Write("log", 7)


def test_tokenizers_of_a_store(tmp_path: Path, store: Store) -> None:
    with advises("; give a folder of a Hugging Face tokenizer"):
        find_decoder(store, tmp_path)
    with advises("…; give another one"):
        Decoder("{}")
    find_decoder(store, next(Path(store.uri).glob("policies/*/v1")))


def test_a_snapshot_that_a_deletion_overtook_is_taken_anew(store: Store) -> None:
    snapshot = store.snapshot()
    [uid] = store.sql("SELECT uid FROM samples LIMIT 1")["uid"].to_pylist()
    chosen, _ = deleting.preview(store, f"uid = '{uid}'")
    list(deleting.delete(store, chosen, f"uid = '{uid}'"))
    with advises("; run the same command again, which takes a new one"):
        store.pin(snapshot, "mine")
    store.pin(store.snapshot(), "mine")
    assert uid not in store.samples(["uid"], snapshot=store.snapshot("mine"))["uid"].to_pylist()


def test_conditions_and_queries(store: Store) -> None:
    with advises(", not a number: give a number, such as kl + 0.1"):
        check_number("domain", pa.string(), "plan.weight")
    check_number("kl + 0.1", pa.float64(), "plan.weight")
    with advises(" statements; give exactly one"):
        store.sql("SELECT 1; SELECT 2")
    assert store.sql("SELECT 1 AS one").num_rows == 1
