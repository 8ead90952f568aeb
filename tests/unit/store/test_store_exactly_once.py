"""Each sample visible exactly once: after SIGKILL between any two writes, with racing, stopped, undead committers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import store_builders as build

from mopd_dataplane.errors import MismatchError, ResourceError
from mopd_dataplane.store.commit import table as table_module
from mopd_dataplane.store.commit.signals import payload_table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import token_rows

Start = Callable[..., subprocess.Popen[str]]
Answer = Callable[[subprocess.Popen[str]], dict[str, Any]]

KILL_POINTS = [
    "tokens.append.written",
    "tokens.append.committed",
    "commit.payload.durable",
    "samples.insert.written",
    "samples.insert.committed",
    "commit.metadata.durable",
]


def check_samples(store: Store, count: int) -> None:
    """Samples 0 to count - 1 are there, once each, with the payload they were given."""
    uids = store.samples(["uid"])["uid"].to_pylist()
    assert sorted(uids) == sorted(build.sample(i).uid for i in range(count))
    by_uid = {build.sample(i).uid: build.sample(i) for i in range(count)}
    for row in store.read_tokens(np.arange(count), verify=True).to_pylist():
        assert row["tokens"] == by_uid[row["uid"]].tokens.tolist()
    counted = store.sql("select count(*) as n, count(distinct uid) as u from samples").to_pylist()
    assert counted == [{"n": count, "u": count}]


@pytest.mark.parametrize("point", KILL_POINTS)
def test_sigkill_between_two_writes_then_the_same_commit_again(
    store: Store, start_child: Start, answer_of: Answer, point: str
) -> None:
    child = start_child(store.uri, "--samples", 0, 48, "--batch", 16, "--die-at", point, "--on", 2)
    assert answer_of(child) == {}
    assert child.returncode == -signal.SIGKILL
    visible = store.samples(["uid"]).num_rows
    assert visible == (32 if point in KILL_POINTS[4:] else 16), "the commit record is the row in `samples`"
    receipt = store.commit_samples([build.sample(i) for i in range(48)])
    assert receipt.inserted == 48 - visible
    check_samples(store, 48)
    payloads = store.table("tokens", ["uid"]).num_rows
    assert payloads == 48, "payload left behind by the killed commit is adopted, not written again"


@pytest.mark.slow
def test_signals_sigkill_between_two_writes(store: Store, start_child: Start, answer_of: Answer) -> None:
    samples = [build.sample(i) for i in range(8)]
    store.commit_samples(samples)
    store.add_teacher(build.teacher("t"))
    for point in ("signals/t/topk.append.committed", "signals.payload.durable", "scores.insert.written"):
        answer_of(start_child(store.uri, "--samples", 0, 8, "--signal", "t", "topk", "--die-at", point))
        assert store.missing_signals("t", "topk", range(8)).tolist() == list(range(8))
    signals = [build.signal(sample, row, "topk") for row, sample in enumerate(samples)]
    assert store.commit_signals("t", "topk", signals) == 8
    assert store.commit_signals("t", "topk", signals) == 0
    for (ids, logprobs), expected in zip(store.read_signal("t", "topk", range(8), verify=True), signals, strict=True):
        assert np.array_equal(ids, expected.topk_ids)
        assert np.array_equal(logprobs, expected.topk_logprobs)
    assert store.table("signals/t/topk").num_rows == 8, "payload left behind is adopted"


@pytest.mark.parametrize("unlocked", [False, True])
def test_racing_committers_of_the_same_samples(
    store: Store, start_child: Start, answer_of: Answer, unlocked: bool
) -> None:
    flags = ["--unlocked"] if unlocked else []
    children = [start_child(store.uri, "--samples", 0, 96, "--batch", 8, *flags) for _ in range(3)]
    inserted = [answer_of(child)["inserted"] for child in children]
    assert sum(inserted) == 96, f"every sample is claimed by exactly one committer: {inserted}"
    check_samples(store, 96)


def test_a_committer_that_wakes_up_after_its_successor(store: Store, start_child: Start, answer_of: Answer) -> None:
    stop = ["--stop-at", "samples.insert.written", "--unlocked"]
    zombie = start_child(store.uri, "--samples", 0, 16, *stop)
    os.waitid(os.P_PID, zombie.pid, os.WSTOPPED | os.WNOWAIT)
    assert store.commit_samples([build.sample(i) for i in range(16)]).inserted == 16
    os.kill(zombie.pid, signal.SIGCONT)
    assert answer_of(zombie) == {"inserted": 0}
    check_samples(store, 16)


def test_a_stopped_committer_does_not_stop_the_store(
    store: Store, start_child: Start, answer_of: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mopd_dataplane.store.location.LOCK_S", 0.2)
    holder = start_child(store.uri, "--samples", 0, 16, "--stop-at", "samples.insert.written")
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    assert store.commit_samples([build.sample(i) for i in range(16)]).inserted == 16
    os.kill(holder.pid, signal.SIGCONT)
    assert answer_of(holder) == {"inserted": 0}
    check_samples(store, 16)


def test_a_lost_reply_is_not_an_insert_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit happens, the answer does not come back: what an object store does on a timeout."""
    real = table_module.lance.LanceDataset.commit
    lost = {"left": 2}

    def commit(base: object, operation: object, **options: object) -> object:
        done = real(base, operation, **options)
        if isinstance(operation, table_module.lance.LanceOperation.Merge) and lost["left"]:
            lost["left"] -= 1
            raise OSError("connection reset before the answer came")
        return done

    monkeypatch.setattr(table_module.lance.LanceDataset, "commit", staticmethod(commit))
    receipt = store.commit_samples([build.sample(i) for i in range(16)])
    assert receipt.inserted == 16
    assert receipt.rows.tolist() == list(range(16))
    assert store.add_prompts([]) == 0
    check_samples(store, 16)


