"""What is deleted is gone from every table, snapshot, log and file; everything else is as it was."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lance
import numpy as np
import pytest

from mopd_dataplane import Store
from mopd_dataplane.errors import InputError, MismatchError, ResourceError, UnknownNameError
from mopd_dataplane.job.sections import Wal
from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.log.log_records import Finish, LogRecord, Open, Span, Tokens
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.partial_sample import PartialSample, SampleSpec
from mopd_dataplane.run import delete as deleting
from mopd_dataplane.run.delete import preview, resume
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.store.maintain.deletion_records import Deletion

PROMPT, OTHER = "chain_sum-train-0", "chain_sum-train-1"
WHERE = f"prompt_id = '{PROMPT}'"
LOG = "wal/student/engine-0"
KILLED = """
import os, signal, sys
from mopd_dataplane.base import fault_points
from mopd_dataplane.cli import main
point, times = sys.argv[1], int(sys.argv[2])
seen = []
fault_points.observe(lambda at: at == point and (seen.append(at), len(seen) == times and os.kill(os.getpid(), 9)))
sys.argv[1:] = sys.argv[3:]
main()
"""


@pytest.fixture(scope="module")
def source(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deletions") / "source"
    fill(make_store(folder, prompts=2))
    return folder


@pytest.fixture
def filled(source: Path, tmp_path: Path) -> Store:
    shutil.copytree(source, tmp_path / "filled")
    return Store.open(tmp_path / "filled")


def fill(store: Store) -> Store:
    """Statistics, labels, an event and a snapshot that speak of every sample, and a log with unfinished ones."""
    rows = store.samples(["uid", "loss_tokens"]).to_pylist()
    write_token_stats(store, [
        TokenStats(sample_row=row, stage="student", step=1,
                   values={"student_entropy": np.full(sample["loss_tokens"], row / 8)})
        for row, sample in enumerate(rows)
    ])  # fmt: skip
    store.add_labels([
        {"label_id": f"l{row}", "uid": sample["uid"], "label": "odd", "note": "", "author": "me", "removed": False}
        for row, sample in enumerate(rows)
    ])  # fmt: skip
    for sample in rows:
        store.add_event(f"dropped/{sample['uid']}", "student", "dropped", 0, None, {"uid": sample["uid"]})
    store.snapshot(tag="before")
    if store.root is not None:
        log_two(store.path(LOG), rows[0]["uid"])
    return store


def log_two(folder: Path, stored: str) -> None:
    """A log with a sample that is in the store, and an unfinished one of the prompt and of another."""
    log, recovered = TokenLog.open(folder, Wal())
    for handle, (uid, prompt) in enumerate([(stored, OTHER), ("a" * 32, PROMPT), ("b" * 32, OTHER)]):
        spec = SampleSpec(
            uid=uid, prompt_id=prompt, group_id=f"{prompt}#9", group_index=0, iteration=9, domain="chain_sum",
            effort="", stage="student", writer="engine-0", writer_seq=handle, policy="student", temperature=1.0,
            top_p=1.0, top_k=0, max_new_tokens=8, stop=(), tokenizer="t", prompt_ids=(1, 2),
        )  # fmt: skip
        say: list[LogRecord] = [Open(handle, spec), Span(handle, 0, 1, "v1"), Tokens(
            handle, 0, np.array([5, 6], np.int32), np.array([-1, -2], np.float32), np.ones(2, np.uint8)
        )]  # fmt: skip
        if uid == stored:
            partial = PartialSample(
                spec=spec, tokens=array("i", [5, 6]), logprobs=array("f", [-1, -2]), loss_mask=bytearray(b"\1\1"),
                spans=[(0, 1, "v1")],
            )  # fmt: skip
            say.append(Finish(handle, 2, partial.digest(), "stop"))
        for message in say:
            recovered.ledger.apply(message)
            log.append(message)
    log.close()


def delete(store: Store, where: str = WHERE) -> list[str]:
    chosen, _ = preview(store, where)
    list(deleting.delete(store, chosen, where))
    return chosen.uids


def content(store: Store) -> dict[str, list[str]]:
    """Every row with its id, as plain Lance reads it, blobs by their bytes."""
    rows_by_table = {}
    for name in store.names():
        dataset = lance.dataset(store.location.of(name), storage_options=store.location.storage_options or None)
        rows = dataset.to_table(with_row_id=True).to_pylist()
        if "hidden" in dataset.schema.names:
            for row in rows:
                row["hidden"] = dataset.take_blobs("hidden", ids=[row["_rowid"]])[0].readall()
        rows_by_table[name] = sorted(map(str, rows))
    return rows_by_table


def check_gone(store: Store, before: dict[str, list[str]], uids: list[str], prompts: tuple[str, ...] = ()) -> None:
    assert len(uids) == len(set(uids)) > 0
    assert content(store) == {
        name: [row for row in rows if not any(named in row for named in (*uids, *prompts))] if name != "plans" else rows
        for name, rows in before.items()
    }
    report = store.verify()
    assert report.ok, report.findings
    assert not report.orphans


def files_that_name(store: Store, *names: str) -> set[str]:
    """Files of a store in which one of the names lies in plain bytes; deletions are recorded by uid on purpose."""
    files = (file for file in store.path(".").rglob("*") if file.is_file() and "deletions" not in file.parts)
    return {file.parts[-3] for file in files if any(name.encode() in file.read_bytes() for name in names)}


@pytest.mark.slow
def test_a_prompt_goes_with_its_samples_and_nothing_else_does(filled: Store) -> None:
    before, uids = content(filled), delete(filled)
    check_gone(filled, before, uids, (PROMPT,))
    assert PROMPT not in {prompt.prompt_id for prompt in filled.prompts()}
    filled.compact(now=True)
    assert files_that_name(filled, *uids, PROMPT) == set()
    check_gone(filled, before, uids, (PROMPT,))
    [partial] = recover(filled.path(LOG)).ledger.partials.values()
    assert (partial.spec.uid, partial.tokens.tolist()) == ("b" * 32, [5, 6])
    [deletion] = filled.deletions.all()
    assert deletion.finished
    assert set(deletion.uids) == set(uids)


def test_one_sample_of_several_leaves_its_prompt(filled: Store) -> None:
    before = content(filled)
    uid = filled.samples(["uid"], WHERE)["uid"][0].as_py()
    assert delete(filled, f"uid = '{uid}'") == [uid]
    check_gone(filled, before, [uid])
    assert PROMPT in {prompt.prompt_id for prompt in filled.prompts()}


def test_a_held_out_prompt_goes_with_its_answers(filled: Store) -> None:
    before, name = content(filled), "chain_sum-eval-0"
    assert delete(filled, f"prompt_id = '{name}'") == []
    assert filled.table("evals", filter=f"prompt_id = '{name}'").num_rows == 0
    assert {k: v for k, v in content(filled).items() if k not in ("evals", "prompts")} == {
        k: v for k, v in before.items() if k not in ("evals", "prompts")
    }


@pytest.mark.slow
def test_who_meets_what_was_deleted_is_told(filled: Store) -> None:
    rows = filled.samples(["prompt_id"])["prompt_id"].to_pylist()
    pinned, plan = filled.snapshot(tag="before"), filled.plan("student", 0)
    assert plan is not None
    delete(filled)
    with pytest.raises(UnknownNameError, match=r"was deleted .* cannot be trained from any more"):
        WindowSource(filled, plan, LoadSpec(stage="student"))
    with pytest.raises(UnknownNameError, match="was deleted"):
        filled.take_samples([rows.index(PROMPT)])
    with pytest.raises(MismatchError, match=r"was deleted .* take it out of what is read"):
        filled.add_prompts([Prompt(prompt_id=PROMPT, domain="chain_sum", text="1 +", answer="2")])
    assert "before" not in filled.info()["snapshots"]
    filled.compact(now=True)
    with pytest.raises(UnknownNameError, match="gave up the snapshots"):
        filled.samples(snapshot=pinned)


def test_a_deleted_sample_cannot_be_committed_again(store: Store) -> None:
    from store_builders import sample

    batch = [sample(number) for number in range(4)]
    store.commit_samples(batch)
    assert delete(store, "prompt_id = 'p3'") == [batch[3].uid]
    with pytest.raises(MismatchError, match=rf"sample {batch[3].uid} was deleted"):
        store.commit_samples(batch)
    assert store.commit_samples([*batch[:3], sample(4)]).rows.tolist() == [0, 1, 2, 4], "no id is given twice"
    assert store.verify().ok


def test_a_log_that_is_being_written_is_left_alone(filled: Store) -> None:
    log, _ = TokenLog.open(filled.path(LOG), Wal())
    before = content(filled)
    with pytest.raises(ResourceError, match="is writing the log"):
        delete(filled)
    assert content(filled) == before
    assert filled.deletions.all() == [], "a refused deletion has not begun"
    log.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "times"),
    [
        ("delete.log", 1), ("delete.unpinned", 1), ("delete.written", 1), ("delete.written", 8),
        ("delete.removed", 1), ("delete.removed", 3), ("delete.removed", 7), ("delete.removed", 9),
    ],
)  # fmt: skip
def test_a_killed_deletion_goes_on_by_the_same_line(filled: Store, point: str, times: int) -> None:
    before = content(filled)
    uids = filled.samples(["uid"], WHERE)["uid"].to_pylist()
    line = ["store", "delete", filled.uri, "--where", WHERE, "--yes", "--json"]
    died = subprocess.run([sys.executable, "-c", KILLED, point, str(times), *line], timeout=120, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    half = Store.open(filled.uri).verify()
    assert [finding.table for finding in half.findings] == ["deletions"], "every state in between is sound but for this"
    done = subprocess.run([sys.executable, "-m", "mopd_dataplane", *line], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["continued"] == 1
    after = Store.open(filled.uri)
    check_gone(after, before, uids, (PROMPT,))
    after.compact(now=True)
    assert files_that_name(after, *uids, PROMPT) == set()


@pytest.mark.slow
def test_on_an_object_store(s3: str) -> None:
    from store_builders import sample, teacher
    from store_builders import signal as signal_of

    store = Store.create(s3)
    batch = [sample(number) for number in range(6)]
    rows = store.commit_samples(batch).rows.tolist()
    store.add_teacher(teacher("math-1"))
    for kind in ("logprob", "hidden"):
        store.commit_signals("math-1", kind, [signal_of(one, row, kind) for one, row in zip(batch, rows, strict=True)])
    store.snapshot(tag="before")
    before = content(store)
    line = ["store", "delete", s3, "--where", "prompt_id = 'p2'", "--yes"]
    died = subprocess.run(
        [sys.executable, "-c", KILLED, "delete.removed", "2", *line], timeout=120, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    subprocess.run([sys.executable, "-m", "mopd_dataplane", *line], timeout=120, check=True)
    after = Store.open(s3)
    assert content(after) == {
        name: [row for row in table_rows if batch[2].uid not in row and "'p2'" not in row]
        for name, table_rows in before.items()
    }
    assert "before" not in after.info()["snapshots"]


def test_a_predicate_that_lacks_a_word_deletes_nothing(filled: Store) -> None:
    for wrong in ("stage = 'student' iteration = 0", "stage = 'student'; and iteration = 0"):
        with pytest.raises(InputError, match="--where is not an SQL expression"):
            preview(filled, wrong)


@pytest.mark.slow
def test_nothing_is_deleted_unasked(filled: Store) -> None:
    before = content(filled)
    line = [sys.executable, "-m", "mopd_dataplane", "store", "delete", filled.uri, "--where", WHERE]
    process = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert process.returncode == 2
    assert "--yes" in process.stderr
    dry = subprocess.run([*line, "--dry-run", "--json"], capture_output=True, text=True)
    told = json.loads(dry.stdout)
    assert told["deleted"] is False
    assert told["snapshots"] == ["before"]
    assert {(use["stage"], use["window"]) for use in told["uses"]} == {("student", window) for window in range(4)}
    assert content(filled) == before
    assert filled.deletions.all() == []


def test_rows_of_a_sample_whose_deletion_has_begun_are_left_out(filled: Store) -> None:
    rows = filled.samples(["uid", "prompt_id"]).to_pylist()
    chosen, _ = preview(filled, WHERE)
    deletion = chosen.record(filled, WHERE)
    label = {"label": "odd", "note": "", "author": "me", "removed": False}
    added = [{"label_id": f"late{row}", "uid": sample["uid"], **label} for row, sample in enumerate(rows)]
    assert filled.add_labels(added) == len(rows) - len(chosen.uids)
    late = [TokenStats(sample_row=int(row), stage="student", step=9, values={}) for row in (chosen.rows[0], 1)]
    assert 1 not in chosen.rows
    assert write_token_stats(filled, late) == 1
    list(resume(filled, deletion))
    assert not set(chosen.uids) & set(filled.table("labels", ["uid"])["uid"].to_pylist())


def test_a_label_whose_writer_has_looked_at_the_deletions_goes_too(filled: Store) -> None:
    uid = filled.samples(["uid"], WHERE)["uid"][0].as_py()
    label = {"label_id": "late", "uid": uid, "label": "odd", "note": "", "author": "me", "removed": False}
    other, looked, go_on = Store.open(filled.uri), threading.Event(), threading.Event()
    look = other.deletions.all

    def look_and_wait() -> list[Deletion]:
        deletions = look()
        looked.set()
        assert go_on.wait(60)
        return deletions

    other.deletions.all = look_and_wait  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        adding = threads.submit(other.add_labels, [label])
        assert looked.wait(60)
        deleting = threads.submit(delete, filled)
        with pytest.raises(TimeoutError):
            deleting.result(1)
        go_on.set()
        assert adding.result(60) == 1
        deleting.result(60)
    assert uid not in filled.table("labels", ["uid"])["uid"].to_pylist()
