"""Cut: the samples of a stage over stored data are divided into windows, once, before the first one is planned."""

import math

from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import no_samples, scan_stage
from mopd_dataplane.run.stored_parts import Parts, record_parts, recorded_parts


def cut_into_windows(run: Run, stage: Stage) -> None:
    """Cut a stage's stored samples into parts of `window_samples`; what was cut before stays.

    Does nothing for a stage that has no windows of that size. Raises InputError when there are no samples, JobFileError
    when `retain` frees hidden states before the last window that needs them.
    """
    if not stage.window_samples:
        return
    parts = recorded_parts(run.store, stage.name)
    if parts is not None:
        _check_passes(run, stage, parts)  # a run may have been given more iterations
        return
    cuts = _cuts(run, stage)
    if not cuts:
        raise no_samples(run.store, stage)
    parts = Parts(stage.name, run.job.seed, cuts)
    _check_passes(run, stage, parts)
    record_parts(run.store, parts)
    run.progress.say(f"{stage.name:<16} windows  {len(parts):,} of about {stage.window_samples:,} samples in a pass")


def _cuts(run: Run, stage: Stage) -> tuple[int, ...]:
    """Where parts begin and the last one ends; a rest of less than half a part belongs to the part before it."""
    size, seen, end = stage.window_samples, 0, 0
    firsts: list[int] = []
    for rows, _ in scan_stage(run.store, stage, None, ["stage"]):
        firsts += rows[-seen % size :: size].tolist()
        seen, end = seen + len(rows), int(rows[-1]) + 1
    if len(firsts) > 1 and 0 < seen % size < size / 2:
        del firsts[-1]
    return (*firsts, end) if firsts else ()


def _check_passes(run: Run, stage: Stage, parts: Parts) -> None:
    most = math.ceil(stage.iterations / len(parts)) * stage.train.epochs
    if "hidden" in run.job.objective(stage).signals and 0 < run.job.retain.hidden_passes < most:
        raise JobFileError(
            f"retain.hidden_passes = {run.job.retain.hidden_passes} frees hidden states before stage {stage.name!r} "
            f"has trained on them for the last time: its {stage.iterations} iterations take each of its {len(parts)} "
            f"windows up to {most} times; set hidden_passes to at least {most}, or 0"
        )
