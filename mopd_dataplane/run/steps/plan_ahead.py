"""Plan ahead: every window that is left of a stage over stored samples, by several processes or on a Ray cluster.

A window follows from its own samples, the seed and the settings, and all windows read one snapshot. So it does not
matter who plans a window, nor how many plan at a time: their digests are the same.
"""

import json
import re
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import IO, Any

from rich.console import Console

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.processes import exit_error, parent_named, scratch_folder, stop_child
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.run.conditions import expressions_of
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps import plan_share
from mopd_dataplane.run.steps.cut import cut_into_windows
from mopd_dataplane.run.steps.plan import plan_own_window, trainable_plan, window_tag, windows_to_replan
from mopd_dataplane.run.steps.plan_share import PlanTask
from mopd_dataplane.run.tasks import PlannedWindow
from mopd_dataplane.store.rollouts.expressions import STEP

Done = Callable[[PlannedWindow], None]
POLL_S = 0.5
STOP_S = 30.0
"""How long a planning process may take to end once it is asked to."""


def plan_ahead(
    job: Job, stage: Stage, *, console: Console | None = None, processes: int = 1, ray: str | None = None
) -> dict[str, Any]:
    """Record the plan of every window of a stage over stored samples that has none and was not trained.

    processes: windows that are planned at a time, each by a process of its own. ray: address of the Ray cluster whose
    processes plan; "" for the default cluster; None for this machine without Ray.
    Returns {"stage", "windows", "samples", "steps"} of what this call planned. Raises InputError for a stage whose
    windows cannot be planned ahead, EngineError when a planning process is killed, MopdError; what was planned stays,
    and the same call continues.
    """
    if ray is not None:
        from mopd_dataplane.run.ray.cluster import check_cluster

        check_cluster(ray)
    run = open_run(job, Progress(console), create=False)
    _check(run.job, stage, several=processes > 1 or ray is not None)
    cut_into_windows(run, stage)
    every = range(run.policies.latest(stage), stage.iterations)
    windows = [window for window in every if trainable_plan(run, stage, window) is None]
    snapshot = run.store.snapshot()
    for window in windows:
        run.store.pin(snapshot, window_tag(stage, window))
    planned: list[PlannedWindow] = []
    with run.progress.step(stage.name, "plan", total=len(windows), unit="windows") as (advance, report):

        def count(window: PlannedWindow) -> None:
            planned.append(window)
            advance(len(planned))

        try:
            if windows and windows_to_replan(run, stage):  # earlier ones, whose samples were deleted: in one process
                count(plan_own_window(run, stage, windows[0]))
            _plan(run, stage, windows[len(planned) :], processes, ray, count)
        except InputError:  # what is missing now may be there at the next try
            for window in windows:
                if run.store.plan(stage.name, window) is None:
                    run.store.release(window_tag(stage, window))
            raise
        samples, steps = sum(window.samples for window in planned), sum(window.steps for window in planned)
        report.facts = {"windows": f"{len(planned):,}", "samples": f"{samples:,}", "steps": f"{steps:,}"}
    return {"stage": stage.name, "windows": len(planned), "samples": samples, "steps": steps}


def _check(job: Job, stage: Stage, *, several: bool) -> None:
    if not stage.window_samples:
        raise InputError(
            f"stage {stage.name!r} has no windows that could be planned ahead: each takes the samples of an iteration "
            "that may still come, or all of the stage; for stored samples set "
            f"stages.{stage.name}.window_samples, else plan the next window without --all"
        )
    if several and (key := _follows_steps(job, stage)):
        raise InputError(
            f"stage {stage.name!r}: {key} depends on the number of steps before a window, so that its windows are "
            "planned one after another; leave --processes and --ray out"
        )


def _follows_steps(job: Job, stage: Stage) -> str:
    """The first setting of a plan that depends on the number of steps before a window; empty if none does."""
    weights = {f"plan.mixture.{name}": weight for name, weight in stage.plan.mixture.items()}
    weights |= {f"teacher_weights.{name}": weight for name, weight in job.objective(stage).teacher_weights.items()}
    texts = [*expressions_of(stage.plan), *((f"questions.{name}", text) for name, text in job.questions.items())]
    changing = [key for key, weight in weights.items() if not isinstance(weight, int | float)]
    changing += [key for key, text in texts if re.search(rf"\b{STEP}\b", text, re.IGNORECASE)]
    return changing[0] if changing else ""


def _plan(run: Run, stage: Stage, windows: Sequence[int], processes: int, ray: str | None, done: Done) -> None:
    """Plan windows; `done` gets what each holds as soon as it is recorded."""
    if ray is not None:
        from mopd_dataplane.run.ray.cluster import ray_fleet

        with ray_fleet(ray, run) as fleet:
            fleet.plan(stage, windows, processes, done)
    elif processes == 1:
        for window in windows:
            done(plan_own_window(run, stage, window))
    else:
        _plan_in_processes(run.job, stage.name, windows, processes, done)


def _plan_in_processes(job: Job, stage: str, windows: Sequence[int], processes: int, done: Done) -> None:
    """Plan windows by processes that share them out in turn. Raises the error of the first process that fails."""
    count = min(processes, len(windows))
    children: dict[IO[bytes], subprocess.Popen[bytes]] = {}
    with scratch_folder() as folder, ExitStack() as stack:
        for number in range(count):
            task = folder / f"{number}.json"
            own = PlanTask(job=job, stage=stage, windows=[*windows[number::count]])
            publish_file(task, own.model_dump_json().encode())
            command = [sys.executable, "-m", plan_share.__name__, str(task)]
            child = subprocess.Popen(command, env=parent_named(), stdout=subprocess.PIPE, bufsize=0)
            stack.enter_context(child)
            stack.callback(stop_child, child, STOP_S)
            assert child.stdout is not None
            children[child.stdout] = child
        while children:
            for pipe in select.select([*children], [], [], POLL_S)[0]:
                if line := pipe.readline():
                    done(PlannedWindow(*json.loads(line)))
                elif code := children.pop(pipe).wait(STOP_S):
                    raise exit_error(f"stage {stage!r}: a process that plans windows", code)