LANCE_GAVE_UP = "Too many concurrent writers. Attempted 9 times, but failed on retry_timeout of 30.000 seconds."


@pytest.mark.parametrize("is_committed", [False, True], ids=["nothing was committed", "only the reply was lost"])
def test_an_append_that_lance_gives_up_is_repeated_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    real = table_module.lance.LanceDataset.commit
    appends = []

    def commit(base: object, operation: object, **options: object) -> object:
        if not isinstance(operation, table_module.lance.LanceOperation.Append):
            return real(base, operation, **options)
        appends.append(real(base, operation, **options) if is_committed or appends else None)
        if len(appends) == 1:
            raise OSError(LANCE_GAVE_UP)
        return appends[-1]

    monkeypatch.setattr(table_module.lance.LanceDataset, "commit", staticmethod(commit))
    assert store.commit_samples([build.sample(i) for i in range(16)]).inserted == 16
    assert len(appends) == (1 if is_committed else 2)
    assert store.dataset("tokens").count_rows() == 16
    check_samples(store, 16)


def test_appends_that_never_succeed_are_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(base: object, operation: object, **options: object) -> object:
        raise OSError(LANCE_GAVE_UP)

    monkeypatch.setattr(table_module, "BACKOFF_S", 0.0)
    monkeypatch.setattr(table_module.lance.LanceDataset, "commit", staticmethod(commit))
    with pytest.raises(ResourceError, match="64 commits in a row conflicted"):
        store.commit_samples([build.sample(0)])


def test_a_merge_that_lance_gives_up_does_not_fail_the_commit_before_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merge_small(*arguments: object) -> int:
        raise OSError(LANCE_GAVE_UP)

    monkeypatch.setattr(table_module, "merge_limit", lambda dataset: 1)
    monkeypatch.setattr(table_module, "merge_small", merge_small)
    assert store.commit_samples([build.sample(i) for i in range(16)]).inserted == 16
    check_samples(store, 16)


def test_the_same_uid_twice_in_one_batch_is_one_sample(store: Store) -> None:
    receipt = store.commit_samples([build.sample(i) for i in (0, 1, 0, 2, 1)])
    assert receipt.inserted == 3
    assert receipt.rows.tolist() == [0, 1, 0, 2, 1]
    check_samples(store, 3)


def test_receipt_gives_rows_of_known_and_new_samples(store: Store) -> None:
    store.commit_samples([build.sample(i) for i in range(4)])
    receipt = store.commit_samples([build.sample(i) for i in (9, 2, 8, 0)])
    assert receipt.inserted == 2
    assert receipt.rows.tolist() == [4, 2, 5, 0]
    uids = store.take_samples(receipt.rows, ["uid"])["uid"].to_pylist()
    assert uids == [build.sample(i).uid for i in (9, 2, 8, 0)]


def test_another_process_sees_and_extends_what_this_one_wrote(
    store: Store, start_child: Start, answer_of: Answer
) -> None:
    store.commit_samples([build.sample(i) for i in range(8)])
    assert answer_of(start_child(store.uri, "--samples", 4, 12)) == {"inserted": 4}
    assert store.commit_samples([build.sample(i) for i in range(16)]).inserted == 4
    check_samples(store, 16)


def test_a_changed_prompt_or_teacher_is_refused(store: Store) -> None:
    store.add_teacher(build.teacher("t"))
    store.add_teacher(build.teacher("t"))
    with pytest.raises(MismatchError, match="weights_digest is 'w-t' in the store, 'other' now"):
        store.add_teacher(build.teacher("t", weights_digest="other"))
    assert store.teachers()["t"].weights_digest == "w-t"


def test_a_question_sees_no_payload_that_was_left_over(store: Store) -> None:
    samples = [build.sample(i) for i in range(4)]
    rows = store.commit_samples(samples).rows.tolist()
    store.add_teacher(build.teacher("t"))
    signals = [build.signal(sample, row, "logprob") for sample, row in zip(samples, rows, strict=True)]
    store.commit_signals("t", "logprob", signals)
    store.table_handle("tokens").append(token_rows(samples[:3]))  # as by a committer that another one was faster than
    payload = store.table_handle("signals/t/logprob")
    payload.append(payload_table(payload, signals[1:]))
    for name in ("tokens", "signals_t_logprob"):
        assert store.sql(f"select count(*) as n from {name}").to_pylist() == [{"n": 4}]
        joined = f"select uid from samples join {name} using (uid) where uid > '' order by uid"
        assert store.sql(joined)["uid"].to_pylist() == sorted(sample.uid for sample in samples)
    at = store.snapshot()
    store.commit_samples([build.sample(4)])
    assert store.sql("select count(*) as n from tokens", at).to_pylist() == [{"n": 4}]
    assert store.sql("select count(*) as n from tokens").to_pylist() == [{"n": 5}]
