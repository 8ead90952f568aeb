"""The lifetime of hidden states, snapshots and policies: what is not needed any more goes while training continues.

decide    rows trained on often enough, too old, or dropped for good; never rows of a window still to be trained
record    an event `free` with the rows, before a byte goes: the planner and a continued run go by it
free      every recorded row that still has its bytes, so a run killed in between continues here
"""

import numpy as np

from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import PlanWindow, Snapshot
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import Rows, event_rows, stage_samples
from mopd_dataplane.run.steps.plan import recorded_windows, window_tag
from mopd_dataplane.store.commit.token_stats import free_token_stats
from mopd_dataplane.store.read.snapshot import tags
from mopd_dataplane.train.newest import window_ends


def apply_retention(run: Run, stage: Stage, *, windows_done: int) -> None:
    """Free what the job's [retain] no longer keeps of a stage: hidden states, statistics, snapshots, policies.

    windows_done: number of windows that are never trained again, because a checkpoint follows them.
    """
    _free_stats(run, stage, windows_done)
    _free_hidden(run, stage, windows_done)
    _release_snapshots(run, stage, windows_done)
    _remove_policies(run, stage)


def _release_snapshots(run: Run, stage: Stage, windows_done: int) -> None:
    """Release the snapshots of trained windows but the newest."""
    if most := run.job.retain.snapshots:
        pinned = set(tags(run.store))
        for window in range(min(windows_done, run.policies.latest(stage)) - most):
            if (tag := window_tag(stage, window)) in pinned:
                run.store.release(tag)


def _remove_policies(run: Run, stage: Stage) -> None:
    """Delete policy versions, and averages of them, but the newest, those that a fork or a rewind may begin with, that
    of a teacher that follows, and what others lie on."""
    most = run.job.retain.policies
    if not most or (stage.concurrent and not stage.plan.max_staleness):
        return
    versions = run.policies.stored(stage)
    needed = set(window_ends(run.root / "checkpoints" / stage.name))
    if stage.concurrent:
        most = max(most, stage.plan.max_staleness + 2)
        needed |= {version for version in versions if run.job.eval.every and not version % run.job.eval.every}
    latest = run.policies.latest(stage)
    turns = {
        name: run.policies.followed(name, stage, latest)
        for name in run.job.scorers_of(stage)
        if run.job.teachers[name].follows
    }
    needed |= {*turns.values()}
    # The next average is made from the one of the turn before; a teacher that scores no longer has no next one.
    oldest = {name: turn - run.job.teachers[name].follows for name, turn in turns.items()}
    for name, version in run.policies.averages(stage):
        if version not in needed and version < min(oldest.get(name, latest), *versions[-most:]):
            run.policies.remove_average(name, stage, version)
    bases = {run.policies.base(other) for other in run.job.stages}
    for version in versions[:-most]:
        if version not in needed and (run.policies.stage_folder(stage) / f"v{version}").resolve() not in bases:
            run.policies.remove(stage, version)


def _free_stats(run: Run, stage: Stage, windows_done: int) -> None:
    """Free per-token statistics of samples that are too many policy versions old."""
    if not (versions := run.job.retain.stats_versions):
        return
    rows, samples = stage_samples(run.store, stage, None, ["policy_version_first"])
    old = rows[run.policies.latest(stage) - samples["policy_version_first"].to_numpy() > versions]
    if len(old):
        free_token_stats(run.store, old, in_use=_unfinished(run, stage, windows_done))


def _free_hidden(run: Run, stage: Stage, windows_done: int) -> None:
    settings = run.job.retain
    if "hidden" not in run.job.objective(stage).signals or not (settings.hidden_passes or settings.hidden_versions):
        return
    latest = min(windows_done, run.policies.latest(stage))
    windows = list(recorded_windows(run, stage))
    served = _served(run, stage, [plan for plan in windows if plan.window < latest], latest)
    waiting = np.concatenate([np.empty(0, np.int64), *(plan.sample_rows for plan in windows if plan.window >= latest)])
    fresh = np.setdiff1d(served, np.concatenate([waiting, event_rows(run.store, stage, "free")]))
    if len(fresh):
        trained = (plan.sample_rows for plan in windows if plan.window < latest)
        done = np.concatenate([event_rows(run.store, stage, "drop"), *trained])
        _record(run, stage, "drop", latest, np.setdiff1d(fresh, done), {"reason": "outlived"})
        _record(run, stage, "free", latest, fresh, {})
    rows = event_rows(run.store, stage, "free")
    if not len(rows):
        return
    for plan in windows:
        if plan.window < latest:
            run.store.release(window_tag(stage, plan.window))
    freed = 0
    for teacher in run.job.teachers_of(stage):
        try:
            freed += run.store.free_hidden(teacher, rows, in_use=_unfinished(run, stage, latest)).bytes
        except UnknownNameError:  # a teacher of the stage that has scored nothing yet
            continue
    if freed:
        detail = {"rows_freed_so_far": len(rows)}
        run.store.add_event(f"freed/{stage.name}/{latest}", stage.name, "freed", latest, float(freed), detail)


def _record(run: Run, stage: Stage, kind: str, latest: int, rows: Rows, detail: dict[str, str]) -> None:
    if len(rows):
        name = f"{kind}/{stage.name}/{latest}/retain/{rows[0]}"
        run.store.add_event(name, stage.name, kind, latest, float(len(rows)), {**detail, "rows": rows.tolist()})


def _served(run: Run, stage: Stage, finished: list[PlanWindow], latest: int) -> Rows:
    """Rows that [retain] lets go."""
    settings = run.job.retain
    rows, samples = stage_samples(run.store, stage, None, ["policy_version_first"])
    served = np.zeros(int(rows.max(initial=-1)) + 1, dtype=bool)
    if settings.hidden_passes:
        passes = np.zeros(len(served), dtype=np.int64)
        for plan in finished:
            passes += np.bincount(plan.sample_rows, minlength=len(served))
        served |= passes >= settings.hidden_passes
        served[event_rows(run.store, stage, "drop")] = True
    if settings.hidden_versions:
        served[rows[latest - samples["policy_version_first"].to_numpy() > settings.hidden_versions]] = True
    return np.flatnonzero(served)


def _unfinished(run: Run, stage: Stage, windows_done: int) -> list[Snapshot]:
    """Snapshots that windows still to be trained will read, of every stage; `windows_done` of this one."""
    snapshots: list[Snapshot] = []
    for other in run.job.stages:
        first = windows_done if other.name == stage.name else run.policies.latest(other)
        snapshots += [plan.snapshot for plan in recorded_windows(run, other, first)]
    return snapshots
