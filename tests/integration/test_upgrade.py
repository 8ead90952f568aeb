"""A store of format 1, made by commit 1a01221 and killed inside its last rollout, becomes one of today's format."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import lance
import pyarrow.compute as pc
import pytest
from advice import advises
from commandline import ENVIRONMENT, run_mopd

from mopd_dataplane import Store, open_store
from mopd_dataplane.base import fault_points
from mopd_dataplane.errors import DamagedError, InputError, MismatchError
from mopd_dataplane.models.hf import weights_digest
from mopd_dataplane.run.upgrade import upgrade_store
from mopd_dataplane.run.whole_copy import copy_whole
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.upgrade import PROGRESS
from mopd_dataplane.train.checkpoint import latest_checkpoint

DATA = Path(__file__).parents[1] / "data"
RENAMED = {"run": "stage", "generation": "iteration", "support": "topk_source", "support_len": "sampling_mask_len",
           "support_sizes": "sampling_mask_sizes", "support_ids": "sampling_mask_ids"}  # fmt: skip
DIES = """
import os, signal, sys
from mopd_dataplane.base import fault_points
left = int(sys.argv[3])
def observe(name):
    global left
    left -= name.startswith("upgrade.")
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
fault_points.observe(observe)
from mopd_dataplane.run.upgrade import upgrade_store
list(upgrade_store(sys.argv[1], sys.argv[2]))
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The store of format 1."""
    with tarfile.open(DATA / "store-format-1.tar.xz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old" / "store"


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The store of format 1, and its copy, which tests only read."""
    root = tmp_path_factory.mktemp("upgrade")
    with tarfile.open(DATA / "store-format-1.tar.xz") as archive:
        archive.extractall(root, filter="data")
    before = contents(root / "store")
    list(upgrade_store(root / "store", root / "new"))
    assert contents(root / "store") == before, "the source was changed"
    return root / "store", root / "new"


def contents(root: Path) -> dict[str, str]:
    """sha256 of every file."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rows(uri: str, version: int | None = None) -> list[dict]:
    """Rows of a table in order, hidden states as bytes, under today's names; no checksums, nor what may be absent."""
    dataset = lance.dataset(uri, version=version)
    plain = [field.name for field in dataset.schema if "blob" not in str(field.type)]
    records = dataset.to_table(columns=plain).to_pylist()
    if "hidden" in dataset.schema.names:
        for row, blob in zip(records, dataset.take_blobs("hidden", indices=list(range(len(records)))), strict=True):
            row["hidden"] = blob.readall()
    renamed = [{RENAMED.get(name, name): value for name, value in row.items()} for row in records]
    absent = (None, "")
    return [{name: v for name, v in row.items() if v not in absent and name != "row_crc"} for row in renamed]


@pytest.mark.slow
def test_every_row_of_every_version_that_counts_is_the_same(upgraded: tuple[Path, Path]) -> None:
    old, new = upgraded
    names = [path.parent.relative_to(old).as_posix() for path in old.rglob("_versions")]
    assert len(names) == 16
    for name in names:
        assert rows(f"{new}/{name}") == rows(f"{old}/{name}"), name
        ids = lance.dataset(f"{new}/{name}").to_table(columns=[], with_row_id=True)["_rowid"].to_pylist()
        assert ids == list(range(len(ids)))
    for file in (old / "snapshots").iterdir():
        versions = json.loads(file.read_text())["versions"]
        assert open_store(new).snapshot(tag=file.stem).versions == versions
        for name, version in versions.items():
            assert rows(f"{new}/{name}", version) == rows(f"{old}/{name}", version), (file.stem, name)
            assert lance.dataset(f"{new}/{name}").tags.list()[file.stem]["version"] == version


STAYS = ("latest_version_hint.json", "store.json", "job.json")
"""Files that a copy makes anew, or does without."""


