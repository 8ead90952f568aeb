"""The whole plane in one thread under one seed: engine, token log, store stand-in, plan, consumer, and their faults.

Everything that would differ from run to run is replaced: threads run at moments that the seed chooses, time is a
number, and the disk is PowerDisk. A seed activates a quarter of the fault points, each with a chance of its own (what
FoundationDB calls BUGGIFY); the rest of the product is the product.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from deaths import Died
from powerdisk import PowerDisk
from shelf import Shelf

from mopd_dataplane.base import fault_points, files
from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.log import flusher, log_writer, segment_file
from mopd_dataplane.errors import MopdError, ResourceError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.records import Prompt, Sample, Snapshot
from mopd_dataplane.rollout import committer, loop, runner
from mopd_dataplane.rollout.engines.engine import StepOutput
from mopd_dataplane.testing.toy_engine import ToyEngine

PROMPTS = 8
LIVES = 200
"""A run that is still not done after so many lives never will be."""
QUIET_AFTER = 40
"""Lives after which nothing befalls it any more."""
DAY_S = 86_400.0


class World:
    """Time, chance, and what goes wrong."""

    def __init__(self, seed: int, home: Path, *, calm: bool = False) -> None:
        self.draw = random.Random(seed)
        self.disk = PowerDisk(home)
        self.now = 0.0
        self.trace: list[str] = []
        self.calm = calm
        self._chances: dict[str, float] = {}

    def strikes(self, what: str) -> bool:
        """Whether a fault happens here now; a quarter of the places are ever struck, each with its own chance."""
        if what not in self._chances:
            active = self.draw.random() < 0.25
            self._chances[what] = self.draw.choice((0.005, 0.02, 0.25)) if active else 0.0
        if self.calm or self.draw.random() >= self._chances[what]:
            return False
        self.trace.append(what)
        return True

    def passed(self, point: str) -> None:
        """The observer of named places: the process may die at each."""
        if self.strikes(f"death at {point}"):
            raise Died

    def sleep(self, seconds: float) -> None:
        """Time passes; sometimes much of it."""
        self.now += seconds * (1000 if self.strikes("slow clock") else 1)

    def write(self, descriptor: int, data: Any) -> int:
        """os.write that may be short or find the disk full."""
        if self.strikes("full disk"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data[: max(1, len(data) // 2)] if self.strikes("short write") else data)

    def fdatasync(self, descriptor: int) -> None:
        """os.fdatasync that may fail."""
        if self.strikes("failed sync"):
            raise OSError(errno.EIO, "Input/output error")
        os.fdatasync(descriptor)


class SimFlusher(flusher.Flusher):
    """The flusher without its thread: it syncs when somebody waits, and at moments that the seed chooses."""

    world: World

    def start(self) -> None:
        """No thread."""

    def stop(self) -> None:
        """No thread."""

    def wrote(self, lsn: int) -> None:
        self.written = lsn
        if self.failure is None and self.world.draw.random() < 0.1:
            self._turn_now()

    def wait(self, lsn: int) -> None:
        self.check()
        if self.synced < lsn:
            self._turn_now()
        self.check()

    def _turn_now(self) -> None:
        try:
            self.flush()
            if self.world.draw.random() < 0.5:
                self._state_watermark()
        except ResourceError as failure:
            self.fail(failure)


class SimCommitter(committer.Committer):
    """The committer without its thread: batches are committed at moments that the seed chooses."""

    world: World

    def __init__(self, log: Any, commit: Callable[[list[Sample]], object], **options: Any) -> None:
        self._log, self._commit, self._batch, self._logged = log, commit, [], []
        self._full_disk_wait_s, self._notice = options["full_disk_wait_s"], options["notice"]
        self._done = types.SimpleNamespace(put=self._logged.append)  # type: ignore[assignment]

    def hand_over(self, finished: Any) -> None:
        self._batch.append(finished)
        if self.world.draw.random() < 0.4:
            self._commit_now()

    def committed(self) -> list[list[int]]:
        batches, self._logged[:] = list(self._logged), []
        return batches

    def drain(self) -> None:
        self._commit_now()

    def stop(self) -> None:
        """No thread."""

    def _commit_now(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._commit_batch(batch)


class SimWatch:
    """Calls the engine here and now."""

    def call(self, work: Callable[[], Any]) -> Any:
        return work()

    def stop(self) -> None:
        """No thread."""


class SimEngine(ToyEngine):
    """A toy engine that may die, say nothing, or say nonsense."""

    def __init__(self, world: World) -> None:
        super().__init__(slots=world.draw.choice((1, 3, 8)), mean_length=15)
        self._world = world

    def step(self) -> StepOutput:
        if self._world.strikes("death in the engine"):
            raise RuntimeError("device lost")
        said = super().step()
        if self._world.strikes("nothing from the engine"):
            return StepOutput(*(column[:0] for column in vars_of(said)))
        if self._world.strikes("NaN from the engine"):
            said.logprobs[-1] = np.nan
        return said


def vars_of(said: StepOutput) -> tuple[Any, ...]:
    """Columns of a step."""
    return said.slots, said.positions, said.token_ids, said.logprobs, said.finished


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Put the world in place of threads, clock and system calls."""
    SimFlusher.world = SimCommitter.world = world
    clock = types.SimpleNamespace(monotonic=lambda: world.now, perf_counter=lambda: world.now, sleep=world.sleep)
    calls = types.SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})
    calls.write, calls.fdatasync = world.write, world.fdatasync
    swaps: list[tuple[Any, str, Any]] = [
        (log_writer, "Flusher", SimFlusher), (runner, "Committer", SimCommitter), (loop, "CallTimeout", SimWatch),
        (segment_file, "os", calls), (segment_file, "time", clock), (files, "time", clock), (committer, "time", clock),
        (loop, "time", clock), (runner, "time", clock), (flusher, "time", clock),
    ]  # fmt: skip
    before = [(module, name, getattr(module, name)) for module, name, _ in swaps]
    for module, name, value in swaps:
        setattr(module, name, value)
    fault_points.observe(world.passed)
    try:
        with world.disk.watching():
            yield
    finally:
        fault_points.observe(None)
        for module, name, value in before:
            setattr(module, name, value)


