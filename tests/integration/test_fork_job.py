"""A run is forked and taken back: the fork goes on with the bits of its run, neither store changes the other, and after
a kill anywhere the same command does the rest."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from advice import advises
from commandline import ENVIRONMENT, run_mopd
from documented import ROOT, blocks

from mopd_dataplane import open_store
from mopd_dataplane.base.fault_points import observe
from mopd_dataplane.base.files import try_lock
from mopd_dataplane.cli import answers, stores
from mopd_dataplane.errors import InputError, JobFileError, MismatchError, UnknownNameError
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models import hf
from mopd_dataplane.query.ancestry import forks_of, origin_of, tree_of
from mopd_dataplane.query.report import write_report
from mopd_dataplane.run import fork as forking
from mopd_dataplane.run import rewind as rewinding
from mopd_dataplane.run.delete import delete, preview, repair
from mopd_dataplane.run.fork import ForkMaker, fork
from mopd_dataplane.run.rewind import rewind
from mopd_dataplane.store.commit.changes import read_changes
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.view.run_page import run_page
from mopd_dataplane.view.shown import Shown

JOB = next(block.text for block in blocks(ROOT / "docs" / "change.md") if block.language == "toml")
"""The job of the page: one teacher, one student, 32 prompts, a checkpoint of every version."""
ITERATIONS = 3
RATE = "stages.student.train.learning_rate"
KILLED = """
import os, signal, sys
from mopd_dataplane.base import fault_points
from mopd_dataplane.run.fork import fork
from mopd_dataplane.run.rewind import rewind
from mopd_dataplane.store.dataset import Store
fault_points.observe(lambda point: point == sys.argv[1] and os.kill(os.getpid(), signal.SIGKILL))
run, *target = sys.argv[2:]
fork(Store.open(run), target[0], "student@2") if target else rewind(run, "student@2")
"""


def slow(*values: Any) -> list[Any]:
    """Parameters of the slow tier."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store of the job after three iterations of its student, without interruption. A test that writes copies it."""
    folder = tmp_path_factory.mktemp("ran")
    job = folder / "job.toml"
    job.write_text(JOB.replace('store = "runs/change"', f'store = "{folder / "store"}"'))
    settings = (f"stages.student.iterations={ITERATIONS}", "domains.sums.eval=4", "load.deadline_s=600")
    run_mopd("run", job, *(word for setting in settings for word in ("--set", setting)))
    return folder / "store"


@pytest.fixture
def run(ran: Path, tmp_path: Path) -> Path:
    """A copy of that store, as if it had run where it lies."""
    store = tmp_path / "run"
    shutil.copytree(ran, store, symlinks=True)
    opened = open_store(str(store))
    opened.write_json("job.json", (opened.read_json("job.json") or {}) | {"store": str(store)})
    return store


