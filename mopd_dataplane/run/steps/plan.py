"""Plan: from the metadata of a pinned snapshot to recorded windows, and what such a window holds and costs.

No payload is read, and nothing here needs torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from rich.console import Console
from safetensors import safe_open

from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.models.config_files import read_config
from mopd_dataplane.plan.columns import EFFORT_COLUMN, GROUP_COLUMN, SAMPLE_COLUMNS, Columns, collect_columns
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.records import PlanWindow, Snapshot
from mopd_dataplane.run.changes import in_force
from mopd_dataplane.run.conditions import apply_conditions, explain_conditions, named_conditions_of, plan_names
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.stage_rows import (
    UNREADABLE,
    UNSCORABLE,
    Rows,
    event_rows,
    no_samples,
    scan_stage,
    stage_samples,
)
from mopd_dataplane.run.steps.cut import cut_into_windows
from mopd_dataplane.run.tasks import PlannedWindow
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.delete_samples import forget_plan
from mopd_dataplane.store.read.fragment_bounds import ColumnRange
from mopd_dataplane.store.read.snapshot import tags

TOKEN_BYTES = 9
"""Token id, sampler log-prob and mask of one token."""


def window_tag(stage: Stage, window: int) -> str:
    """Tag of the snapshot that a window reads."""
    return f"{stage.name}-{window}"


def recorded_windows(run: Run, stage: Stage, first: int = 0) -> Iterator[PlanWindow]:
    """Recorded windows of a stage from `first` on, in order."""
    plans = (run.store.plan(stage.name, window) for window in run.store.plans(stage.name) if window >= first)
    return (plan for plan in plans if plan is not None)


def trainable_plan(run: Run, stage: Stage, window: int) -> PlanWindow | None:
    """The recorded plan of a window, None when there is none.

    If a deletion took one of its samples, or the snapshot that it reads, before the window was trained, or the job was
    changed for this window, the plan is forgotten with the steps that were taken, so that the window is planned and
    trained from its beginning. Raises MismatchError when no checkpoint of that beginning is left.
    """
    plan = run.store.plan(stage.name, window)
    if plan is None or run.policies.latest(stage) > window:
        return plan
    if plan.settings.get("changes", {}) != in_force(run.changes, stage.name, window) and len(plan.sample_rows):
        _forget(run, stage, plan, "the job was changed for it")
    elif _has_lost_samples(run, stage, plan):
        _forget_lost(run, stage, plan)
    else:
        return plan
    return None


def windows_to_replan(run: Run, stage: Stage) -> list[int]:
    """Return the windows that must be planned and trained again: they were trained, a kill came before the checkpoint
    after them, and a deletion has since made their plan unusable. Forgets those plans.

    Call it while no trainer runs. Raises the errors of trainable_plan.
    """
    if not run.store.deletions.names():
        return []
    from mopd_dataplane.run.steps.checkpoints import windows_done

    windows = []
    for window in range(windows_done(run, stage), run.policies.latest(stage)):
        plan = run.store.plan(stage.name, window)
        if plan is None or _has_lost_samples(run, stage, plan):
            windows.append(window)
            if plan is not None:
                _forget_lost(run, stage, plan)
    return windows


def _has_lost_samples(run: Run, stage: Stage, plan: PlanWindow) -> bool:
    """Whether a deletion took a sample of a plan, or the snapshot that it reads."""
    if not run.store.deletions.names() or not len(plan.sample_rows):
        return False
    if np.isin(plan.sample_rows, run.store.deletions.rows()).any():
        return True
    return window_tag(stage, plan.window) not in tags(run.store)


def _forget_lost(run: Run, stage: Stage, plan: PlanWindow) -> None:
    lost = int(np.isin(np.unique(plan.sample_rows), run.store.deletions.rows()).sum())
    _forget(run, stage, plan, f"{lost} of its samples were deleted, or the snapshot that holds them")


def _forget(run: Run, stage: Stage, plan: PlanWindow, reason: str) -> None:
    """Remove a plan with the steps that were taken by it and the checkpoints inside its window."""
    from mopd_dataplane.run.steps.checkpoints import rewind

    rewind(run, stage, plan.window)
    run.progress.say(f"{stage.name:<16} plan     window {plan.window} is planned again: {reason}")
    run.store.release(window_tag(stage, plan.window))
    forget_plan(run.store, plan)


def plan_window(run: Run, stage: Stage, window: int, *, iteration: int | None) -> PlanWindow:
    """The recorded plan of a window; made and recorded when there is none yet.

    iteration: whose samples it covers; None takes all of the stage. Raises InputError when nothing can be trained on.
    """
    cut_into_windows(run, stage)
    for earlier in windows_to_replan(run, stage):
        if earlier < window:
            _plan(run, stage, earlier, iteration=stage.iteration_of(earlier))
    return trainable_plan(run, stage, window) or _plan(run, stage, window, iteration=iteration)


def plan_own_window(run: Run, stage: Stage, window: int) -> PlannedWindow:
    """Plan a window by the job that it goes by. Raises the errors of plan_window."""
    run, stage = run.at(stage, window)
    stats = plan_window(run, stage, window, iteration=stage.iteration_of(window)).stats
    return PlannedWindow(int(stats["samples"]), int(stats["steps"]))


def _plan(run: Run, stage: Stage, window: int, *, iteration: int | None) -> PlanWindow:
    with run.progress.step(stage.name, "plan", total=None, unit="samples") as (_, report), freed_memory_kept():
        tag = window_tag(stage, window)
        snapshot = run.store.snapshot(tag=tag)
        training = training_of(run, stage, window)
        try:
            columns = window_columns(run, stage, iteration, snapshot)
            columns = apply_conditions(
                run.store, stage.plan, columns, snapshot, plan_names(run.job, training.first_step)
            )
            plan = build_window(
                columns,
                stage.plan,
                seed=run.job.seed,
                stage=stage.name,
                window=window,
                snapshot=snapshot,
                teachers=list(run.job.teachers_of(stage)),
                training=training,
                questions=named_conditions_of(run.job, stage),
            )
        except InputError:
            run.store.release(tag)  # what is missing now may be there at the next try
            raise
        run.store.add_plan(plan)
        stats = plan.stats
        report.facts = {
            "samples": f"{int(stats['samples']):,}",
            "packs": f"{int(stats['packs']):,}",
            "steps": f"{int(stats['steps'])}",
            "density": f"{stats['density']:.3f}",
        }
        if stats.get("replayed"):
            report.facts["replayed"] = f"{int(stats['replayed']):,} of {int(stats['replay_pool']):,}"
    run.record_time(stage, window, "plan", report.seconds)
    warn_of_masked_domains(run, stage, columns)
    for reason, count in stats.items():
        if reason.startswith("dropped_"):
            name = f"drop/{stage.name}/{window}/{reason}"
            run.events.add(name, stage.name, "drop", window, count, {"reason": reason.removeprefix("dropped_")})
    return plan


def warn_of_masked_domains(run: Run, stage: Stage, columns: Columns) -> None:
    """Show and record a warning for each domain from which nothing can be learned."""
    for domain in masked_domains(columns):
        warning = (
            f"no sample of domain {domain!r} has a token that is trained on (loss_mask is 0 everywhere), so the stage "
            "learns nothing of it; look at one with mopd show"
        )
        run.progress.say(f"{stage.name:<16} warning  {warning}")
        name = f"masked/{stage.name}/{domain}"
        run.store.add_event(name, stage.name, "warning", -1, None, {"warning": warning})


def masked_domains(columns: Columns) -> list[str]:
    """Domains of which no sample has a trained token."""
    by_domain = ((name, columns.domains == code) for code, name in enumerate(columns.domain_names))
    return [name for name, mine in by_domain if mine.any() and not (columns.loss_tokens[mine] > 0).any()]


def training_of(run: Run, stage: Stage, window: int) -> Training:
    """Settings of training of a stage's window that its plan depends on."""
    until = stage.rollout.until if stage.data == "rollout" else None
    return Training(
        epochs=stage.train.epochs,
        group_size=stage.rollout.group_size if stage.data != "reference" else 1,
        most_groups=until.groups if until else 0,
        policy_version=window,
        first_step=run.store.steps_before(stage.name, window),
        teacher_weights=run.job.objective(stage).teacher_weights,
        changes=in_force(run.changes, stage.name, window),
        ranks=run.job.scale.data_parallel,
    )


