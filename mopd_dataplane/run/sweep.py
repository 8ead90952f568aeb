"""Runs a sweep: every unfinished run in processes of its own, in turn or side by side.

    stages that all runs have in common ── once for each seed ──▶ SHARED/seed-N ── fork ──▶ ARM/seed-N ── its own stages

The state of a sweep is that of its stores, so the same call continues after any kill.
"""

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mopd_dataplane.base.processes import exit_error, parent_named, stop_child
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.job.load import load_job
from mopd_dataplane.job.sweep import SweepRun
from mopd_dataplane.query.text import duration
from mopd_dataplane.run.context import Run, open_existing
from mopd_dataplane.run.fork import fork
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.provenance import settings_digest

POLL_INTERVAL_S = 0.2
STOP_S = 30.0
"""How long a run may take to end when the sweep is interrupted, before it is killed."""
LOG_LINES = 12
"""Last lines of a failed run's log that are printed."""


def is_finished(job: str, run: SweepRun) -> bool:
    """Check whether every stage of a run has ended. Raises MismatchError for a store made with other settings."""
    existing = _opened(job, run)
    if existing is None:
        return False
    names = run.stages or [stage.name for stage in existing.job.stages]
    return all(existing.is_done(existing.job.stage(name)) for name in names)


def run_sweep(
    job: str, runs: Sequence[SweepRun], *, shared: Path | None, processes: int, say: Callable[[str], None]
) -> None:
    """Run what is unfinished, at most `processes` runs at a time.

    shared: folder of the stores in which the first stages, as far as all runs have them in common, are run once for
    each seed; a run that is new starts as a fork of its seed's. None: nothing is shared.
    A run that fails leaves the others running. Raises the error of the first failed run at the end.
    """
    unfinished = [run for run in runs if not is_finished(job, run)]
    if len(unfinished) < len(runs):
        say(f"{len(runs) - len(unfinished)} of {len(runs)} runs have ended before")
    new = [run for run in unfinished if not run.store.exists()]
    if shared is not None and new and (stages := shared_stages(job, runs)):
        starts = {run.seed: _start_of(run, runs, stages, shared) for run in new}
        _run_all(job, [start for start in starts.values() if not is_finished(job, start)], processes, say)
        for run in new:
            _fork(job, starts[run.seed], run)
    _run_all(job, unfinished, processes, say)


def shared_stages(job: str, runs: Sequence[SweepRun]) -> tuple[str, ...]:
    """The first stages of a job, as far as all runs need them and have them with the same settings.

    The last stage of the runs is none of them.
    """
    jobs = [load_job(job, overrides=[*run.overrides]) for run in {run.arm: run for run in runs}.values()]
    before_last = (runs[0].stages or [stage.name for stage in jobs[0].stages])[:-1]
    shared: list[str] = []
    for stage in jobs[0].stages:
        digests = {settings_digest(other, [stage.name]) for other in jobs}
        if len(digests) > 1 or stage.name not in before_last:
            break
        shared.append(stage.name)
    return tuple(shared)


def log_of(run: SweepRun) -> Path:
    """File with the output of a run, beside its store."""
    return run.store.with_name(f"{run.store.name}.log")


def _start_of(run: SweepRun, runs: Sequence[SweepRun], stages: tuple[str, ...], folder: Path) -> SweepRun:
    """What a run shares with all others of its seed: their first stages, with the settings that all of them have."""
    common = tuple(one for one in run.overrides if all(one in other.overrides for other in runs))
    return SweepRun(arm="shared", seed=run.seed, overrides=common, store=folder / f"seed-{run.seed}", stages=stages)


def _fork(job: str, start: SweepRun, run: SweepRun) -> None:
    """Make the store of a run from the one in which its first stages have ended."""
    existing = _opened(job, start)
    assert existing is not None
    last = existing.job.stage(start.stages[-1])
    own = [one for one in run.overrides if one not in start.overrides]
    run.store.parent.mkdir(parents=True, exist_ok=True)
    fork(existing.store, str(run.store), f"{last.name}@{existing.policies.latest(last)}", settings=own)


def _opened(job: str, run: SweepRun) -> Run | None:
    """A run as its store has it; None before there is one."""
    loaded = load_job(job, overrides=[*run.overrides, f"seed={run.seed}", f"store={json.dumps(str(run.store))}"])
    try:
        return open_existing(loaded, Progress(None))
    except UnknownNameError:
        return None


@dataclass
class _Turn:
    """A run that has begun, and the commands that it has left."""

    run: SweepRun
    commands: deque[list[str]]
    began: float = field(default_factory=time.monotonic)

    def next_process(self) -> "subprocess.Popen[bytes]":
        self.run.store.parent.mkdir(parents=True, exist_ok=True)
        with log_of(self.run).open("ab") as log:
            return subprocess.Popen(self.commands.popleft(), stdout=log, stderr=log, env=parent_named())


def _run_all(job: str, runs: Sequence[SweepRun], processes: int, say: Callable[[str], None]) -> None:
    waiting = deque(runs)
    active: dict[subprocess.Popen[bytes], _Turn] = {}
    failed: list[tuple[SweepRun, int]] = []
    try:
        while waiting or active:
            while waiting and len(active) < processes:
                run = waiting.popleft()
                turn = _Turn(run, deque(_commands(job, run)))
                active[turn.next_process()] = turn
                say(f"{turn.run.label}: runs, its output goes to {log_of(turn.run)}")
            for process in [process for process in active if process.poll() is not None]:
                turn = active.pop(process)
                if process.returncode:
                    failed.append((turn.run, process.returncode))
                    say(f"{turn.run.label}: failed\n{_last_lines(log_of(turn.run))}")
                elif turn.commands:
                    active[turn.next_process()] = turn
                else:
                    say(f"{turn.run.label}: done after {duration(time.monotonic() - turn.began)}")
            time.sleep(POLL_INTERVAL_S)
    finally:
        for process in active:
            stop_child(process, STOP_S)
    if failed:
        names = "; ".join(run.label for run, _ in failed)
        raise exit_error(f"{len(failed)} of {len(runs)} runs ({names})", failed[0][1])


def _commands(job: str, run: SweepRun) -> list[list[str]]:
    """The commands of a run: one for each of its stages that has not ended, or one for the whole job."""
    settings = [word for override in run.overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "mopd_dataplane", "run", job, "--seed", str(run.seed), "--store", str(run.store)]
    if not run.stages:
        return [[*command, *settings]]
    existing = _opened(job, run)
    left = [name for name in run.stages if existing is None or not existing.is_done(existing.job.stage(name))]
    return [[*command, *settings, "--stage", name] for name in left]


def _last_lines(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-LOG_LINES:])
