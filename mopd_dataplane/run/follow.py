"""Processes that follow a store: the parts of a concurrent stage, and the nodes besides the first.

    mopd rollout JOB --follow    samples every iteration with the newest published policy
    mopd score JOB --follow      scores samples as they become visible
    mopd train JOB --follow      plans windows as signals become visible, trains, publishes

They communicate through the store only. A producer that is ahead is held back between iterations, never inside one; a
trainer that is ahead waits. Each records that it has ended, and each can be killed and started again.

The nodes besides the first only train, together with the first node's ranks (docs/ranks.md): training begins when
there is a plan for the next window, and is over with the last policy version, or in a concurrent stage with the window
that closes its plan log.
"""

import contextlib
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa

from mopd_dataplane.base.processes import exit_error, parent_named, scratch_folder, stop_child
from mopd_dataplane.errors import DeadlineError, InputError, UnknownNameError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.plan.follow import Decision, next_window
from mopd_dataplane.records import PlanWindow
from mopd_dataplane.run.changes import UnrecordedChange
from mopd_dataplane.run.context import Run, open_existing
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.remaining_time import RemainingTime
from mopd_dataplane.run.stage_prompts import prompt_slots_of, prompts_of
from mopd_dataplane.run.stage_rows import Rows, event_rows, stage_samples
from mopd_dataplane.run.steps.plan import (
    planner_columns,
    recorded_windows,
    trainable_plan,
    training_of,
    warn_of_masked_domains,
    window_tag,
    windows_to_replan,
)
from mopd_dataplane.run.steps.reward import reward
from mopd_dataplane.run.steps.rollout import rollout, uids_of
from mopd_dataplane.run.steps.score import register_teachers, score
from mopd_dataplane.run.steps.train import Training

POLL_S = 0.5
PARTS = ("rollout", "score", "train")
STOP_S = 60.0
"""How long a part may take to save its state once it is asked to stop."""
STALL_TIMEOUT_S = 7 * 86400.0
"""How long one process waits for another that makes no progress."""


class StallTimeout:
    """The deadline of a wait for another process: it starts again whenever something has moved."""

    def __init__(self, missing: str) -> None:
        self._missing = missing
        self.renew()

    def renew(self) -> None:
        """Something has moved."""
        self._until = time.monotonic() + STALL_TIMEOUT_S

    def pause(self) -> None:
        """Wait a moment. Raises DeadlineError when nothing has moved for STALL_TIMEOUT_S."""
        if time.monotonic() > self._until:
            raise DeadlineError(
                f"nothing to do for {STALL_TIMEOUT_S / 3600:.0f} h: {self._missing} does not go on; start it, then run "
                "this command again to continue"
            )
        time.sleep(POLL_S)