def window_columns(run: Run, stage: Stage, iteration: int | None, snapshot: Snapshot) -> Columns:
    """The planner's metadata of a window's samples, and with `plan.replay` of the samples that may join them."""
    replay = stage.plan.replay
    if iteration is None or replay is None:
        return planner_columns(run, stage, iteration, snapshot)
    span = range(max(0, iteration - replay.iterations), iteration + 1)
    columns = planner_columns(run, stage, span, snapshot)
    own, _ = stage_samples(run.store, stage, iteration, ["iteration"], snapshot)
    return replace(columns, replayed=~np.isin(columns.sample_rows, own))


def planner_columns(run: Run, stage: Stage, iteration: int | range | None, snapshot: Snapshot | None) -> Columns:
    """The planner's metadata of a stage's samples: of one iteration, of a range of them, or of all."""
    objective = run.job.objective(stage)
    columns = [*SAMPLE_COLUMNS]
    columns += [GROUP_COLUMN] if stage.rollout.group_size > 1 else []
    columns += [EFFORT_COLUMN] if run.job.routes_by_effort(stage) else []
    if stage.has_stored_samples and not isinstance(iteration, range):
        _check_sampler_logprobs(run, stage, iteration, snapshot)
    teachers = run.job.teachers_of(stage)
    samples: Iterable[tuple[Rows, pa.RecordBatch]] = scan_stage(run.store, stage, iteration, columns, snapshot)
    limit = run.store.dataset("samples", snapshot).count_rows()
    if iteration is not None:  # few samples, whose scores and rewards are in few files
        samples = list(samples)
        limit = sum(len(rows) for rows, _ in samples)
    own = samples if isinstance(samples, list) else None
    scores = _of_samples(run.store, "scores", ["sample_row", "teacher", "kind"], own, snapshot)
    rewards = _of_samples(run.store, "rewards", ["sample_row"], own, snapshot)
    unscorable = event_rows(run.store, stage, UNSCORABLE, snapshot)
    unreadable = event_rows(run.store, stage, UNREADABLE, snapshot)
    planner = collect_columns(
        samples,
        limit,
        route=(lambda domain, effort: run.job.teacher_of(stage, domain, effort)) if teachers else None,
        teachers=teachers,
        scores=scores if objective.signals else None,
        signals=objective.signals,
        rewards=rewards if objective.needs_rewards else None,
        unscorable=unscorable if objective.needs_rewards else None,
        unreadable=unreadable,
    )
    if not len(planner) and run.is_done(stage):
        raise InputError(f"stage {stage.name!r} is done: all its windows are planned and trained")
    if not len(planner):
        raise no_samples(run.store, stage)
    return planner


