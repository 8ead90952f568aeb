"""Steps whose update was not applied: their samples, where to look at them, and the command that goes on."""

import shlex
import sys
from collections.abc import Sequence

import numpy as np

from mopd_dataplane.errors import EngineError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import PlanWindow, StepMetrics
from mopd_dataplane.run.changes import FROM_HERE_OPTION, SPIKE, command_line
from mopd_dataplane.run.context import Run
from mopd_dataplane.train.failed_step import FailedStep
from mopd_dataplane.train.spikes import REWOUND, SKIPPED

MOST_SAMPLES = 8
"""Samples of a step that a message names."""
LOWER = 0.1
"""Factor of the learning rate that a message proposes."""


def spike_error(run: Run, stage: Stage, failed: FailedStep) -> EngineError:
    """Record a spike at which training stopped, so that its window may be trained with other settings, and return the
    error that says how to go on."""
    plan = run.store.plan(stage.name, failed.window)
    assert plan is not None, "a window is trained by its recorded plan"
    uids = _samples_of(run, plan, failed.window_step)
    detail = {"step": failed.step, "loss": failed.loss, "grad_norm": failed.grad_norm, "uids": uids}
    name = f"{SPIKE}/{stage.name}/{failed.window}/{failed.step}"
    run.store.add_event(name, stage.name, SPIKE, failed.window, None, detail)
    uri, rate = run.store.uri, LOWER * stage.train.learning_rate
    return EngineError(
        f"stage {stage.name!r} step {failed.step}: {failed.reason}; the update was not applied. "
        f"{where_to_look(uri, uids)}. To leave such updates out: {command_with(stage, 'on_spike', 'skip')}. To train "
        f"iteration {failed.window} again from its beginning with a tenth of the learning rate: "
        f"{command_with(stage, 'learning_rate', f'{rate:g}')}"
    )


def skipped_warning(run: Run, stage: Stage, plan: PlanWindow, steps: Sequence[StepMetrics]) -> str:
    """Warning about the steps of a window whose update was left out; empty without one."""
    skipped = [index for index, step in enumerate(steps) if SKIPPED in step.extra]
    if not skipped:
        return ""
    rewound = next((index for index in skipped if REWOUND in steps[index].extra), None)
    first = skipped[0] if rewound is None else rewound
    at = f"step {steps[first].step}: loss {steps[first].loss:.4g}, gradient norm {steps[first].grad_norm:.4g}"
    if rewound is None:
        what = (
            f"{len(skipped)} of {len(steps)} updates of window {plan.window} were left out as spikes (train.on_spike), "
            f"the first at {at}"
        )
    else:
        what = (
            f"window {plan.window} was taken back to its beginning (train.on_spike) by a spike at {at}: {rewound} "
            f"updates were undone, {len(steps) - rewound} left out, and version {plan.window + 1} has the weights of "
            f"version {plan.window}"
        )
    return f"{what}. {where_to_look(run.store.uri, _samples_of(run, plan, first))}"


def where_to_look(uri: str, uids: Sequence[str], *, of: str = "the step") -> str:
    """Name samples, and what shows one of them."""
    store = shlex.quote(uri)
    more = f" and {len(uids) - MOST_SAMPLES} more" if len(uids) > MOST_SAMPLES else ""
    return (
        f"Samples of {of}: {', '.join(uids[:MOST_SAMPLES])}{more}; look at one: mopd show {store} {uids[0]}, or in a "
        f"browser: mopd view {store}, page #/sample/{uids[0]}"
    )


def _samples_of(run: Run, plan: PlanWindow, window_step: int) -> list[str]:
    """Return the uids of the samples of one step of a window."""
    packs = plan.step_starts[window_step : window_step + 2]
    first, last = plan.pack_starts[packs].tolist()
    rows = np.unique(plan.sample_rows[first:last])
    uids: list[str] = run.store.take_samples(rows, ["uid"])["uid"].to_pylist()
    return uids


def command_with(stage: Stage, key: str, value: str) -> str:
    """Return this process's command with another value of a key of `train`; `mopd run JOB` where it is another one."""
    base = command_line() if sys.argv[1:2] == ["run"] else "mopd run JOB"
    accepted = "" if FROM_HERE_OPTION in shlex.split(base) else f" {FROM_HERE_OPTION}"
    return f"{base} --set stages.{stage.name}.train.{key}={value}{accepted}"
