"""What is committed while its sample is deleted does not stay: every table, two deletions, a copy, a merge."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import store_builders as build

from mopd_dataplane.base import fault_points
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.records import Prompt, Snapshot
from mopd_dataplane.run import delete as deleting
from mopd_dataplane.run.delete import preview, repair
from mopd_dataplane.store import location
from mopd_dataplane.store.commit.token_stats import write_token_stats
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain import delete_samples
from mopd_dataplane.store.maintain.deletion_records import prompt_hash
from mopd_dataplane.store.read import snapshot as snapshots
from mopd_dataplane.store.read.tags import tagged

SAMPLES = [build.sample(number) for number in range(6)]
GONE = SAMPLES[2]
"""The sample that is deleted, with its prompt."""
NEW = build.sample(2, prompt_id=GONE.prompt_id, uid="f" * 32)
"""A sample of the same prompt that is not in the store when the deletion begins."""
STOPPED = """
import os, signal, sys
from mopd_dataplane.base import fault_points
from mopd_dataplane.cli import main
point = sys.argv[1]
fault_points.observe(lambda at: at == point and os.kill(os.getpid(), signal.SIGSTOP))
sys.argv[1:] = sys.argv[2:]
main()
"""


@pytest.fixture(params=["folder", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store without locks, or one whose writers stall for longer than a deletion waits for them."""
    monkeypatch.setattr(location, "LOCK_S", 0.2)
    yield fill(Store.create(f"file-object-store://{tmp_path}/b/s" if request.param != "folder" else tmp_path / "s"))
    fault_points.observe(None)


def fill(store: Store) -> Store:
    names = [sample.prompt_id for sample in SAMPLES]
    store.add_prompts(Prompt(prompt_id=name, domain="math", text=name, answer="1") for name in names)
    store.add_prompts([Prompt(prompt_id="held-out", domain="math", text="held out", answer="1", split="eval")])
    store.commit_samples(SAMPLES)
    store.add_teacher(build.teacher("t", head_file=""))
    for kind in ("logprob", "hidden"):
        store.commit_signals("t", kind, [build.signal(SAMPLES[0], 0, kind)])
    write_token_stats(store, [build.statistics(SAMPLES[0], 0)])
    return store


def reward(store: Store) -> None:
    row = {"uid": GONE.uid, "sample_row": 2, "verifier": "exact", "verifier_version": "1", "reward": 1.0}
    store.add_rewards([{**row, "correct": True}])


def evaluation(store: Store) -> None:
    store.add_evals([{
        "policy": "student", "policy_version": 1, "prompt_id": "held-out", "domain": "math", "reward": 1.0,
        "correct": True, "reverse_kl": None, "response": "1", "response_len": 1, "finish_reason": "stop",
    }])  # fmt: skip


WRITES: dict[str, tuple[str, Callable[[Store], Any], str]] = {
    "rewards": ("rewards.insert.written", reward, f"uid = '{GONE.uid}'"),
    "labels": ("labels.insert.written", lambda s: s.add_labels([build.label(GONE)]), f"uid = '{GONE.uid}'"),
    "scores": (
        "scores.insert.written",
        lambda s: s.commit_signals("t", "hidden", [build.signal(GONE, 2, "hidden")]), f"uid = '{GONE.uid}'",
    ),
    "token_stats": (
        "token_stats.insert.written",
        lambda s: write_token_stats(s, [build.statistics(GONE, 2)]), f"uid = '{GONE.uid}'",
    ),
    "events": (
        "events.insert.written",
        lambda s: s.add_event(f"dropped/{GONE.uid}", "student", "dropped", 0, None, {"uid": GONE.uid}),
        f"uid = '{GONE.uid}'",
    ),
    "samples": ("samples.insert.written", lambda s: s.commit_samples([NEW]), f"prompt_id = '{GONE.prompt_id}'"),
    "evals": ("evals.insert.written", evaluation, "prompt_id = 'held-out'"),
}  # fmt: skip
"""Table -> point at which its writer stalls, what it writes, predicate of the deletion meanwhile."""


def delete(store: Store, where: str) -> None:
    chosen, _ = preview(store, where)
    list(deleting.delete(store, chosen, where))