def run_concurrent(run: Run, stage: Stage) -> None:
    """Run every part of a stage to its end; on an error or an interruption all of them are stopped gracefully.

    The same call continues after any kill. Raises the error of the first part that failed.
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


def follow_rollout(run: Run, stage: Stage) -> int:
    """Sample every iteration of a stage, always with the newest policy. Returns the number of samples stored."""
    if stage.discriminator:
        raise InputError(
            f"stage {stage.name!r} has a discriminator, which learns between rollout and training; run it without "
            "--follow"
        )
    if stage.rollout.until:
        raise InputError(
            f"stage {stage.name!r} has rollout.until, which samples further prompts once rewards are there; run it "
            "without --follow"
        )
    for iteration in range(stage.iterations):
        _hold_back(run, stage)
        with run.progress.iteration(iteration + 1, stage.iterations):
            rollout(run, stage, iteration, follow=True)
    _record_end(run, stage, "rollout")
    return len(stage_samples(run.store, stage, None, ["stage"])[0])


def follow_score(run: Run, stage: Stage) -> dict[str, float]:
    """Score and verify samples as they become visible, until the rollouts have ended."""
    register_teachers(run, stage)
    counts = {"signals": 0.0, "rewards": 0.0, "unscorable": 0.0}
    stall = StallTimeout(f"mopd rollout JOB --stage {stage.name} --follow")
    while True:
        last_round = has_ended(run, stage, "rollout")
        new = {"signals": score(run, stage)["signals"]}
        new |= {name: value for name, value in reward(run, stage).items() if name in counts}
        counts = {name: counts[name] + count for name, count in new.items()}
        if last_round:
            _record_end(run, stage, "score")
            return counts
        if any(new.values()):
            stall.renew()
        else:
            stall.pause()


def follow_train(run: Run, stage: Stage) -> dict[str, float]:
    """Plan and train windows as they become possible, until everything that was scored is trained on or dropped.

    Returns how stale the trained samples were, in policy versions.
    """
    told = ""
    stall = StallTimeout(f"mopd score JOB --stage {stage.name} --follow")
    samples, batch = samples_expected(run, stage), stage.plan.batch_samples
    windows = -(-samples // batch) if batch else 0
    time_left = RemainingTime(run.job, stage, windows, unit="windows")
    with Training(run, stage, samples=samples) as training:
        lost = windows_to_replan(run, stage)
        while True:
            window = lost[0] if lost else run.policies.latest(stage)
            plan = trainable_plan(run, stage, window) or _next_plan(run, stage, window)
            if isinstance(plan, str):
                if plan != told:
                    run.progress.say(f"{stage.name:<16} wait     {plan}")
                    told = plan
                stall.pause()
            elif not len(plan.sample_rows):
                break
            else:
                run.store.pin(plan.snapshot, window_tag(stage, window))  # it may be trained on much later
                with run.progress.iteration(window + 1, windows):
                    training.train(plan)
                lost = lost[1:]
                if remaining := time_left.after_iteration(window + 1):
                    run.progress.say(f"{stage.name:<16} left     {remaining}")
                stall.renew()
    columns = ["staleness_mean", "staleness_max", "loss_tokens"]
    mine = run.store.table("steps", columns, filter=f"stage = '{stage.name}'").to_pylist()
    tokens = sum(step["loss_tokens"] for step in mine)
    return {
        "steps": len(mine),
        "loss_tokens": tokens,
        "staleness_mean": sum(step["staleness_mean"] * step["loss_tokens"] for step in mine) / max(tokens, 1),
        "staleness_max": max((step["staleness_max"] for step in mine), default=0),
    }


def samples_expected(run: Run, stage: Stage) -> int:
    """Samples of all iterations of a stage."""
    return stage.iterations * len(prompt_slots_of(run, stage, 0)) * stage.rollout.group_size


def _next_plan(run: Run, stage: Stage, window: int) -> PlanWindow | str:
    """The next window, recorded; or the reason to wait for it."""
    finished = has_ended(run, stage, "score")
    decision = _decide(run, stage, window, finished=finished)
    for reason, rows in decision.dropped.items():
        name, detail = f"drop/{stage.name}/{window}/{reason}/{rows[0]}", {"reason": reason, "rows": rows.tolist()}
        run.store.add_event(name, stage.name, "drop", window, float(len(rows)), detail)
    if decision.window is None:
        return decision.wait
    run.store.add_plan(decision.window)
    if not len(decision.window.sample_rows):
        warn_of_masked_domains(run, stage, planner_columns(run, stage, None, decision.window.snapshot))
    return decision.window


def _decide(run: Run, stage: Stage, window: int, *, finished: bool) -> Decision:
    snapshot = run.store.snapshot()
    rows, samples = stage_samples(run.store, stage, None, ["uid", "iteration", "writer_seq"], snapshot)
    if not len(rows) and not finished:
        return Decision(wait="no samples yet")
    admission = _admission(run, stage, samples)
    columns = planner_columns(run, stage, None, snapshot)
    return next_window(
        columns,
        settled_rows(run, stage),
        stage.plan,
        admission=admission[np.searchsorted(rows, columns.sample_rows)],
        finished=finished,
        seed=run.job.seed,
        stage=stage.name,
        window=window,
        snapshot=snapshot,
        teachers=list(run.job.teachers_of(stage)),
        training=training_of(run, stage, window),
    )


def _admission(run: Run, stage: Stage, samples: pa.Table) -> Rows:
    """[n] ordinal of each sample in the order of admission; deleted ones leave no gap to wait for."""
    iterations = samples["iteration"].to_numpy().astype(np.int64)
    if not run.store.deletions.names():
        per_iteration = len(prompts_of(run, stage, 0)) * stage.rollout.group_size
        return np.asarray(iterations * per_iteration + samples["writer_seq"].to_numpy(), np.int64)
    deleted = run.store.deletions.uids()
    ordinals: dict[str, int] = {}
    for iteration in range(int(iterations.max(initial=-1)) + 1):
        for uid in uids_of(run, stage, iteration, prompts_of(run, stage, iteration)):
            if uid not in deleted:
                ordinals[uid] = len(ordinals)
    return np.array([ordinals.setdefault(uid, len(ordinals)) for uid in samples["uid"].to_pylist()], np.int64)


def settled_rows(run: Run, stage: Stage) -> Rows:
    """Rows of samples that a window holds or a recorded decision has dropped."""
    planned = [plan.sample_rows for plan in recorded_windows(run, stage)]
    return np.unique(np.concatenate([event_rows(run.store, stage, "drop"), *planned]))


def _hold_back(run: Run, stage: Stage) -> None:
    """Wait until one more iteration fits the staleness bound; when less than a window is waiting, it always goes on."""
    window = stage.plan.batch_samples or stage.plan.batch_tokens
    told = False
    stall = StallTimeout(f"mopd train JOB --stage {stage.name} --follow")
    while stage.plan.max_staleness:
        rows, samples = stage_samples(run.store, stage, None, ["total_len"])
        weights = np.ones(len(rows)) if stage.plan.batch_samples else samples["total_len"].to_numpy()
        ahead = int(weights[~np.isin(rows, settled_rows(run, stage))].sum())
        more = len(prompts_of(run, stage, 0)) * stage.rollout.group_size * (weights.mean() if len(rows) else 0)
        if ahead < window or ahead + more <= stage.plan.max_staleness * window:
            return
        if not told:
            bound = stage.plan.max_staleness * window
            run.progress.say(f"{stage.name:<16} wait     {ahead:,} ahead of the trainer; the bound is {bound:,}")
            told = True
        stall.pause()


def _record_end(run: Run, stage: Stage, what: str) -> None:
    run.store.add_event(f"{what}_end/{stage.name}", stage.name, f"{what}_end", -1, None, {})


def has_ended(run: Run, stage: Stage, what: str) -> bool:
    """Check if a part of a concurrent stage has recorded its end."""
    return run.has_event(f"{what}_end/{stage.name}")


def join_training(job: Job, progress: Progress, only: str | None = None) -> None:
    """Take part in the training of every stage, or of one.

    Raises what training does, DeadlineError when the first node stands still for days, InputError for an object store.
    """
    if "://" in job.store:
        raise InputError(f"store {job.store} is an object store; give a folder that all nodes share")
    run = _opened(job, progress)
    for stage in [job.stage(only)] if only else job.stages:
        _join_stage(run, stage)


def _opened(job: Job, progress: Progress) -> Run:
    stall = StallTimeout("mopd run JOB on the first node")
    while True:
        try:
            return open_existing(job, progress)
        except (UnknownNameError, UnrecordedChange):  # the first node makes the store, and accepts changes
            stall.pause()


def _join_stage(run: Run, stage: Stage) -> None:
    stall = StallTimeout("mopd run JOB on the first node")
    while not run.is_done(stage):
        window = run.policies.latest(stage)
        plan = run.store.plan(stage.name, window) if stage.concurrent or window < stage.iterations else None
        if plan is None or not len(plan.sample_rows):
            stall.pause()
            continue
        with Training(run, stage, samples=samples_expected(run, stage) if stage.concurrent else 0) as training:
            training.train_with_first_node(None if stage.concurrent else stage.iterations)
        stall.renew()