def _of_samples(
    store: Store, name: str, columns: list[str], samples: list[tuple[Rows, pa.RecordBatch]] | None,
    snapshot: Snapshot | None,
) -> pa.Table:  # fmt: skip
    """Rows of a table that are about some samples, and others between these; about all samples for None."""
    if samples is None:
        return store.table(name, columns=columns, snapshot=snapshot)
    if not samples:
        return store.dataset(name, snapshot).schema.empty_table().select(columns)
    low, high = (int(ends) for ends in (min(rows[0] for rows, _ in samples), max(rows[-1] for rows, _ in samples)))
    return store.rows_within(name, columns, ColumnRange("sample_row", low, high), snapshot)


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


def plan_stage(job: Job, stage: Stage, *, console: Console | None = None, explain: bool = False) -> dict[str, Any]:
    """Record the plan of the stage's next window.

    Returns {"stage", "window", "digest"} and PlanWindow.stats; with `explain`, what it holds and will cost too. Raises
    MopdError; the same call records the same plan.
    """
    run = open_run(job, Progress(console), create=False)
    window = run.policies.latest(stage)
    run, stage = run.at(stage, window)
    plan = plan_window(run, stage, window, iteration=stage.iteration_of(window))
    summary = {"stage": stage.name, "window": window, "digest": plan.digest, **plan.stats}
    if not explain:
        return summary
    rows, _ = stage_samples(run.store, stage, stage.iteration_of(window), ["uid"], plan.snapshot)
    first_step = training_of(run, stage, window).first_step
    chosen = explain_conditions(run.store, run.job, stage, plan, rows, first_step)
    return {**summary, **explain_plan(run, stage, plan), **chosen}


