"""Kill the loader or a trainer at every state of a slot: nobody hangs, nothing leaks, the run resumes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from tinystage import nobody_holds_a_slot

from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.job import sections
from mopd_dataplane.load.client import LoadedBatch, LoaderClient
from mopd_dataplane.load.launch import LoaderProcess, start_server
from mopd_dataplane.load.ring import POISON
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.store.dataset import Store

TEACHERS = ["adder", "speller"]
SPEC = LoadSpec(stage=STAGE, signals=("hidden",), slots=2, deadline_s=10)
TRAINER_STATES = ("connected", "opened", "claimed", "half released", "released", "ended")
TRAINER = """
import sys
from mopd_dataplane.load.client import LoaderClient

def reached(state):
    print(state, flush=True)
    sys.stdin.readline()

client = LoaderClient(sys.argv[1], rank=int(sys.argv[2]), world_size=int(sys.argv[3]), views="numpy", deadline_s=20)
reached("connected")
stream = client.batches("student", 0)
batch = next(stream)
reached("opened")
packs = list(batch.packs)
reached("claimed")
batch.release(packs[0])
reached("half released")
batch.release()
reached("released")
for batch in stream:
    list(batch.packs)
reached("ended")
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = lengths_of(48, mean_log=4.5, shortest=8, longest=400)
    planned_store = make_store(tmp_path_factory.mktemp("kill") / "s", lengths, teachers=TEACHERS, signals=("hidden",))
    plan = build_window(
        plan_columns(planned_store, TEACHERS), sections.Plan(pack_tokens=512, batch_samples=16), seed=0, stage=STAGE,
        window=0, snapshot=planned_store.snapshot(), teachers=TEACHERS,
    )  # fmt: skip
    planned_store.add_plan(plan)
    return planned_store


@pytest.fixture(scope="module")
def expected(store: Store, tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple]]:
    """Every batch of an undisturbed run."""
    path = tmp_path_factory.mktemp("calm") / "l.sock"
    with start_server(store.uri, path, SPEC), client_of(path) as client:
        return [content(batch) for batch in client.batches(STAGE, 0)]


@pytest.fixture(scope="module")
def loader(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoaderProcess]:
    """A loader that outlives its trainers."""
    path = tmp_path_factory.mktemp("loader") / "l.sock"
    with start_server(store.uri, path, SPEC) as process, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as anchor:
        anchor.connect(str(path))
        yield process


def client_of(path: Path, rank: int = 0, world_size: int = 1) -> LoaderClient:
    return LoaderClient(path, rank, world_size, views="numpy", deadline_s=20)


def content(batch: LoadedBatch) -> list[tuple]:
    return [(p.index, p.tokens.tobytes(), p.hidden.tobytes(), p.sampler_logprobs.tobytes()) for p in batch.packs]


def read_on(batches: list[LoadedBatch], stream: Iterator[LoadedBatch], done: list[list[tuple]]) -> None:
    """Read these batches and those after them; one may have come while the loader lived."""
    for batch in chain(batches, stream):
        done.append(content(batch))


