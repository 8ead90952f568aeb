"""A stage whose rollout, scoring and training run concurrently, each in a process of its own (see follow.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

from mopd_dataplane.base.processes import exit_error, parent_named, scratch_folder, stop_child
from mopd_dataplane.job.job import Stage
from mopd_dataplane.run.context import Run

PARTS = ("rollout", "score", "train")
POLL_S = 0.2
STOP_S = 60.0
"""How long a part may take to save its state once it is asked to stop."""


def run_concurrent(run: Run, stage: Stage) -> None:
    """Run every part of a stage to its end; on an error or an interruption all of them are stopped gracefully.

    Each continues where it stopped, so the same call continues after any kill. Raises the error of the first part that
    failed.
    """
    command = [sys.executable, "-m", "mopd_dataplane"]
    with scratch_folder() as scratch, contextlib.ExitStack() as running:
        job = scratch / "job.json"  # with the overrides of this call
        job.write_text(run.job.model_dump_json())
        where = [str(job), "--stage", stage.name, "--follow", "--json"]
        parts = {}
        for part in PARTS:  # the answer of a part is not wanted, its progress goes to our stderr
            process = parts[part] = subprocess.Popen(
                [*command, part, *where], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=parent_named()
            )
            running.callback(stop_child, process, STOP_S)
        while True:
            codes = {part: process.poll() for part, process in parts.items()}
            for part, code in codes.items():
                if code:
                    raise exit_error(f"stage {stage.name!r}: {part}", code)
            if None not in codes.values():
                return
            time.sleep(POLL_S)