def stall_at(point: str) -> tuple[threading.Event, threading.Event]:
    """Stall the first thread that comes to a point; (set when it is there, to be set to let it go on)."""
    stalled, go_on = threading.Event(), threading.Event()

    def observe(name: str) -> None:
        if name == point and not stalled.is_set():
            stalled.set()
            assert go_on.wait(60)

    fault_points.observe(observe)
    return stalled, go_on


def check_nothing_is_left(store: Store, *names: str) -> None:
    """No table names the deleted sample or another of its prompt, or instead what has one of these names."""
    assert store.verify().findings == []
    for table in store.names():
        rows = store.dataset(table).to_table(columns=[c for c in store.dataset(table).schema.names if c != "hidden"])
        text = str(rows.to_pylist())
        assert [name for name in names or (GONE.uid, NEW.uid) if name in text] == [], table


@pytest.mark.slow
@pytest.mark.parametrize("table", WRITES)
def test_a_row_of_a_writer_that_stalls_across_a_deletion_goes_too(store: Store, table: str) -> None:
    point, write, where = WRITES[table]
    other = Store.open(store.uri)
    stalled, go_on = stall_at(point)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write, other)
        assert stalled.wait(60)
        delete(store, where)
        go_on.set()
        writing.result(60)
    check_nothing_is_left(store, *(["held-out"] if table == "evals" else []))


def test_what_a_killed_writer_leaves_is_named_and_repaired(store: Store) -> None:
    delete(store, f"prompt_id = '{GONE.prompt_id}'")
    labels = store.table_handle("labels")  # the commit of a writer that is killed before its second look
    other = Store.open(store.uri)
    other.deletions.all = list  # type: ignore[method-assign]
    other.add_labels([build.label(GONE)])
    assert labels.open().count_rows() == 1
    told = [(f.table, f.uid, f.problem) for f in store.verify().findings]
    assert told == [("labels", GONE.uid, "names a deleted sample; `mopd store repair` removes the row")]
    assert list(repair(store)) == ["labels: 1"]
    check_nothing_is_left(store)
    assert list(repair(store)) == []


def test_a_file_that_names_a_deleted_sample_is_damage(tmp_path: Path) -> None:
    store = fill(Store.create(tmp_path / "s"))
    delete(store, f"prompt_id = '{GONE.prompt_id}'")
    for name, text in (("notes.json", f'{{"uid": "{GONE.uid}"}}'), ("wal/list.txt", f'"{GONE.prompt_id}"')):
        store.path(name).parent.mkdir(exist_ok=True)
        store.path(name).write_text(text)
    told = {f.table for f in store.verify().findings if "names a deleted" in f.problem}
    assert told == {"notes.json", "wal/list.txt"}


