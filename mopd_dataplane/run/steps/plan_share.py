"""A process that plans a share of a stage's windows: `python -m mopd_dataplane.run.steps.plan_share TASK.json`.

It prints `[samples, steps]` as soon as a window is recorded. Exit code 0: every window is planned; 130: stopped by
Ctrl-C; otherwise the code of the error (mopd_dataplane.errors), whose text is on stderr.
"""

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from mopd_dataplane.base.processes import end_with_parent
from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.job import Job
from mopd_dataplane.run.context import open_existing
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.plan import plan_own_window

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class PlanTask(BaseModel):
    """What a process plans."""

    job: Job
    stage: str
    windows: list[int]


def main(file: str) -> int:
    """Plan the windows of a task."""
    try:
        task = PlanTask.model_validate_json(Path(file).read_bytes())
        run = open_existing(task.job, Progress(quiet=True))
        stage = run.job.stage(task.stage)
        for window in task.windows:
            print(json.dumps(plan_own_window(run, stage, window)), flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    except MopdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1]))