def trainer(path: Path, rank: int = 0, world_size: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TRAINER, str(path), str(rank), str(world_size)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def walk_to(process: subprocess.Popen[str], state: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    while process.stdout.readline().strip() != state:
        assert process.poll() is None
        process.stdin.write("\n")
        process.stdin.flush()


def slots_of(pid: int) -> int:
    """Slots of shared memory that a process holds."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if "mopd-slot" in os.readlink(fd):
                inodes.add(fd.stat().st_ino)
    return len(inodes)


@pytest.mark.slow
@pytest.mark.parametrize("state", TRAINER_STATES)
def test_a_killed_trainer_gives_everything_back(loader, expected, state):
    victim = trainer(loader.socket)
    walk_to(victim, state)
    victim.kill()
    victim.wait()
    started = time.monotonic()
    with client_of(loader.socket) as client:
        assert [content(batch) for batch in client.batches(STAGE, 0)] == expected
        assert time.monotonic() - started < SPEC.deadline_s
        assert nobody_holds_a_slot(client, SPEC.deadline_s), "a slot that a dead trainer held never came back"


@pytest.mark.parametrize("state", TRAINER_STATES)
def test_the_other_rank_goes_on(loader, expected, state):
    victim = trainer(loader.socket, 1, 2)
    with client_of(loader.socket, 0, 2) as client:
        walk_to(victim, state)
        victim.kill()
        victim.wait()
        own = [content(batch) for batch in client.batches(STAGE, 0)]
    for mine, whole in zip(own, expected, strict=True):
        assert set(mine) < set(whole)


@pytest.mark.parametrize("state", ["connected", "opened", "claimed", "released"])
def test_a_killed_loader_is_noticed_and_a_new_one_resumes(store, expected, tmp_path, state):
    path = tmp_path / "l.sock"
    loader = start_server(store.uri, path, SPEC)
    client = client_of(path)
    stream = client.batches(STAGE, 0)
    done = []
    if state != "connected":
        batch = next(stream)
    if state in ("claimed", "released"):
        done.append(content(batch))
        packs = list(batch.packs)
    if state == "released":
        batch.release()
    os.kill(loader.pid, signal.SIGKILL)
    loader.process.wait()
    if state == "claimed":
        assert packs[0].tokens.tobytes() == expected[0][0][1], "what was handed out stays readable"
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"the process at the other end .*; start the loader again and resume at"):
        read_on([batch] if state == "opened" else [], stream, done)
    assert time.monotonic() - started < 2, "the end of a process is seen at once, not at the deadline"
    client.close()
    with start_server(store.uri, path, SPEC), client_of(path) as client:
        assert done + [content(batch) for batch in client.batches(STAGE, 0, len(done))] == expected


def test_a_stopped_loader_is_given_up_at_the_deadline(store, tmp_path):
    with start_server(store.uri, tmp_path / "l.sock", SPEC) as loader:
        with LoaderClient(loader.socket, views="numpy", deadline_s=1.5) as client:
            stream = client.batches(STAGE, 0)
            next(stream)
            os.kill(loader.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, loader.pid, os.WSTOPPED)
            started = time.monotonic()
            with pytest.raises(DeadlineError, match=r"said nothing for 1\.5 s"):
                next(stream)
            assert time.monotonic() - started < 10
        os.kill(loader.pid, signal.SIGCONT)


def test_the_loader_does_not_outlive_the_job(store, tmp_path):
    """The process that started it is killed: it ends by itself, with a trainer still connected."""
    code = (
        "import sys, time; from mopd_dataplane.load.launch import start_server; from mopd_dataplane.load.spec import "
        f"LoadSpec; p = start_server({store.uri!r}, sys.argv[1], LoadSpec(stage='student')); print(p.pid, flush=True); "
        "time.sleep(60)"
    )
    path = tmp_path / "l.sock"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        pid = int(job.stdout.readline())
        with client_of(path) as client:
            next(client.batches(STAGE, 0))
            job.kill()
            job.wait()
            until = time.monotonic() + 20
            while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                assert time.monotonic() < until, "the loader is still there"
                time.sleep(0.1)


def test_a_late_reader_sees_poison(store, expected, tmp_path):
    """The last batch of the log: nothing is read into its slots afterwards but the poison."""
    spec = SPEC.model_copy(update={"poison": True})
    with start_server(store.uri, tmp_path / "l.sock", spec), client_of(tmp_path / "l.sock") as client:
        batch = next(client.batches(STAGE, 0, len(expected) - 1))
        tokens = list(batch.packs)[0].tokens  # noqa: RUF015 - all are claimed, so that no slot is needed again
        assert set(tokens.tobytes()) != {POISON}
        batch.release()
        until = time.monotonic() + 10
        while set(tokens.tobytes()) != {POISON}:
            assert time.monotonic() < until, "released memory still looks like data"
            time.sleep(0.05)


def test_nothing_is_left_in_shared_memory(store, tmp_path):
    loader = start_server(store.uri, tmp_path / "l.sock", SPEC)
    client = client_of(tmp_path / "l.sock")
    list(next(client.batches(STAGE, 0)).packs)
    assert slots_of(loader.pid) >= 1
    for pid in (loader.pid, os.getpid()):
        slots = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "mopd-slot" in line]
        assert slots
        assert all("/memfd:" in line and "/dev/shm" not in line for line in slots), "a slot has no name to leave behind"
    os.kill(loader.pid, signal.SIGKILL)
    loader.process.wait()
    client.close()
    assert slots_of(os.getpid()) == 0