def test_two_records_at_once_get_two_numbers_and_a_lost_one_is_missed(store: Store) -> None:
    stores = [Store.open(store.uri) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        begun = list(threads.map(lambda at: stores[at].deletions.begin([f"{at:032x}"], [at + 900], []), range(4)))
    assert sorted(one.name for one in begun) == ["0", "1", "2", "3"]
    assert store.deletions.uids() == {f"{at:032x}" for at in range(4)}
    for one in begun:
        store.deletions.close(one)
    store.location.remove("deletions/3.json")
    store.location.remove("deletions/1.json")
    fresh = Store.open(store.uri)
    assert fresh.deletions.begin([], [], []).name == "4", "a number is not used again"
    lost = [finding.table for finding in fresh.verify().findings if "is gone" in finding.problem]
    assert lost == ["deletions/1.json", "deletions/3.json"]


def test_a_record_of_an_earlier_version_is_read_and_finished_by_repair(store: Store) -> None:
    old = {"began": "2026-01-01T00:00:00+00:00", "finished": False, "uids": [GONE.uid], "rows": [2]}
    store.location.write_json("deletions/0.json", {**old, "prompts": [prompt_hash(GONE.prompt_id)]})
    [deletion] = store.deletions.all()
    assert (deletion.where, deletion.slots) == ("", ())
    assert "`mopd store repair` finishes it" in str(store.verify().findings)
    assert "samples: 1" in list(repair(store))
    check_nothing_is_left(store)


def test_a_condition_reads_the_same_rows_while_others_are_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, scan = Store.open(store.uri), Store.scan_samples

    def deletes_first(self: Store, *args: Any, **options: Any) -> Any:
        if self is store and other.dataset("samples").count_rows() == len(SAMPLES):
            delete(other, f"uid = '{SAMPLES[4].uid}'")
        return scan(self, *args, **options)

    monkeypatch.setattr(Store, "scan_samples", deletes_first)
    delete(store, f"uid = '{GONE.uid}'")
    assert store.deletions.uids() == {GONE.uid, SAMPLES[4].uid}
    check_nothing_is_left(Store.open(store.uri), GONE.uid, SAMPLES[4].uid)


def test_a_prompt_that_was_deleted_takes_no_new_sample(store: Store) -> None:
    delete(store, f"prompt_id = '{GONE.prompt_id}'")
    receipt = store.commit_samples([NEW, build.sample(9)], keep_first=True)
    assert receipt.rows.tolist() == [-1, 6]
    assert receipt.dropped == (NEW.uid,)
    check_nothing_is_left(store)


# -- real processes ------------------------------------------------------------------------------------------------


def line(store: Store, *words: str) -> list[str]:
    return ["store", words[0], store.uri, *words[1:]]


def run(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mopd_dataplane", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> str:
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    return told


def where_of(number: int) -> tuple[str, str, str]:
    return ("--where", f"uid = '{SAMPLES[number].uid}'", "--yes")


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return fill(Store.create(tmp_path / "s"))


@pytest.mark.slow
def test_two_deletions_at_once(folder: Store) -> None:
    both = [run(*line(folder, "delete", *where_of(number))) for number in (1, 2)]
    for process in both:
        end(process)
    after = Store.open(folder.uri)
    assert [deletion.finished for deletion in after.deletions.all()] == [True, True]
    assert after.deletions.uids() == {SAMPLES[1].uid, GONE.uid}
    assert after.samples(["uid"])["uid"].to_pylist() == [SAMPLES[at].uid for at in (0, 3, 4, 5)]
    check_nothing_is_left(after)


@pytest.mark.slow
def test_a_deletion_beside_merges(folder: Store) -> None:
    for number in range(20, 40):
        folder.commit_samples([build.sample(number)])
    merging = run(*line(folder, "compact", "--now"))
    deletion = run(*line(folder, "delete", *where_of(2)))
    end(run(*line(folder, "compact", "--now")))
    end(merging)
    end(deletion)
    after = Store.open(folder.uri)
    assert after.samples(["uid"]).num_rows == 25
    check_nothing_is_left(after)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "true"])
def test_a_copy_beside_a_deletion_is_sound_and_lacks_what_was_deleted(
    folder: Store, tmp_path: Path, where: str
) -> None:
    """The copy is stopped when it has rows of the sample, and goes on once the sample is deleted."""
    point = "copy.samples" if where else "whole_copy.pinned"
    words = ["store", "copy", folder.uri, str(tmp_path / "copy"), *(["--where", where] if where else [])]
    copy = subprocess.Popen([sys.executable, "-c", STOPPED, point, *words], stderr=subprocess.PIPE, text=True)
    try:
        wait_until_stopped(copy.pid)
        # The copy of a whole store keeps the logs locked until its tables are copied; there is none here.
        end(run(*line(folder, "delete", *where_of(2))))
    finally:
        copy.send_signal(signal.SIGCONT)
    _, told = copy.communicate(timeout=300)
    assert folder.verify().findings == []
    assert copy.returncode == 0, told
    copied = Store.open(tmp_path / "copy")
    assert GONE.uid not in copied.samples(["uid"])["uid"].to_pylist()
    check_nothing_is_left(copied)


def wait_until_stopped(pid: int) -> None:
    for _ in range(6000):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "TZX":
            assert state == "T", "the process ended before it came to the point"
            return
        threading.Event().wait(0.02)
    raise AssertionError("the process did not come to the point")