def killed(*arguments: str | Path) -> None:
    """Fork or rewind in a process that is killed at a point."""
    words = [sys.executable, "-c", KILLED, *map(str, arguments)]
    done = subprocess.run(words, env=ENVIRONMENT, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL


def outcome(store: Path) -> dict[str, Any]:
    """What a run and its fork must agree in, once both are at their end."""
    opened = open_store(str(store))
    steps = 'select stage, step, "window", loss, grad_norm, learning_rate from steps order by stage, step'
    answers = "select policy, policy_version, prompt_id, response, reward from evals order by all"
    return {
        "weights": [hf.weights_digest(store / "policies" / "student" / f"v{v}") for v in range(1, ITERATIONS + 1)],
        "tokens": opened.sql("select uid, tokens, logprobs from tokens order by uid").to_pylist(),
        "scores": opened.sql("select uid, teacher, kind, mean_reverse_kl from scores order by all").to_pylist(),
        "steps": opened.sql(steps).to_pylist(),
        "answers": opened.sql(answers).to_pylist(),
    }


def content(store: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of every table, after an audit of every byte."""
    opened = open_store(str(store))
    assert opened.verify().findings == []
    return {name: opened.table(name).to_pylist() for name in opened.names()}


def bytes_of(store: Path) -> dict[str, str]:
    """Digest of every file of a store but its locks, which hold nothing."""
    files = (path for path in store.rglob("*") if path.is_file() and "locks" not in path.parts)
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def unwrapped(text: str) -> str:
    """Text of a terminal, which breaks lines anywhere, without white space."""
    return "".join(text.split())


@pytest.mark.slow
def test_a_fork_goes_on_with_the_bits_of_its_run(run: Path, tmp_path: Path) -> None:
    before = bytes_of(run)
    run_mopd("fork", run, tmp_path / "again", "--at", "student@1")
    forked = content(tmp_path / "again")
    assert {row["iteration"] for row in forked["samples"] if row["stage"] == "student"} == {0}
    assert {row["window"] for row in forked["plans"] if row["stage"] == "student"} == {0}
    assert {row["policy_version"] for row in forked["evals"] if row["policy"] == "student"} == {1}
    assert sorted(path.name for path in (tmp_path / "again" / "policies" / "student").iterdir()) == ["v1"]
    assert before == bytes_of(run), "the fork was made without a change of the run"
    run_mopd("run", tmp_path / "again")
    assert outcome(tmp_path / "again") == outcome(run)
    content(tmp_path / "again")
    assert before == bytes_of(run)


def test_settings_hold_from_the_point_on(run: Path, tmp_path: Path) -> None:
    fork(open_store(str(run)), str(tmp_path / "slow"), "student@2", settings=["train.learning_rate=2e-4"])
    slow = open_store(str(tmp_path / "slow"))
    told = [(change.stage, change.iteration, change.key, change.before, change.after) for change in read_changes(slow)]
    assert told == [("student", 2, RATE, "0.001", "0.0002")]
    job = load_job(tmp_path / "slow")
    assert (job.stage("student").train.learning_rate, job.store) == (2e-4, str(tmp_path / "slow"))
    assert load_job(run).stage("student").train.learning_rate == 1e-3


def test_a_change_behind_the_point_is_left_out_of_the_fork(run: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    fork(open_store(str(run)), str(slow), "student@2", settings=[f"{RATE}=2e-4"])
    fork(open_store(str(slow)), str(tmp_path / "early"), "student@1")
    assert read_changes(open_store(str(tmp_path / "early"))) == []
    assert load_job(tmp_path / "early").stage("student").train.learning_rate == 1e-3
    fork(open_store(str(slow)), str(tmp_path / "late"), "student@2")
    assert load_job(tmp_path / "late").stage("student").train.learning_rate == 2e-4


@pytest.mark.slow
def test_what_cannot_be_forked_is_refused_with_the_next_step(run: Path, tmp_path: Path) -> None:
    store, new = open_store(str(run)), str(tmp_path / "new")
    shutil.rmtree(run / "checkpoints" / "student" / "step-00000002")
    with pytest.raises(UnknownNameError, match=r"not stored any more .* nearest is student@2$"):
        fork(store, new, "student@1")
    with pytest.raises(UnknownNameError, match=r"newest version is 3; stored are .* nearest is student@3$"):
        fork(store, new, "student@9")
    with pytest.raises(JobFileError, match="no stage 'pupil'"):
        fork(store, new, "pupil@1")
    with advises(" is not STAGE@VERSION; give a policy version, as ") as refused:
        fork(store, new, "student")
    assert str(refused.value).endswith("as student@1")
    with advises(" exists already; give the fork a name that nothing has"):
        fork(store, str(run), "student@2")
    with advises("; give a folder for the fork, or copy "):
        fork(store, "s3://b/new", "student@2")
    with advises(" is the value that the job has at "):
        fork(store, new, "student@2", settings=[f"{RATE}=1e-3"])
    with pytest.raises(
        MismatchError, match=rf"store {new} was made with seed = 0, the job now says 1; this key is fixed"
    ):
        fork(store, new, "student@2", settings=["seed=1"])
    assert not Path(new).exists()
    fork(store, new, "student@2")
    run_mopd("store", "copy", run, tmp_path / "copy")
    fork(store, str(tmp_path / "other"), "student@2", settings=[f"{RATE}=2e-3"])


def test_a_point_that_has_no_state_is_refused_with_one_that_has(run: Path, tmp_path: Path) -> None:
    store = open_store(str(run))

    def remember(**changes: Any) -> None:
        job = dict(store.read_json("job.json") or {})
        store.write_json("job.json", job | changes)

    *earlier, student = (store.read_json("job.json") or {})["stages"]
    remember(stages=[*earlier, student | {"concurrent": True, "iterations": ITERATIONS + 1}])
    with advises(" is concurrent, so its rollout and its training are at different iterations; "):
        fork(store, str(tmp_path / "new"), "student@2")
    fork(store, str(tmp_path / "beginning"), "student@0")
    remember(stages=[*earlier, student])
    fork(store, str(tmp_path / "end"), f"student@{ITERATIONS}")
    later = student | {"name": "later", "start": "student"}
    remember(stages=[*earlier, student | {"iterations": ITERATIONS + 1}, later])
    with advises(" comes before and is not finished; give a version "):
        fork(store, str(tmp_path / "new"), "later@0")
    fork(store, str(tmp_path / "new"), "student@2")
    with advises(", so no job made it; give the store of a `mopd run`"):
        fork(Store.create(tmp_path / "bare"), str(tmp_path / "unmade"), "student@2")


def test_a_fork_that_something_came_in_between_of_is_made_by_the_same_command(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, new = open_store(str(run)), str(tmp_path / "new")
    [uid] = store.sql("SELECT uid FROM samples WHERE stage = 'student' LIMIT 1")["uid"].to_pylist()
    job_record = store.read_json("job.json")

    def delete_now(point: str) -> None:
        if point == "fork.weights":
            observe(None)
            chosen, _ = preview(open_store(str(run)), f"uid = '{uid}'")
            list(delete(open_store(str(run)), chosen, f"uid = '{uid}'"))

    observe(delete_now)
    with advises(" were deleted while it was forked; run the same command again"):
        fork(store, new, "student@2")
    observe(None)
    fork(open_store(str(run)), new, "student@2")

    def lose(*arguments: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "policies/student/v1/model.safetensors")

    with monkeypatch.context() as racing:
        racing.setattr(ForkMaker, "_share_weights", lose)
        with advises(": its run removed "):
            fork(store, str(tmp_path / "second"), "student@2")
    fork(store, str(tmp_path / "second"), "student@2")

    def overtaken(root: Path, fill: Any) -> None:
        root.mkdir()

    with monkeypatch.context() as racing:
        racing.setattr(forking, "make_folder", overtaken)
        with advises(" was made by another process meanwhile; give the fork another name"):
            fork(store, str(tmp_path / "third"), "student@2")
    fork(store, str(tmp_path / "fourth"), "student@2")
    assert store.read_json("job.json") == job_record


def test_a_run_on_an_object_store_is_not_forked(s3: str, tmp_path: Path) -> None:
    store = Store.create(s3)
    with pytest.raises(InputError, match=f"mopd store copy {s3} runs/NAME"):
        fork(store, str(tmp_path / "new"), "student@1")
    with pytest.raises(InputError, match=f"mopd store copy {s3} runs/NAME"):
        rewind(s3, "student@1")


def test_files_are_copied_where_the_file_system_takes_no_links(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = fork(open_store(str(run)), str(tmp_path / "linked"), "student@2").shared
    assert (linked.copied, linked.copied_bytes, linked.reason) == (0, 0, "")

    def refuse(*names: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copied = fork(open_store(str(run)), str(tmp_path / "copied"), "student@2").shared
    assert (copied.linked, copied.reason) == (0, "Invalid cross-device link")
    assert (copied.copied, copied.copied_bytes) == (linked.linked, linked.linked_bytes)
    assert content(tmp_path / "copied") == content(tmp_path / "linked")


def remove_samples(store: Store) -> None:
    where = "stage = 'student' and iteration = 0"
    chosen, _ = preview(store, where)
    list(delete(store, chosen, where))


def label(store: Store) -> None:
    uid = store.samples(["uid"])["uid"][-1].as_py()
    row = {"label_id": f"l{random.random()}", "uid": uid, "label": "odd", "note": "", "author": "a", "removed": False}
    store.add_labels([row | {"created_at": datetime.now(UTC)}])


CHANGES: dict[str, Callable[[Store], Any]] = {
    "delete": remove_samples,
    "compact": lambda store: store.compact(now=True),
    "repair": lambda store: list(repair(store)),
    "label": label,
    "unpin": lambda store: store.release("student-0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_neither_store_notices_what_becomes_of_the_other(seed: int, run: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    fork(open_store(str(run)), str(twin), "student@2")
    chance = random.Random(seed)
    for name in chance.sample(sorted(CHANGES), len(CHANGES)):
        changed, other = chance.sample([run, twin], 2)
        before, rows = bytes_of(other), content(other)
        CHANGES[name](open_store(str(changed)))
        gc.collect()
        assert bytes_of(other) == before, (seed, name)
        assert content(other) == rows, (seed, name)
        content(changed)
    left, gone = chance.sample([run, twin], 2)
    rows = content(left)
    shutil.rmtree(gone)
    assert content(left) == rows


@pytest.mark.parametrize("point", ["fork.weights", *slow("fork.tables", "fork.cut")])
def test_a_fork_that_is_killed_is_made_by_the_same_command(point: str, run: Path, tmp_path: Path) -> None:
    before = bytes_of(run)
    killed(point, run, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for name in ("new", "whole"):
        fork(open_store(str(run)), str(tmp_path / name), "student@2")
    assert content(tmp_path / "new") == content(tmp_path / "whole")
    assert bytes_of(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run", "whole"]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["", "rewind.kept", *slow("fork.weights", "rewind.named")])
def test_a_run_is_taken_back_and_nothing_is_lost(point: str, run: Path, tmp_path: Path) -> None:
    before, rows = bytes_of(run), content(run)
    gc.collect()
    if point:
        killed(point, run)
    done = rewind(str(run), "student@2")
    backup_dir = tmp_path / "run-was-student-3"
    assert (done.point, done.kept_as) == ("student@2", str(backup_dir))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-was-student-3"]
    after = bytes_of(backup_dir)
    assert {name for name in before if after[name] != before[name]} == {"job.json"}
    assert content(backup_dir) == rows
    assert json.loads((backup_dir / "job.json").read_text())["store"] == str(backup_dir)
    assert {row["window"] for row in content(run)["plans"] if row["stage"] == "student"} == {0, 1}
    assert load_job(run).store == str(run)
    gc.collect()
    assert rewind(str(run), "student@2").kept_as == ""


def test_what_a_rewind_left_is_grey_in_report_and_viewer(run: Path, tmp_path: Path) -> None:
    backup = tmp_path / "run-was-student-3"
    assert rewind(str(run), "student@2").kept_as == str(backup)
    store = open_store(str(run))
    tree = [(Path(one.folder).name, one.depth, one.is_this, one.is_left) for one in tree_of(store)]
    assert tree == [("run-was-student-3", 0, False, True), ("run", 1, True, False)]
    write_report(store, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f'class="left">{backup} (left by a rewind)</li>' in page
    assert f"<strong>{run}</strong> taken back to student@2</li>" in page
    answer = run_page(store, Shown(store).index())
    assert [(row["text"], row["is_left"]) for row in answer["forks"]] == [
        ("(left by a rewind)", True), ("taken back to student@2", False),
    ]  # fmt: skip


def test_a_run_that_a_process_has_open_is_not_taken_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_store(str(run))
    reader = opened.dataset("samples")
    with advises(" is open in ") as refused:
        rewind(str(run), "student@2")
    assert f"is open in process {os.getpid()}" in str(refused.value)
    assert reader.count_rows()
    del opened, reader
    gc.collect()
    descriptor = os.open(run.parent, os.O_RDONLY | os.O_DIRECTORY)
    with monkeypatch.context() as impatient:
        impatient.setattr(rewinding, "LOCK_S", 0.1)
        assert try_lock(descriptor)
        with advises("; wait for it to end, then run again"):
            rewind(str(run), "student@2")
    os.close(descriptor)
    assert rewind(str(run), "student@2").point == "student@2"


@pytest.mark.slow
def test_the_run_and_the_point_are_named_wherever_a_fork_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, newer = tmp_path / "new", tmp_path / "newer"
    fork(open_store(str(run)), str(new), "student@2")
    fork(open_store(str(new)), str(newer), "student@1", settings=[f"{RATE}=2e-4"])
    origin = origin_of(open_store(str(newer)))
    assert origin is not None
    assert origin.text == f"student@1 with {RATE}=2e-4 of {new}"
    assert [fork.folder for fork in forks_of(open_store(str(run)))] == [str(new)]
    tree = [(Path(store.folder).name, store.depth, store.is_this) for store in tree_of(open_store(str(new)))]
    assert tree == [("run", 0, False), ("new", 1, True), ("newer", 2, False)]
    write_report(open_store(str(new)), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f"<strong>{new}</strong> from student@2" in page
    assert f"{newer} from student@1 with {RATE}=2e-4" in page
    capsys.readouterr()
    stores.info(str(new), as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["forked_from"]["uri"], facts["forks"]) == (str(run), [str(newer)])
    answers.compare(f"{run}#student@2", f"{new}#student@2", as_json=True)
    assert json.loads(capsys.readouterr().out)["origins"] == {"b": f"student@2 of {run}"}
    answers.show(str(new), as_json=True)
    assert f"student@2of{run}" in unwrapped(capsys.readouterr().err)
    stores.delete(str(newer), "stage = 'student'", yes=True)
    assert f"mayhavethemtoo:{run},{new}" in unwrapped(capsys.readouterr().err)
    moved = tmp_path / "moved"
    gc.collect()
    run.rename(moved)
    origin = origin_of(open_store(str(new)))
    assert origin is not None
    assert origin.uri == str(moved)
    assert load_job(moved).store == str(moved)
