"""Plan: from the metadata of a pinned snapshot to recorded windows. No payload is read."""

from collections.abc import Iterator

import pyarrow.compute as pc

from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.plan.columns import EFFORT_COLUMN, GROUP_COLUMN, SAMPLE_COLUMNS, Columns, collect_columns
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.records import PlanWindow, Snapshot
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import scan_stage, stage_samples


def window_tag(stage: Stage, window: int) -> str:
    """Tag of the snapshot that a window reads."""
    return f"{stage.name}-{window}"


def recorded_windows(run: Run, stage: Stage, first: int = 0) -> Iterator[PlanWindow]:
    """Recorded windows of a stage from `first` on, in order."""
    plans = (run.store.plan(stage.name, window) for window in run.store.plans(stage.name) if window >= first)
    return (plan for plan in plans if plan is not None)


def plan_window(run: Run, stage: Stage, window: int, *, iteration: int | None) -> PlanWindow:
    """The recorded plan of a window; made and recorded when there is none yet.

    iteration: whose samples it covers; None takes all of the stage. Raises InputError when nothing can be trained on.
    """
    recorded = run.store.plan(stage.name, window)
    if recorded is not None:
        return recorded
    with run.progress.step(stage.name, "plan", total=None, unit="samples") as (_, report), freed_memory_kept():
        tag = window_tag(stage, window)
        snapshot = run.store.snapshot(tag=tag)
        try:
            columns = planner_columns(run, stage, iteration, snapshot)
        except InputError:
            run.store.release(tag)  # what is missing now may be there at the next try
            raise
        plan = build_window(
            columns,
            stage.plan,
            seed=run.job.seed,
            stage=stage.name,
            window=window,
            snapshot=snapshot,
            teachers=list(run.job.teachers_of(stage)),
            training=training_of(run, stage, window),
        )
        run.store.add_plan(plan)
        stats = plan.stats
        report.facts = {
            "samples": f"{int(stats['samples']):,}",
            "packs": f"{int(stats['packs']):,}",
            "steps": f"{int(stats['steps'])}",
            "density": f"{stats['density']:.3f}",
        }
    run.record_time(stage, window, "plan", report.seconds)
    for reason, count in stats.items():
        if reason.startswith("dropped_"):
            name = f"drop/{stage.name}/{window}/{reason}"
            run.store.add_event(name, stage.name, "drop", window, count, {"reason": reason.removeprefix("dropped_")})
    return plan


def training_of(run: Run, stage: Stage, window: int) -> Training:
    """Settings of training of a stage's window that its plan depends on."""
    return Training(
        epochs=stage.train.epochs,
        group_size=stage.rollout.group_size if stage.data != "reference" else 1,
        policy_version=window,
        first_step=run.store.steps_before(stage.name, window),
        teacher_weights=run.job.objective(stage).teacher_weights,
        ranks=run.job.scale.data_parallel,
    )


def planner_columns(run: Run, stage: Stage, iteration: int | None, snapshot: Snapshot | None) -> Columns:
    """The planner's metadata of a stage's samples."""
    objective = run.job.objective(stage)
    columns = [*SAMPLE_COLUMNS]
    columns += [GROUP_COLUMN] if stage.rollout.group_size > 1 else []
    columns += [EFFORT_COLUMN] if run.job.routes_by_effort(stage) else []
    if stage.data == "stored":
        _check_sampler_logprobs(run, stage, iteration, snapshot)
    teachers = run.job.teachers_of(stage)
    scores = run.store.table("scores", columns=["sample_row", "teacher", "kind"], snapshot=snapshot)
    rewards = run.store.table("rewards", columns=["sample_row"], snapshot=snapshot)
    found = collect_columns(
        scan_stage(run.store, stage.name, iteration, columns, snapshot),
        run.store.dataset("samples", snapshot).count_rows(),
        route=(lambda domain, effort: run.job.teacher_of(stage, domain, effort)) if teachers else None,
        teachers=teachers,
        scores=scores if objective.signals else None,
        signals=objective.signals,
        rewards=rewards if objective.needs_rewards else None,
    )
    if not len(found) and run.is_done(stage):
        raise InputError(f"stage {stage.name!r} is done: all its windows are planned and trained")
    if not len(found):
        how = "mopd rollout JOB" if stage.data != "stored" else f"mopd import FORMAT PATH --stage {stage.name}"
        raise InputError(f"stage {stage.name!r}: no samples to plan in {run.store.uri}; run: {how}")
    return found


def _check_sampler_logprobs(run: Run, stage: Stage, iteration: int | None, snapshot: Snapshot | None) -> None:
    """Raise InputError when a policy gradient would divide by log-probs that an import did not bring, or that are those
    of a cut distribution whose kept tokens are not stored."""
    if run.job.objective(stage).policy_gradient is None:
        return
    columns = ["mean_logprob", "loss_tokens", "top_p", "top_k"]
    columns += ["sampling_mask_len"] if run.store.has_column("samples", "sampling_mask_len", snapshot) else []
    rows, samples = stage_samples(run.store, stage, iteration, columns, snapshot)
    lacking = pc.and_(pc.is_null(samples["mean_logprob"]), pc.greater(samples["loss_tokens"], 0))
    if missing := pc.sum(lacking).as_py():
        raise InputError(
            f"stage {stage.name!r}: {missing} of {len(rows)} samples came without the sampler's log-probs, which the "
            "policy gradient needs; train them with cross_entropy or divergence, or import a format that has them"
        )
    cut = pc.or_(pc.less(samples["top_p"], 1), pc.greater(samples["top_k"], 0))
    if "sampling_mask_len" in samples.column_names:
        cut = pc.and_(cut, pc.is_null(samples["sampling_mask_len"]))
    if some := pc.sum(cut).as_py():
        raise InputError(
            f"stage {stage.name!r}: {some} of {len(rows)} samples were drawn under top_p or top_k: their log-probs are "
            "those of the tokens the sampler kept, which are not stored, so the ratios of the policy gradient would be "
            "wrong; train them with cross_entropy or divergence"
        )
