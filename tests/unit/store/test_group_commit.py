"""Group commit: what many writers hand over is committed once each, whoever dies and whatever one hands over."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_builders as build
from advice import advises

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.files import is_disk_full
from mopd_dataplane.base.sealed_json import seal, seal_line
from mopd_dataplane.errors import (
    DamagedError,
    DeadlineError,
    EngineError,
    InputError,
    MismatchError,
    ResourceError,
    UnknownNameError,
)
from mopd_dataplane.records import Sample, Signal
from mopd_dataplane.run import delete as deleting
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.group_commit import committer as committer_module
from mopd_dataplane.store.group_commit import election
from mopd_dataplane.store.group_commit import writer as writer_module
from mopd_dataplane.store.group_commit.committer import GroupCommitter
from mopd_dataplane.store.group_commit.election import TermHolding, TermWatch, newest_term
from mopd_dataplane.store.group_commit.mailbox import REPLIES, REQUESTS, FolderMailbox
from mopd_dataplane.store.group_commit.requests import (
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from mopd_dataplane.store.group_commit.writer import GroupWriter


class Died(BaseException):
    """The process that commits has died here."""


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers start no process: the test commits itself."""
    monkeypatch.setattr(election.Election, "start_committer_if_none", lambda self: None)


@pytest.fixture
def die_at() -> Iterator[Callable[[str], None]]:
    """die_at("group.committed"): die there once."""

    def install(point: str) -> None:
        def observer(name: str) -> None:
            if name == point:
                fault_points.observe(None)
                raise Died

        fault_points.observe(observer)

    yield install
    fault_points.observe(None)


def ask(store: Store, *batches: list[Sample]) -> list[str]:
    """Put requests into the mailbox of a store, as writers would; their names."""
    mailbox = FolderMailbox(Path(store.uri))
    names = [f"{number:032x}-00000000" for number in range(len(batches))]
    for name, batch in zip(names, batches, strict=True):
        mailbox.write(f"{REQUESTS}/{name}", encode_request(Request(store.uuid, samples=tuple(batch))))
    return names


def replies(store: Store, names: list[str]) -> list[Reply]:
    contents = [FolderMailbox(Path(store.uri)).read(f"{REPLIES}/{name}") for name in names]
    return [decode_reply(content, "reply") for content in contents if content is not None]


def stored_numbers(store: Store) -> list[int]:
    return sorted(Store.open(store.uri).samples(["writer_seq"])["writer_seq"].to_pylist())


def kill_processes(store: Store) -> int:
    """Kill the processes that commit for a store; how many there were."""
    listing = subprocess.run(["pgrep", "-f", f"group_commit {store.uri}"], capture_output=True, text=True, check=True)
    pids = listing.stdout.split()
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    return len(pids)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)


def delete(store: Store, sample: Sample) -> None:
    where = f"uid = '{sample.uid}'"
    list(deleting.delete(store, deleting.preview(store, where)[0], where))


def full_sample() -> Sample:
    scored = build.sample(3)
    return replace(
        scored,
        sampling_mask_sizes=np.full(scored.loss_tokens, 2, np.int32),
        sampling_mask_ids=np.arange(2 * scored.loss_tokens, dtype=np.int32),
        experts=np.arange(48, dtype=np.int16).reshape(24, 2),
        extra={"entropy": np.linspace(0, 1, 20, dtype=np.float32)},
        sampler=None,
    )


def test_a_request_comes_back_as_it_was() -> None:
    samples = (full_sample(), replace(build.sample(4), logprobs=None))
    kinds = ("logprob", "topk", "hidden")
    signals = [build.signal(build.sample(5), 7, kind) for kind in kinds]
    for request in (
        Request("id", samples=samples),
        *(Request("id", teacher="t", kind=own.kind, signals=(own,)) for own in signals),
    ):
        restored = decode_request(encode_request(request), "request")
        assert (restored.teacher, restored.kind) == (request.teacher, request.kind)
        records: list[tuple[Any, Any]] = [
            *zip(request.samples, restored.samples, strict=True), *zip(request.signals, restored.signals, strict=True),
        ]  # fmt: skip
        assert records
        for before, after in records:
            assert all(equal(getattr(before, field.name), getattr(after, field.name)) for field in fields(before))
    reply = Reply(rows=(3, -1), dropped=(1,), inserted=2, error="", message="")
    assert decode_reply(encode_reply(reply), "reply") == reply