def explain_plan(run: Run, stage: Stage, plan: PlanWindow) -> dict[str, Any]:
    """Batches, mixture, packs by teacher, payload bytes and training FLOPs of a window; counts are in plan.stats."""
    rows, passes = np.unique(plan.sample_rows, return_counts=True)
    samples = run.store.take_samples(rows, ["domain", "total_len"])
    lengths = samples["total_len"].to_numpy().astype(np.int64)
    codes, packs = np.unique(plan.pack_teachers, return_counts=True)
    names = {code: plan.teachers[code] if code >= 0 else "none" for code in codes.tolist()}
    objective = run.job.objective(stage)
    scores = run.store.table("scores", ["sample_row", "kind", "bytes", "rows"], snapshot=plan.snapshot)
    used = np.isin(scores["sample_row"].to_numpy(), rows) & np.isin(scores["kind"].to_pylist(), objective.signals)
    return {
        "batches": _batches(plan, lengths[np.searchsorted(rows, plan.sample_rows)]),
        "mixture": _mixture(samples["domain"], lengths),
        "weights": _weights(plan),
        "packs_by_teacher": {names[code]: int(count) for code, count in zip(codes.tolist(), packs, strict=True)},
        "token_bytes": int((lengths * passes).sum()) * TOKEN_BYTES,
        "signal_bytes": int(scores["bytes"].to_numpy()[used].sum()),
        "bytes_per_scored_token": _per_token(run, plan, scores.filter(pa.array(used))),
        "train_flops": train_flops(run.policies.start(stage), np.repeat(lengths, passes)),
        "snapshot": plan.snapshot.versions,
    }


def train_flops(policy: Path, lengths: NDArray[np.int64]) -> float:
    """FLOPs of forward and backward passes over sequences of these lengths; NaN when the policy is not there yet.

    6 N L + 6 n D L^2 a sequence, N parameters that multiply (all but the embedding table; a tied one counts as the
    head), n layers, D hidden size, causal attention (Kaplan et al. 2020, arXiv 2001.08361, with the causal half).
    """
    files = sorted(policy.glob("*.safetensors"))
    if not files or not (policy / "config.json").is_file():
        return float("nan")
    config = read_config(policy / "config.json")
    parameters = 0
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                embedding = "embed" in name and not config.get("tie_word_embeddings")
                parameters += 0 if embedding else int(np.prod(tensors.get_slice(name).get_shape()))
    attention = 6 * config["num_hidden_layers"] * config["hidden_size"]
    size = lengths.astype(np.float64)
    return float(6 * parameters * size.sum() + attention * (size**2).sum())


def _batches(plan: PlanWindow, lengths: NDArray[np.int64]) -> dict[str, str]:
    """Smallest, mean and largest step in samples, tokens and packs."""
    first_samples = plan.pack_starts[plan.step_starts]
    counts = {
        "samples": np.diff(first_samples),
        "tokens": np.diff(np.concatenate(([0], np.cumsum(lengths)))[first_samples]),
        "packs": np.diff(plan.step_starts),
    }
    return {name: f"{of.min():,} to {of.max():,}, mean {of.mean():,.1f}" for name, of in counts.items()}


def _mixture(domains: pa.ChunkedArray, lengths: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """Share of each domain in samples and in tokens."""
    shares_by_stage = {}
    for name in sorted(pc.unique(domains).to_pylist()):
        inside = np.asarray(pc.equal(domains, name))
        shares = {"samples": inside.mean(), "tokens": lengths[inside].sum() / lengths.sum()}
        shares_by_stage[name] = {unit: round(float(share), 4) for unit, share in shares.items()}
    return shares_by_stage


def _per_token(run: Run, plan: PlanWindow, scores: pa.Table) -> dict[str, float]:
    """Bytes a token of the objective's signals, and of the teachers' whole logits in float32."""
    scored = pc.sum(scores["rows"]).as_py()
    if not scored:
        return {}
    teachers = run.store.teachers()
    largest = max(teachers[name].vocab_size for name in plan.teachers)
    return {"stored": round(pc.sum(scores["bytes"]).as_py() / scored, 1), "as_logits": 4.0 * largest}


def _weights(plan: PlanWindow) -> dict[str, Any]:
    """Mixture and teacher weights in force: fixed ones as they are, others at the first and the last step."""
    fixed = {f"mixture/{name}": weight for name, weight in plan.settings.get("mixture", {}).items()}
    fixed |= {f"teacher/{name}": weight for name, weight in plan.settings.get("teacher_weights", {}).items()}
    moving = plan.settings.get("weights", {})
    return fixed | {name: f"{at[0]:.4g} to {at[-1]:.4g}" for name, at in moving.items()}