def carried(root: Path) -> dict[str, str]:
    """sha256 of every file that a whole copy has as it is: all but tags, which hold a time, and versions that are
    neither newest nor pinned."""
    digests = contents(root)
    needed = {name for name in digests if name.rsplit("/", 1)[-1] not in (*STAYS, "LOCK")}
    return {name: digests[name] for name in needed if "/_refs/" not in name and not name.startswith("locks/")}


def test_a_whole_copy_has_every_file_that_counts(upgraded: tuple[Path, Path], tmp_path: Path) -> None:
    """So a job that was killed inside its last rollout continues in it as in the original."""
    _, source = upgraded
    list(copy_whole(open_store(source), str(tmp_path / "copy")))
    copy_digests, source_digests = carried(tmp_path / "copy"), carried(source)
    assert copy_digests.items() <= source_digests.items()
    left = {
        name
        for name in source_digests.keys() - copy_digests.keys()
        if "/_versions/" not in name and "/_transactions/" not in name
    }
    assert left == set()
    for file in (source / "snapshots").iterdir():
        for name, version in json.loads(file.read_text())["versions"].items():
            assert rows(f"{tmp_path}/copy/{name}", version) == rows(f"{source}/{name}", version)
            assert lance.dataset(f"{tmp_path}/copy/{name}").tags.list()[file.stem]["version"] == version