def test_a_request_that_is_not_as_it_was_written_is_refused() -> None:
    content = encode_request(Request("id", samples=(build.sample(0),)))
    for damaged in (content[:-1], content[:-1] + b"\1", b"", content.replace(b"math", b"code", 1)):
        with pytest.raises(DamagedError):
            decode_request(damaged, "request")
    with pytest.raises(MismatchError, match=r"has format 2, this release reads 1: run the same release in every"):
        decode_request(seal_line({"format": 2}).encode(), "request")
    with pytest.raises(DamagedError, match="lacks its checksum"):
        decode_request(b'{"format": 2}', "request")
    bad = replace(build.sample(0), extra={"notes": np.array(["text"], object)})
    with advises("values; give an array of numbers or booleans"):
        encode_request(Request("id", samples=(bad,)))


def test_writers_share_commits_and_load_no_lance(store: Store, tmp_path: Path) -> None:
    code = """
import sys, json
sys.path.insert(0, sys.argv[2])
from mopd_dataplane.store.group_commit.writer import GroupWriter
import mopd_dataplane.records, numpy as np
from mopd_dataplane.bench.small_samples import bench_sample
number = int(sys.argv[3])
with GroupWriter(sys.argv[1]) as writer:
    rows = [row for turn in range(5) for row in writer.commit_samples(
        [bench_sample(1000 * number + 4 * turn + index, 20) for index in range(4)]).rows]
assert not {"lance", "pyarrow", "torch"} & sys.modules.keys(), sys.modules.keys()
print(json.dumps(rows))
"""
    command = [sys.executable, "-c", code, store.uri, str(Path(__file__).parent)]
    children = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(4)]
    answers = [child.communicate(timeout=180)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4
    rows = [row for answer in answers for row in json.loads(answer)]
    assert sorted(rows) == list(range(80))
    assert stored_numbers(store) == sorted(1000 * number + index for number in range(4) for index in range(20))
    assert not os.listdir(f"{store.uri}/{REQUESTS}")
    assert not os.listdir(f"{store.uri}/{REPLIES}")
    assert Store.open(store.uri).verify().findings == []


def test_a_process_that_is_killed_is_replaced(store: Store) -> None:
    committed: list[int] = []

    def commit(writer_number: int) -> None:
        with GroupWriter(store.uri) as writer:
            for turn in range(20):
                number = 100 * writer_number + turn
                (row,) = writer.commit_samples([build.sample(number)]).rows
                assert row >= 0
                committed.append(number)

    with ThreadPoolExecutor(3) as threads:
        writers = [threads.submit(commit, number) for number in range(3)]
        for count in (10, 25, 40):
            while len(committed) < count and not all(working.done() for working in writers):
                time.sleep(0.005)
            assert kill_processes(store) == 1
        for working in writers:
            working.result(300)
    assert sorted(committed) == stored_numbers(store) == sorted(100 * w + t for w in range(3) for t in range(20))
    assert Store.open(store.uri).verify().findings == []


@pytest.mark.parametrize(
    "point",
    ["commit.payload.durable", "samples.insert.written", "samples.insert.committed", "commit.metadata.durable",
     "group.committed", "group.replied"],
)  # fmt: skip
def test_a_death_between_any_two_steps_changes_nothing(store: Store, point: str, die_at: Callable[[str], None]) -> None:
    names = ask(store, [build.sample(0), build.sample(1)], [build.sample(2)])
    die_at(point)
    with pytest.raises(Died):
        GroupCommitter(Store.open(store.uri)).commit_pending()
    GroupCommitter(Store.open(store.uri)).commit_all()
    assert stored_numbers(store) == [0, 1, 2]
    assert [reply.rows for reply in replies(store, names)] == [(0, 1), (2,)]
    assert not os.listdir(f"{store.uri}/{REQUESTS}")
    assert store.verify().findings == []


def test_two_processes_at_once_commit_each_sample_once(store: Store) -> None:
    stores = [Store.open(store.uri) for _ in range(2)]
    for turn in range(8):
        names = ask(store, *([build.sample(8 * turn + index)] for index in range(8)))
        start = threading.Barrier(2)

        def commit(own: Store, start: threading.Barrier = start) -> None:
            committer = GroupCommitter(own)
            start.wait(60)
            committer.commit_pending()

        with ThreadPoolExecutor(2) as threads:
            for working in [threads.submit(commit, own) for own in stores]:
                working.result(120)
        answers = replies(store, names)
        assert [(reply.error, reply.dropped) for reply in answers] == [("", ())] * 8
    assert stored_numbers(store) == list(range(64))
    assert store.verify().findings == []


def test_a_wrong_batch_is_refused_alone(store: Store) -> None:
    wrong = replace(build.sample(1), logprobs=np.full(20, np.nan, np.float32))
    senseless = replace(build.sample(2), tokens="text")  # type: ignore[arg-type]
    names = ask(store, [build.sample(0)], [wrong], [senseless], [build.sample(3)])
    (Path(store.uri) / REQUESTS / "torn").write_bytes(b"{")
    assert GroupCommitter(store).commit_pending() == 4
    good, nan, text, last = replies(store, names)
    assert (len(good.rows), len(last.rows)) == (1, 1)
    assert nan.error == "EngineError"
    assert text.error
    assert not text.rows
    assert stored_numbers(store) == [0, 3]
    (torn,) = replies(store, ["torn"])
    assert torn.error == "DamagedError"
    assert not os.listdir(f"{store.uri}/{REQUESTS}")


def test_a_disk_that_fails_is_tried_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*arguments: object, **options: object) -> None:
        tried.append(arguments)
        full = ResourceError("no room")
        full.errno = errno.ENOSPC
        raise full

    names = ask(store, [build.sample(0)], [build.sample(1)])
    committer = GroupCommitter(store)
    monkeypatch.setattr(store, "commit_samples", fail)
    committer.commit_all()
    failures = [writer_module.error_of(reply) for reply in replies(store, names)]
    assert [str(failure) for failure in failures] == ["no room"] * 2
    assert all(isinstance(failure, ResourceError) and is_disk_full(failure) for failure in failures), "a rollout waits"
    assert len(tried) == 1


