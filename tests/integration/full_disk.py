"""Runs a job whose store lies on a small disk that is full at the worst moments; prints what happened as JSON.

    unshare --mount python tests/integration/full_disk.py JOB

In a mount namespace of its own, so the disk is gone with the process. First a stage runs as a user runs it, on a disk
that grows by GROWTH_MIB whenever a run ends without space. Then the rest of the job runs in this process, and something
else fills the disk in the middle of each rollout, and lets go a moment after generation has been paused.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from mopd_dataplane.base import fault_points
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import load_job
from mopd_dataplane.run.pipeline import run_job

FIRST_MIB = 2
GROWTH_MIB = 2
FILLED_AT_STEP = 4
TIMEOUT_S = 120.0


def grow(store: Path, mib: int) -> None:
    """Mount the disk, or make it larger."""
    store.mkdir(exist_ok=True)
    size, remount = f"size={mib}m,mode=700", "remount," if store.is_mount() else ""
    subprocess.run(["mount", "-t", "tmpfs", "-o", remount + size, "tmpfs", str(store)], check=True, timeout=30)


def run_with_growth(job: str, store: Path) -> tuple[list[dict[str, Any]], int]:
    """Run the first stage; every ending that was not the last, and the size that was enough."""
    endings = []
    for mib in range(FIRST_MIB, 200, GROWTH_MIB):
        grow(store, mib)
        command = [sys.executable, "-m", "mopd_dataplane", "run", job, "--stage", "base"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if not done.returncode:
            return endings, mib
        endings.append({"code": done.returncode, "said": done.stderr[-600:]})
    raise AssertionError(f"200 MiB were not enough: {endings}")


class Squatter:
    """Takes all space in the middle of a rollout, and gives it back when the job has said that it is paused."""

    def __init__(self, store: Path, said: io.StringIO) -> None:
        self.fillings = 0
        self._ballast = store / "ballast"
        self._said = said
        self._steps = 0

    def at(self, name: str) -> None:
        """Called at every checkpoint of the job."""
        self._steps += name == "rollout.step"
        if name == "rollout.step" and self._steps % 12 == FILLED_AT_STEP:
            self.fillings += 1
            heard = len(self._said.getvalue())
            fill(self._ballast)
            threading.Thread(target=self._give_back, args=(heard,), daemon=True).start()

    def _give_back(self, heard: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while "is full" not in self._said.getvalue()[heard:] and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        self._ballast.unlink(missing_ok=True)


def fill(ballast: Path) -> None:
    """Write until not a byte more fits."""
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def run_with_squatter(job: Job, store: Path) -> dict[str, Any]:
    """The rest of the job."""
    said = io.StringIO()
    squatter = Squatter(store, said)
    fault_points.observe(squatter.at)
    run_job(job, console=Console(file=said, width=200))
    fault_points.observe(None)
    return {"fillings": squatter.fillings, "said": [line for line in said.getvalue().splitlines() if " disk " in line]}


def main() -> None:
    """Print one JSON object."""
    job = load_job(sys.argv[1])
    store = Path(job.store)
    endings, mib = run_with_growth(sys.argv[1], store)
    grow(store, mib + 40)
    pauses = run_with_squatter(job, store)
    verify = [sys.executable, "-m", "mopd_dataplane", "store", "verify", job.store, "--json"]
    checked = subprocess.run(verify, capture_output=True, text=True, timeout=120)
    copy = Path(sys.argv[1]).parent / "copy"
    subprocess.run(["cp", "-a", str(store), str(copy)], check=True, timeout=60)
    left = [str(file) for file in store.rglob("*") if ".tmp" in file.name]
    print(json.dumps({"endings": endings, "findings": json.loads(checked.stdout)["findings"], "left": left} | pauses))


if __name__ == "__main__":
    main()
