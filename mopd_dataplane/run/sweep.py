"""Runs a sweep: every unfinished run as a process of its own, in turn or side by side.

The state of a sweep is that of its stores, so the same call continues after any kill.
"""

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from mopd_dataplane.base.processes import exit_error, parent_named, stop_child
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.job.load import load_job
from mopd_dataplane.job.sweep import SweepRun
from mopd_dataplane.query.text import duration
from mopd_dataplane.run.context import open_existing
from mopd_dataplane.run.progress import Progress

POLL_INTERVAL_S = 0.2
STOP_S = 30.0
"""How long a run may take to end when the sweep is interrupted, before it is killed."""
LOG_LINES = 12
"""Last lines of a failed run's log that are printed."""


def is_finished(job: str, run: SweepRun) -> bool:
    """Check whether every stage of a run has ended. Raises MismatchError for a store made with other settings."""
    loaded = load_job(job, overrides=[*run.overrides, f"seed={run.seed}", f"store={json.dumps(str(run.store))}"])
    try:
        existing = open_existing(loaded, Progress(None))
    except UnknownNameError:
        return False
    return all(existing.is_done(stage) for stage in loaded.stages)


def run_sweep(job: str, runs: Sequence[SweepRun], *, processes: int, say: Callable[[str], None]) -> None:
    """Run what is unfinished, at most `processes` runs at a time.

    A run that fails leaves the others running. Raises the error of the first failed run at the end.
    """
    unfinished = deque(run for run in runs if not is_finished(job, run))
    if len(unfinished) < len(runs):
        say(f"{len(runs) - len(unfinished)} of {len(runs)} runs have ended before")
    active: dict[subprocess.Popen[bytes], tuple[SweepRun, float]] = {}
    failed: list[tuple[SweepRun, int]] = []
    try:
        while unfinished or active:
            while unfinished and len(active) < processes:
                run = unfinished.popleft()
                active[_start(job, run)] = run, time.monotonic()
                say(f"{run.label}: runs, its output goes to {log_of(run)}")
            for process in [process for process in active if process.poll() is not None]:
                run, start = active.pop(process)
                if process.returncode:
                    failed.append((run, process.returncode))
                    say(f"{run.label}: failed\n{_last_lines(log_of(run))}")
                else:
                    say(f"{run.label}: done after {duration(time.monotonic() - start)}")
            time.sleep(POLL_INTERVAL_S)
    finally:
        for process in active:
            stop_child(process, STOP_S)
    if failed:
        names = "; ".join(run.label for run, _ in failed)
        raise exit_error(f"{len(failed)} of {len(runs)} runs ({names})", failed[0][1])


def log_of(run: SweepRun) -> Path:
    """File with the output of a run, beside its store."""
    return run.store.with_name(f"{run.store.name}.log")


def _start(job: str, run: SweepRun) -> subprocess.Popen[bytes]:
    settings = [word for override in run.overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "mopd_dataplane", "run", job, "--seed", str(run.seed), "--store", str(run.store)]
    run.store.parent.mkdir(parents=True, exist_ok=True)
    with log_of(run).open("ab") as log:
        return subprocess.Popen([*command, *settings], stdout=log, stderr=log, env=parent_named())


def _last_lines(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-LOG_LINES:])