def test_the_first_of_two_contents_of_a_uid_is_kept(store: Store) -> None:
    other = replace(build.sample(0), tokens=build.sample(0).tokens + 1)
    names = ask(store, [build.sample(0), build.sample(1)], [other, build.sample(2)])
    GroupCommitter(store).commit_all()
    first, second = replies(store, names)
    assert first.dropped == ()
    assert second.dropped == (0,)
    assert store.read_tokens([first.rows[0]])["tokens"].to_pylist() == [build.sample(0).tokens.tolist()]


def test_a_writer_gets_the_rows_and_errors_of_its_batch(store: Store, no_process: None) -> None:
    store.add_teacher(build.teacher("t"))
    store.commit_samples([build.sample(9)])
    delete(store, build.sample(9))
    ended = threading.Event()

    def commit() -> None:
        committer = GroupCommitter(Store.open(store.uri))
        while not ended.is_set():
            committer.commit_pending()
            time.sleep(0.01)

    thread = threading.Thread(target=commit)
    thread.start()
    try:
        with GroupWriter(store.uri) as writer:
            rows = writer.commit_samples([build.sample(number) for number in range(3)]).rows
            assert writer.commit_samples([build.sample(1)]).rows == rows[1:2]
            assert writer.commit_samples([]).rows == ()
            deleted = writer.commit_samples([build.sample(9), build.sample(3)], keep_first=True)
            assert deleted.dropped == (build.sample(9).uid,)
            assert deleted.rows[0] == -1
            changed = replace(build.sample(0), tokens=build.sample(0).tokens + 1)
            with advises("such); the other samples are committed: give the new sample a uid of its own"):
                writer.commit_samples([changed])

            def signals(kind: str) -> list[Signal]:
                return [build.signal(build.sample(n), row, kind) for n, row in enumerate(rows)]

            for kind in ("logprob", "topk"):
                assert writer.commit_signals("t", kind, signals(kind)[:2]) == 2
                assert writer.commit_signals("t", kind, signals(kind)) == 1
            with pytest.raises(UnknownNameError, match="no teacher 'nobody'"):
                writer.commit_signals("nobody", "logprob", signals("logprob"))
    finally:
        ended.set()
        thread.join(60)
    for kind in ("logprob", "topk"):
        assert len(store.missing_signals("t", kind, list(rows))) == 0


