"""One planned window of a small stage, its loader process, and readers of it: what rows about loading have in common.

Nothing here touches Lance in the calling process: it forks, and Lance's threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from deaths import Child, told_by

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "store"))

import store_builders as build

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.job import sections
from mopd_dataplane.load import server
from mopd_dataplane.load.client import LoadedBatch, LoaderClient
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, collect_columns
from mopd_dataplane.plan.follow import end_window
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.store.dataset import Store

warnings.filterwarnings("ignore", message="lance is not fork-safe")

STAGE, TEACHER = "student", "teacher"
SAMPLES = 24
SPEC = LoadSpec(stage=STAGE, signals=("logprob",), slots=2, deadline_s=5)
Manifest = list[tuple[int, int]]
"""(pack, crc32c of what it holds) of every pack of a batch"""


def make_stage(home: Path) -> int:
    """A store with samples, one teacher's log-probs, a planned window and the end of the log; its number of steps."""
    store = Store.create(home)
    samples = [build.sample(number) for number in range(SAMPLES)]
    rows = store.commit_samples(samples).rows
    store.add_teacher(build.teacher(TEACHER))
    scored = [build.signal(sample, int(row), "logprob") for sample, row in zip(samples, rows, strict=True)]
    store.commit_signals(TEACHER, "logprob", scored)
    snapshot = store.snapshot(tag="window-0")
    columns = collect_columns(
        [(rows, store.samples(list(SAMPLE_COLUMNS)))], len(rows),
        route=lambda domain, effort: TEACHER, teachers=[TEACHER],
        scores=store.table("scores", ["sample_row", "teacher", "kind"]), signals=("logprob",),
    )  # fmt: skip
    settings = sections.Plan(pack_tokens=64, batch_samples=4)
    plan = build_window(columns, settings, seed=0, stage=STAGE, window=0, snapshot=snapshot, teachers=[TEACHER])
    store.add_plan(plan)
    store.add_plan(end_window(STAGE, 1, 0, snapshot))
    return len(plan.step_starts) - 1


class LoaderChild:
    """A loader process; it serves until its last trainer leaves, or it is stopped."""

    def __init__(self, home: Path, path: Path, spec: LoadSpec = SPEC) -> None:
        self.path = path
        self._child = Child(partial(_serve, home, path, spec))
        self.pid = self._child.pid

    def end(self, number: int) -> int:
        """Send a signal and wait; the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return self._child.end_by(10)

    def end_by(self, deadline_s: float) -> int:
        """Wait until it has ended by itself; the exit code."""
        return self._child.end_by(deadline_s)


def _serve(home: Path, path: Path, spec: LoadSpec) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return server.main(["--store", str(home), "--socket", str(path), "--spec", spec.model_dump_json()])


@contextmanager
def anchored(path: Path) -> Iterator[None]:
    """A connection that asks for nothing keeps a loader alive between trainers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as anchor:
        with client_of(path):
            anchor.connect(str(path))
        yield


def client_of(path: Path, deadline_s: float = 5.0) -> LoaderClient:
    """A trainer's connection, waiting for the loader to listen."""
    return LoaderClient(path, views="numpy", deadline_s=deadline_s)


def manifest(batch: LoadedBatch) -> Manifest:
    """What a batch holds."""
    return [
        (pack.index, crc32c(pack.tokens, pack.sampler_logprobs, pack.teacher_logprobs, pack.loss_mask))
        for pack in batch.packs
    ]


def whole_window(home: Path, path: Path) -> list[Manifest]:
    """Every batch of the window, read without disturbance."""
    loader = LoaderChild(home, path)
    with client_of(path) as client:
        batches = [manifest(batch) for batch in client.batches(STAGE, 0)]
    loader.end_by(10)
    return batches


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def shared_memory(pid: int | str = "self") -> int:
    """Slots of shared memory that a process holds open or mapped."""
    maps = {line.split()[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "mopd-slot" in line}
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "mopd-slot" in os.readlink(fd):
                inodes.add(str(fd.stat().st_ino))
    return len(maps | inodes)


def nobody_holds_a_slot(client: LoaderClient, deadline_s: float) -> bool:
    """Whether what the loader lends comes down, in time, to what it keeps ready."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        stats = client.stats()
        if stats["lent"] == sum(rank["ready"] for rank in stats["ranks"]):
            return True
        time.sleep(0.05)
    return False


def make_stage_apart(home: Path) -> int:
    """Run make_stage in a child process. Returns the number of its steps."""
    steps: int = told_by(partial(make_stage, home))
    return steps