@pytest.mark.slow
def test_a_token_log_goes_to_an_object_store_and_back(upgraded: tuple[Path, Path], tmp_path: Path) -> None:
    """Where it has another form; one that somebody writes is copied as it is at that moment."""
    _, source = upgraded
    far = f"file-object-store://{tmp_path}/far"
    list(copy_whole(open_store(source), far))
    list(copy_whole(open_store(far), str(tmp_path / "back")))
    log = "wal/student/engine-0"
    segments = {name: digest for name, digest in contents(tmp_path / "back").items() if name.endswith(".wal")}
    source_segments = {name: digest for name, digest in contents(source).items() if name.endswith(".wal")}
    assert {n: d for n, d in segments.items() if n.startswith(log)} == {
        n: d for n, d in source_segments.items() if n.startswith(log)
    }
    assert latest_checkpoint(tmp_path / "back" / "checkpoints" / "student") == latest_checkpoint(
        source / "checkpoints" / "student"
    )
    with open(source / log / "LOCK", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        list(copy_whole(open_store(source), str(tmp_path / "beside")))
    (source / log / "LOCK").unlink()
    assert segments == {name: digest for name, digest in contents(tmp_path / "beside").items() if name.endswith(".wal")}


def test_weights_checkpoints_log_and_job_are_carried(upgraded: tuple[Path, Path]) -> None:
    old, new = upgraded
    store = open_store(new)
    assert store.verify().findings == []
    assert store.teachers()["sums"].weights_digest == weights_digest(new / "policies" / "sums" / "v1")
    for name in ("policies/student/v2/model.safetensors", "heads/sums.safetensors"):
        assert (new / name).stat().st_ino == (old / name).stat().st_ino, f"{name} is linked"
    blobs = {path.relative_to(old) for path in (old / "signals/sums/hidden/data").glob("*.lance")}
    assert blobs
    assert all((new / name).stat().st_ino == (old / name).stat().st_ino for name in blobs)
    position, identity = latest_checkpoint(new / "checkpoints" / "student") or (None, None)
    assert (position.step, identity.stage) == (4, "student")
    log = "wal/student/engine-0"
    here, there = ({k: v for k, v in contents(root).items() if k.startswith(log)} for root in (new, old))
    del there[f"{log}/LOCK"]  # of a process, and not of the log
    assert here == there
    assert store.read_json("job.json")["seed"] == 7
    assert not (new / "upgrade.json").exists()


CONTINUED = {
    "21fd79f6c15d9e68e47022cd65e74bec": [80, 86, 11, 14, 3, 25, 2],
    "6c4dbbec1e471eb5290f65f2735e9743": [67, 54, 92, 20, 69, 72, 15, 91, 5, 44, 30, 46],
    "f881989cda64b8c1ac4cc0eaf4a618a0": [7, 63, 77, 3, 51, 27, 79, 34, 28, 67, 52, 79],
    "9a584543c09c1bbdfd0e1c8a5db6c7e5": [26, 15, 4, 44, 52, 98, 75, 5, 56, 56, 68, 63],
    "9fc3c64038c9dc32f40f0a433747cdb9": [25, 85, 15, 1, 78, 78, 99, 54, 82, 16, 87, 31],
    "a8ac6c609dc60d2f553324993a52d47b": [15, 8, 35, 92, 36, 93, 74, 98, 88, 23, 45, 69],
    "349d18322f0e2959a42d4f5e2841a656": [60, 56, 70, 74, 29, 75, 27, 48, 76, 91, 23, 71],
    "580d167d551141e1dd28253605dceb53": [18, 12, 40, 29, 35, 8, 31, 44, 68, 69, 58, 91],
}
"""Responses that commit 1a01221 itself gave the samples of its log when it continued this store."""
BEGUN_LATER = {
    "4a452763bf7515bdb003c3824244d8d7", "7afed249c44441bd03cba284ff5bbf6e", "309cc47c08e648c3aa90c4f746b5020a",
    "650c1c7e7afadc00cf449b06db905376", "4821c2139ce89256160e46cbc96ede3c", "a0638f360cfb8e7c7bc826a8781e9e1a",
    "fd41f2411fea457fdd1e03d223f742a1", "0934bbb0e010449aecc752ea03f70744",
}  # fmt: skip
"""uids of the samples that had not begun: today's sampler draws them."""


@pytest.mark.slow
def test_the_interrupted_rollout_continues_to_the_samples_it_would_have_had(
    upgraded: tuple[Path, Path], tmp_path: Path
) -> None:
    old, source = upgraded
    shutil.copytree(source, tmp_path / "new")
    before = rows(f"{source}/samples"), rows(f"{source}/tokens")
    job = old.parent / "job.toml"
    run_mopd("rollout", job, "--stage", "student", "--store", tmp_path / "new")
    store = open_store(tmp_path / "new")
    assert rows(f"{store.uri}/samples")[: len(before[0])] == before[0]
    assert rows(f"{store.uri}/tokens")[: len(before[1])] == before[1]
    fresh = store.samples(["uid", "prompt_len", "resume"], "stage = 'student' and iteration = 2").to_pylist()
    tokens = {row["uid"]: row["tokens"] for row in lance.dataset(f"{store.uri}/tokens").to_table().to_pylist()}
    responses = {row["uid"]: tokens[row["uid"]][row["prompt_len"] :] for row in fresh if row["resume"] != "none"}
    assert responses == CONTINUED
    assert {row["uid"] for row in fresh if row["resume"] == "none"} == BEGUN_LATER
    assert store.verify().findings == []


@pytest.mark.slow
@pytest.mark.parametrize("visit", [2, 17, 33, 36])
def test_killed_anywhere_the_same_call_goes_on(
    old: Path, tmp_path: Path, visit: int, upgraded: tuple[Path, Path]
) -> None:
    new = tmp_path / "new"
    words = [sys.executable, "-c", DIES, str(old), str(new), str(visit)]
    died = subprocess.run(words, env=ENVIRONMENT, timeout=120, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    with pytest.raises(InputError, match="no store at"):
        Store.open(new)
    before = contents(old)
    run_mopd("store", "upgrade", old, new)
    assert contents(old) == before, "the source was changed"
    assert open_store(new).verify().findings == []
    for name in ("samples", "tokens", "events", "scores", "signals/words/hidden"):
        assert rows(f"{new}/{name}") == rows(f"{upgraded[1]}/{name}")


def begin(old: Path, new: Path, until: str) -> None:
    """Upgrade up to a fault point, and stop there."""

    def stop(name: str) -> None:
        if name == until:
            raise KeyboardInterrupt

    fault_points.observe(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(upgrade_store(old, new))
    finally:
        fault_points.observe(None)


def replace_byte(file: Path) -> bytes:
    """Write a file anew with one byte changed; returns what it was."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    return content


@pytest.mark.slow
def test_files_that_changed_since_are_those_of_the_source(old: Path, tmp_path: Path) -> None:
    """Files of the same name and size with another content, and a folder that the source has no more."""
    new = tmp_path / "new"
    blobs = next((old / "signals/sums/hidden/data").glob("*.lance"))
    head, policy = old / "heads/sums.safetensors", old / "policies/student/v2/model.safetensors"
    contents_before = {file: replace_byte(file) for file in (blobs, head, policy)}
    begin(old, new, "upgrade.log")
    for file, content in contents_before.items():
        file.unlink()
        file.write_bytes(content)
    shutil.rmtree(old / "checkpoints" / "base" / "step-00000004")
    run_mopd("store", "upgrade", old, new)
    for file, content in contents_before.items():
        assert (new / file.relative_to(old)).read_bytes() == content, file
    assert [path.name for path in (new / "checkpoints" / "base").glob("step-*")] == ["step-00000006"]
    assert open_store(new).verify(deep=True).findings == []


def test_a_source_with_other_rows_or_snapshots_is_refused(old: Path, tmp_path: Path) -> None:
    """Tables have the same names and versions as when the upgrade began."""
    new = tmp_path / "new"
    begin(old, new, "upgrade.pinned")
    pin = next(iter((old / "snapshots").iterdir()))
    shutil.copy(pin, pin.with_stem("another"))
    with pytest.raises(MismatchError, match="delete the copy and start again"):
        list(upgrade_store(old, new))
    pin.with_stem("another").unlink()
    table = lance.dataset(str(old / "events"))
    version, events = table.version, table.to_table()
    values = pc.add(events["value"], 1.0)
    events = events.set_column(events.column_names.index("value"), events.schema.field("value"), values)
    shutil.rmtree(old / "events")
    other = lance.write_dataset(events, str(old / "events"))
    while other.version < version:
        other.update_config({"mopd:test": str(other.version)})
    with pytest.raises(MismatchError, match=r"events: rows 0 to \d+ of version \d+ differ from .*; delete the copy"):
        list(upgrade_store(old, new))
    with pytest.raises(InputError, match="no store at"):
        Store.open(new)


@pytest.mark.slow
def test_what_cannot_be_upgraded_is_refused_and_nothing_is_written(
    old: Path, tmp_path: Path, upgraded: tuple[Path, Path]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    with advises(" is not empty; give a folder that does not exist"):
        list(upgrade_store(old, taken))
    with advises(" are one folder, or one lies in the other; give a folder outside of both"):
        list(upgrade_store(old, old / "inside"))
    with advises(" is a store already; give another folder"):
        list(upgrade_store(old, upgraded[1]))
    begin(old, tmp_path / "half", "upgrade.pinned")
    half = StoreLocation(tmp_path / "half")
    half.write_json(PROGRESS, (half.read_json(PROGRESS) or {}) | {"uuid": "0" * 32})
    with advises(", not of "):
        list(upgrade_store(old, tmp_path / "half"))
    shutil.rmtree(tmp_path / "half")
    list(upgrade_store(old, tmp_path / "half"))
    Store.open(tmp_path / "half")
    with pytest.raises(MismatchError, match="only one of format 1"):
        list(upgrade_store(upgraded[1], tmp_path / "again"))
    with pytest.raises(MismatchError, match="mopd store upgrade SRC DST"):
        Store.open(old)
    assert [path.name for path in taken.iterdir()] == ["file"]


def test_damage_of_the_source_is_named_and_its_copy_opens_as_no_store(old: Path, tmp_path: Path) -> None:
    for file in sorted((old / "tokens" / "data").iterdir(), key=os.path.getmtime)[:1]:
        content = bytearray(file.read_bytes())
        content[40] ^= 1
        file.write_bytes(content)
    with pytest.raises(DamagedError):
        list(upgrade_store(old, tmp_path / "new"))
    with pytest.raises(InputError, match="no store at"):
        Store.open(tmp_path / "new")