def test_a_deletion_leaves_nothing_of_a_batch_that_was_handed_over(store: Store) -> None:
    store.commit_samples([build.sample(9)])
    names = ask(store, [build.sample(9), build.sample(2)])
    delete(store, build.sample(9))
    assert stored_numbers(store) == [2]
    assert replies(store, names)[0].dropped == (0,)
    assert not os.listdir(f"{store.uri}/{REQUESTS}")
    assert store.verify().findings == []


def test_signals_of_many_scorers_count_once(store: Store) -> None:
    for name in ("a", "b"):
        store.add_teacher(build.teacher(name))
    rows = store.commit_samples([build.sample(number) for number in range(4)]).rows.tolist()
    mailbox = FolderMailbox(Path(store.uri))
    names = []
    for number, (teacher, chosen) in enumerate((("a", (0, 1, 2)), ("b", (0, 1)), ("a", (2, 3)))):
        batch = tuple(build.signal(build.sample(index), rows[index], "logprob") for index in chosen)
        names.append(f"scorer-{number}")
        request = Request(store.uuid, teacher=teacher, kind="logprob", signals=batch)
        mailbox.write(f"{REQUESTS}/{names[-1]}", encode_request(request))
    before = store.dataset("scores").version
    GroupCommitter(store).commit_pending()
    assert [reply.inserted for reply in replies(store, names)] == [3, 2, 1]
    assert Store.open(store.uri).dataset("scores").version == before + 2


def test_nobody_commits(store: Store, no_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "REPLY_S", 0.1)
    with GroupWriter(store.uri) as writer, pytest.raises(DeadlineError, match="no process has committed the batch"):
        writer.commit_samples([build.sample(0)])
    with pytest.raises(InputError, match=r"no store at .*nowhere \(it has no store.json\)"):
        GroupWriter(Path(store.uri).parent / "nowhere")
    GroupCommitter(store).commit_pending()  # a batch that nobody waits for is committed, too
    assert stored_numbers(store) == [0]
    monkeypatch.setattr(committer_module, "UNREAD_REPLY_S", -1.0)
    GroupCommitter(store).commit_pending()
    assert not os.listdir(f"{store.uri}/{REPLIES}")


def test_a_batch_for_a_store_that_was_replaced_is_refused(store: Store, no_process: None) -> None:
    with GroupWriter(store.uri) as writer, ThreadPoolExecutor(1) as threads:
        shutil.rmtree(store.uri)
        successor = Store.create(store.uri)
        asking = threads.submit(writer.commit_samples, [build.sample(0)])
        while not os.path.isdir(f"{store.uri}/{REQUESTS}"):
            time.sleep(0.01)
        GroupCommitter(successor).commit_all()
        with pytest.raises(MismatchError, match="was opened, and another store is there now"):
            asking.result(60)
    assert stored_numbers(successor) == []


def test_stores_that_cannot_have_several_writers_are_refused(s3: str) -> None:
    Store.create(f"{s3}/store", single_writer=True)
    with pytest.raises(InputError, match="made for a single writer, since its server ignores If-None-Match"):
        GroupWriter(f"{s3}/store")
    with pytest.raises(InputError, match="must not carry credentials"):
        GroupWriter("s3://key:secret@bucket/store")