@pytest.mark.slow
def test_an_unfinished_deletion_is_continued_by_its_own_command_only(folder: Store) -> None:
    died = subprocess.run(
        [sys.executable, "-c", STOPPED.replace("SIGSTOP", "SIGKILL"), "delete.removed",
         *line(folder, "delete", *where_of(2))], capture_output=True, text=True,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    for other in (("delete", *where_of(1)), ("info",), ("compact",)):
        told = end(run(*line(folder, *other)))
        command = f"mopd store delete {folder.uri} --where {shlex.quote(where_of(2)[1])}"
        assert " ".join(told.split()).replace(" ", "").count(command.replace(" ", "")) == 1, told
    fresh = Store.open(folder.uri)
    assert [(one.finished, one.where) for one in fresh.deletions.all()] == [(False, where_of(2)[1]), (True, "")]
    answered = subprocess.run(
        [sys.executable, "-m", "mopd_dataplane", *line(folder, "delete", *where_of(2), "--json")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert json.loads(answered.stdout)["continued"] == 1
    check_nothing_is_left(Store.open(folder.uri))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_snapshot_that_a_deletion_overtakes_is_taken_again(
    store: Store, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that pins it stalls before its tags are set, or when they are and its record is not."""
    stalled, go_on, set_tags = threading.Event(), threading.Event(), snapshots._set_tags

    def stalling(tables: Any, tag: str, snapshot: Snapshot) -> None:
        if moment == "after":
            set_tags(tables, tag, snapshot)
        if not stalled.is_set():
            stalled.set()
            assert go_on.wait(60)
        if moment == "before":
            set_tags(tables, tag, snapshot)

    monkeypatch.setattr(snapshots, "_set_tags", stalling)
    other = Store.open(store.uri)
    with ThreadPoolExecutor(1) as threads:
        pinning = threads.submit(other.snapshot, "window-0")
        assert stalled.wait(60)
        delete(store, f"uid = '{GONE.uid}'")
        go_on.set()
        snapshot = pinning.result(60)
    assert snapshots.tags(store) == ["window-0"]
    for at in (snapshot, store.snapshot("window-0")):
        assert GONE.uid not in store.samples(["uid"], snapshot=at)["uid"].to_pylist()
    assert pinned_uids(store, "window-0").isdisjoint({GONE.uid})


def test_a_snapshot_that_was_taken_before_a_deletion_is_not_pinned_after_it(store: Store) -> None:
    snapshot = store.snapshot()
    delete(store, f"uid = '{GONE.uid}'")
    with pytest.raises(MismatchError, match="were deleted meanwhile; run the same command again"):
        store.pin(snapshot, "window-0")
    assert snapshots.tags(store) == []
    assert pinned_uids(store, "window-0") == set()
    store.pin(store.snapshot(), "window-0")
    assert snapshots.tags(store) == ["window-0"]


def test_a_snapshot_that_is_taken_while_rows_go_is_released(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its tags after the deletion looked for those, and its record too."""
    pins_of = delete_samples.pins_of

    def pinned_after_a_look(where: Store, rows: Any) -> list[str]:
        tags = pins_of(where, rows)
        if not snapshots.tags(where):
            Store.open(store.uri).snapshot("window-0")
        return tags

    monkeypatch.setattr(delete_samples, "pins_of", pinned_after_a_look)
    chosen, _ = preview(store, f"uid = '{GONE.uid}'")
    list(deleting.delete(store, chosen, f"uid = '{GONE.uid}'"))
    assert pinned_uids(store, "window-0").isdisjoint({GONE.uid})


@pytest.mark.parametrize("finished", [False, True])
def test_what_killed_processes_left_pinned_is_released(store: Store, finished: bool) -> None:
    """A deletion, killed when its rows are gone or not at all, and a process that pinned them before and died without
    a record of its snapshot."""
    where = f"uid = '{GONE.uid}'"
    snapshot = store.snapshot()
    chosen, _ = preview(store, where)
    if finished:
        list(deleting.delete(store, chosen, where))
    else:
        deletion = chosen.record(store, where)
        list(delete_samples.remove(store, deletion))
    tables = {name: store.table_handle(name) for name in store.names()}
    snapshots._set_tags(tables, "window-0", snapshot)
    assert GONE.uid in pinned_uids(store, "window-0")
    if finished:
        list(repair(store))
    else:
        list(deleting.resume(store, deletion))
    assert pinned_uids(store, "window-0") == set()


def pinned_uids(store: Store, tag: str) -> set[str]:
    """Samples in the versions that Lance holds under a tag, by every table with uids."""
    uids: set[str] = set()
    for name in store.names():
        dataset = store.dataset(name)
        if "uid" in dataset.schema.names and tag in (versions := tagged(dataset)):
            pinned = store.table_handle(name).open(versions[tag])
            uids.update(pinned.to_table(columns=["uid"])["uid"].to_pylist())
    return uids