def simulate(seed: int, home: Path, *, calm: bool = False) -> dict[str, Any]:
    """Run a window to its end through every death: what the store holds, what was consumed, and the trace of faults.

    Raises AssertionError when an acknowledged sample is lost, a sample changes, or the run never ends.
    """
    world = World(seed, home, calm=calm)
    home.mkdir()
    world.disk.settle()
    acknowledged: set[str] = set()
    for life in range(LIVES):
        world.calm |= life >= QUIET_AFTER
        try:
            with simulated(world):
                rollout(world, home, acknowledged)
                consumed = consume(world, home)
            break
        except (Died, MopdError, RuntimeError, OSError) as end:
            world.trace.append(type(end).__name__)
            lose_power(world, home)
        stored = {row["uid"] for row in Shelf(home / "shelf").rows()}
        assert acknowledged <= stored, f"{len(acknowledged - stored)} committed samples lost in life {life}"
    else:
        raise AssertionError(f"not done after {LIVES} lives: {world.trace[-5:]}")
    assert world.now < DAY_S, f"waited {world.now:.0f} s"
    rows = Shelf(home / "shelf").rows()
    uids = [row["uid"] for row in rows]
    assert len(set(uids)) == len(uids), "a sample is there twice"
    left = [str(path.relative_to(home)) for path in home.rglob("*.wal")]
    assert not left, f"left behind: {left}"
    return {
        "samples": {row["uid"]: (row["tokens"], row["bits"], row["reason"]) for row in rows},
        "consumed": consumed,
        "trace": world.trace,
    }


def lose_power(world: World, home: Path) -> None:
    """Sometimes the machine went down with the process."""
    if world.strikes("power loss"):
        after = home.with_name("after")
        world.disk.after_power_loss(after, world.draw)
        shutil.rmtree(home)
        after.rename(home)
        world.disk = PowerDisk(home)
        world.disk.settle()


def rollout(world: World, home: Path, acknowledged: set[str]) -> None:
    """Sample what is missing into the store stand-in."""
    shelf = Shelf(home / "shelf")
    files.fsync(home)

    def commit(samples: list[Sample]) -> None:
        shelf.commit(samples)
        if world.strikes("lost reply"):
            raise OSError("connection reset before the answer came")
        acknowledged.update(sample.uid for sample in samples)

    prompts = [Prompt(prompt_id=f"p{i}", domain="d", text=f"{i} + {7 * i} =") for i in range(PROMPTS)]
    runner.run_rollout(
        SimEngine(world),
        prompts,
        runner.RolloutTask(
            stage="student",
            iteration=1,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=24),
            wal=sections.Wal(segment_bytes=1 << 14, full_disk_wait_s=3600),
            wal_dir=home / "wal",
            render=lambda prompt: [ord(c) % 12 for c in prompt.text],
        ),
        commit=commit,
        skip_uids=set(shelf.uids),
    )


def consume(world: World, home: Path) -> int:
    """Plan the window and consume it step by step; the cursor moves with the state, every second step."""
    rows = Shelf(home / "shelf").rows()
    order = np.argsort(np.array([row["uid"] for row in rows]))
    count = len(rows)
    small = np.zeros(count, np.int32)
    columns = Columns(
        sample_rows=order, total_len=small + 8, loss_tokens=small + 4,
        version_first=small, domains=small.astype(np.int16), groups=np.arange(count),
        teachers=(small - 1).astype(np.int16), has_signals=small == 0, has_reward=small == 0, abandoned=small == 1,
        domain_names=("d",),
    )  # fmt: skip
    plan = build_window(
        columns, sections.Plan(pack_tokens=16, batch_samples=2), seed=0, stage="student", window=0,
        snapshot=Snapshot(uri="", versions={}), teachers=[], training=Training(epochs=2),
    )  # fmt: skip
    cursor = home / "checkpoints" / "cursor.json"
    at = json.loads(cursor.read_text()) if cursor.exists() else {"step": 0, "state": 0}
    step, state = at["step"], at["state"]
    while step < len(plan.step_starts) - 1:
        first, last = plan.pack_starts[plan.step_starts[step : step + 2]]
        for row in plan.sample_rows[first:last]:
            state = crc32c(json.dumps([rows[row]["uid"], rows[row]["tokens"]]).encode(), start=state)
        step += 1
        world.passed("consumed step")
        if step % 2 == 0 or step == len(plan.step_starts) - 1:
            files.publish_file(cursor, json.dumps({"step": step, "state": state}).encode())
            world.passed("consumed checkpoint")
    return int(state)