def test_an_error_of_the_whole_process_is_the_reply(store: Store) -> None:
    names = ask(store, [build.sample(0)])
    GroupCommitter(store).refuse_pending(MismatchError("another store"))
    (reply,) = replies(store, names)
    assert reply == Reply(error="MismatchError", message="another store")
    assert isinstance(writer_module.error_of(reply), MismatchError)
    assert type(writer_module.error_of(replace(reply, error="nearest"))) is EngineError
    assert stored_numbers(store) == []


def test_a_process_that_cannot_open_the_store_replies_why(store: Store) -> None:
    mark = Path(store.uri) / "store.json"
    with GroupWriter(store.uri) as writer:
        content = json.loads(mark.read_bytes())
        del content["crc32c"]
        mark.write_bytes(seal(content | {"format_version": 99}))
        with pytest.raises(MismatchError, match=r"process that commits for all writers cannot open the store: .*99"):
            writer.commit_samples([build.sample(0)])
    assert not os.listdir(f"{store.uri}/{REQUESTS}")
    messages, until = Path(store.uri) / "group-commit" / election.MESSAGES, time.monotonic() + 60
    while "99" not in messages.read_text() and time.monotonic() < until:  # written after the reply, as the process ends
        time.sleep(0.05)
    assert "99" in messages.read_text()


def test_a_process_that_cannot_start_is_reported_while_a_writer_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no module named lance >&2\nexit 3\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(writer_module, "REPLY_S", 3.0)
    monkeypatch.setattr(writer_module, "LOOK_EVERY_S", 0.1)
    reason = "the process that commits ended with exit code 3: no module named lance"
    with (
        GroupWriter(store.uri) as writer,
        pytest.warns(RuntimeWarning, match=reason) as warned,
        pytest.raises(DeadlineError, match=reason),
    ):
        writer.commit_samples([build.sample(0)])
    assert len(warned) == 1


def test_a_process_ends_when_nobody_asks(store: Store) -> None:
    ask(store, [build.sample(0)])
    code = (
        "import sys; from mopd_dataplane.store.group_commit import __main__ as process; process.IDLE_S = 0.5; "
        "process.main(sys.argv[1], None, {})"
    )
    subprocess.run([sys.executable, "-c", code, store.uri], check=True, timeout=120)
    assert stored_numbers(store) == [0]


def test_an_object_store_has_one_term_at_a_time(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(f"{s3}/store")
    assert store.files is not None
    watches = [TermWatch(store.files) for _ in range(2)]
    assert [watch.take_free_term() for watch in watches] == [1, 0]
    holding = TermHolding(store.files, 1)
    monkeypatch.setattr(election, "EXPIRY_S", 0.0)
    time.sleep(0.1)
    assert holding.is_held
    assert watches[1].take_free_term() == 2  # by this watch's clock the first one has expired
    assert not holding.is_held
    assert newest_term(store.files) == 2
    monkeypatch.setattr(election, "EXPIRY_S", 600.0)
    successor = TermHolding(store.files, 2)
    assert watches[0].take_free_term() == 0
    successor.end()
    assert watches[0].take_free_term() == 3
    assert store.files.children(election.TERMS) == ["2", "3"]
    holding.end()


def test_writers_of_an_object_store(s3: str) -> None:
    store = Store.create(f"{s3}/store")
    with ThreadPoolExecutor(2) as threads:

        def commit(number: int) -> list[int]:
            with GroupWriter(store.uri) as writer:
                batches = ([build.sample(100 * number + 2 * turn + index) for index in range(2)] for turn in range(3))
                return [row for batch in batches for row in writer.commit_samples(batch).rows]

        rows = [row for work in [threads.submit(commit, number) for number in range(2)] for row in work.result(300)]
    assert sorted(rows) == list(range(12))
    assert Store.open(store.uri).samples(["uid"]).num_rows == 12
    assert kill_processes(store) == 1
