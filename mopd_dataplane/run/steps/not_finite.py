"""A step whose loss or gradient is not finite: its samples, where to look at them, and the command that goes on."""

import shlex
import sys

import numpy as np

from mopd_dataplane.errors import EngineError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.run.changes import FROM_HERE_OPTION, NOT_FINITE, command_line
from mopd_dataplane.run.context import Run
from mopd_dataplane.train.failed_step import FailedStep

MOST_SAMPLES = 8
"""Samples of the step that a message names."""
LOWER = 0.1
"""Factor of the learning rate that a message proposes."""


def not_finite_error(run: Run, stage: Stage, failed: FailedStep) -> EngineError:
    """Record a failed step, so that its window may be trained with other settings, and return the error that says how
    to go on."""
    uids = _samples_of(run, stage, failed)
    detail = {"step": failed.step, "loss": failed.loss, "grad_norm": failed.grad_norm, "uids": uids}
    name = f"{NOT_FINITE}/{stage.name}/{failed.window}/{failed.step}"
    run.store.add_event(name, stage.name, NOT_FINITE, failed.window, None, detail)
    more = f" and {len(uids) - MOST_SAMPLES} more" if len(uids) > MOST_SAMPLES else ""
    uri = run.store.uri
    return EngineError(
        f"stage {stage.name!r} step {failed.step}: loss {failed.loss}, gradient norm {failed.grad_norm}; the update "
        f"was not applied. Samples of the step: {', '.join(uids[:MOST_SAMPLES])}{more}; look at one: mopd show {uri} "
        f"{uids[0]}, or in a browser: mopd view {uri}, page #/sample/{uids[0]}. To train iteration {failed.window} "
        f"again from its beginning with a tenth of the learning rate: {_command(stage)}"
    )


def _samples_of(run: Run, stage: Stage, failed: FailedStep) -> list[str]:
    plan = run.store.plan(stage.name, failed.window)
    assert plan is not None, "a window is trained by its recorded plan"
    packs = plan.step_starts[failed.window_step : failed.window_step + 2]
    first, last = plan.pack_starts[packs].tolist()
    rows = np.unique(plan.sample_rows[first:last])
    uids: list[str] = run.store.take_samples(rows, ["uid"])["uid"].to_pylist()
    return uids


def _command(stage: Stage) -> str:
    """This process's command with a lower learning rate; `mopd run JOB` where it is another one."""
    base = command_line() if sys.argv[1:2] == ["run"] else "mopd run JOB"
    lower = f"stages.{stage.name}.train.learning_rate={LOWER * stage.train.learning_rate:g}"
    accepted = "" if FROM_HERE_OPTION in shlex.split(base) else f" {FROM_HERE_OPTION}"
    return f"{base} --set {lower}{accepted}"
