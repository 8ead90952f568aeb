"""Runs a whole job: every stage in order. Each stage continues where an earlier call stopped.

    for every stage:  reference answers -> plan -> train                                  (data = "reference")
                      for every iteration: rollout -> reward -> score -> plan -> train    (data = "rollout")
                      evaluate on held-out prompts
    then the report.

Each step reads what is already in the store and computes only what is missing, so the same call continues after any
kill.

In follow mode (`follow`), rollout, scoring and training of a concurrent stage run at the same time in separate
processes; each polls the store for new work until its part of the stage is done (follow.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.query.report import write_report
from mopd_dataplane.run.changes import Accept, refuse_changes
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.follow import follow_rollout, follow_score, follow_train, join_training, run_concurrent
from mopd_dataplane.run.preflight import check_converted
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.queue_score import score_queue
from mopd_dataplane.run.ray.cluster import check_cluster, ray_fleet
from mopd_dataplane.run.remaining_time import RemainingTime
from mopd_dataplane.run.steps.collapse import check_answer_collapse
from mopd_dataplane.run.steps.cut import cut_into_windows
from mopd_dataplane.run.steps.discriminate import discriminate
from mopd_dataplane.run.steps.endings import print_stop_tokens
from mopd_dataplane.run.steps.evaluate import accuracy, best_evaluated, evaluate
from mopd_dataplane.run.steps.link import check_links, link_sources
from mopd_dataplane.run.steps.plan import plan_window, recorded_windows, trainable_plan, windows_to_replan
from mopd_dataplane.run.steps.reward import reward
from mopd_dataplane.run.steps.rollout import rollout, store_reference
from mopd_dataplane.run.steps.rounds import rollout_until
from mopd_dataplane.run.steps.score import score
from mopd_dataplane.run.steps.self_checks import check_models
from mopd_dataplane.run.steps.train import Training
from mopd_dataplane.run.tasks import WindowTrainer
from mopd_dataplane.train.node_agent import node_count, node_rank

Summary = dict[str, Any]


def run_job(
    job: Job,
    *,
    console: Console | None = None,
    only: str | None = None,
    ray: str | None = None,
    from_here: bool = False,
    ask: Accept = refuse_changes,
) -> Summary:
    """Run a job to its end, or one stage of it; a node other than the first (PET_NODE_RANK > 0) only joins training.

    only: name of the stage. ray: address of the Ray cluster that samples, scores and trains; "" for the default
    cluster, as with `--ray` without an address (docs/ray.md); None for this process. from_here: if the job file was
    changed since the run began, apply the changes to the remaining iterations without calling `ask`. ask: called with
    a description of such changes; returns True to accept them (docs/change.md).
    Returns {"store": URI, "accuracy": {stage: {domain: share}}, "report": path}. The accuracy is that of each stage's
    newest policy, for stages where it was evaluated.
    Raises MopdError; finished work is kept, and calling again with the same arguments continues from there.
    """
    if node_rank() > 0:
        join_training(job, Progress(console), only)
        return {"store": job.store, "accuracy": {}, "report": "written by the first node"}
    if ray is not None:
        check_cluster(ray)
    run = open_run(job, Progress(console), accept=(lambda description: True) if from_here else ask)
    if job.student.gguf:
        check_converted(run.job, run.store, run.tokenizer)
    with ExitStack() as stack:
        if ray is not None:
            run = replace(run, fleet=stack.enter_context(ray_fleet(ray, run)))
        stack.enter_context(closing(run.engines))
        stages = [job.stage(only)] if only else list(job.stages)
        for number, stage in enumerate(stages, start=1):
            run_stage(run, stage, later_stages=[other for other in stages[number:] if not run.is_done(other)])
    report = write_report(run.store, run.root / "report.html")
    run.work.publish_file("report.html")
    accuracies = {stage.name: accuracy(run, stage.name, run.policies.latest(stage)) for stage in run.job.stages}
    evaluated = {name: by_domain for name, by_domain in accuracies.items() if by_domain}
    return {"store": run.store.uri, "accuracy": evaluated, "report": str(report)}


def run_stage(run: Run, stage: Stage, *, later_stages: Sequence[Stage] = ()) -> None:
    """Run one stage to its end: check its models, evaluate the policy that it starts from, run it, evaluate the result.

    later_stages: stages that run after this one in the same call; used only to estimate the remaining time.
    """
    if run.is_done(stage):
        run.progress.say(f"{stage.name:<16} done")
        return
    check_models(run, stage)
    if stage.start != "init":  # its policy may lack results on domains that were added after it was trained
        start = run.job.stage(stage.start)
        evaluate(run, start, run.policies.latest(start))
    elif stage.data == "rollout":
        evaluate(run, stage, 0)
    if stage.data == "rollout":
        print_stop_tokens(run, stage)
    if stage.concurrent:
        run_concurrent(run, stage)
        newest_version = run.policies.latest(stage)
        for version in range(1, newest_version + 1):
            if _must_evaluate(run, stage, version):
                with run.progress.iteration(version, newest_version):
                    evaluate(run, stage, version)
    else:
        run_iterations(run, stage, later_stages=later_stages)
    run.mark_done(stage)


def run_iterations(run: Run, stage: Stage, *, later_stages: Sequence[Stage] = ()) -> None:
    """Run the iterations of a stage one after the other: samples, signals, plan, training, evaluation."""
    time_left = RemainingTime(run.job, stage, stage.iterations, later_stages=later_stages)
    with _training_of(run, stage) as training:
        # Window w trains policy version w + 1. If the stage samples its data, or cuts stored samples into windows, the
        # window uses the samples of iteration w, else all samples of the stage (`stage.iteration_of(w)` is None).
        for window in range(stage.iterations):
            needs_training = run.policies.latest(stage) <= window
            with (
                run.progress.iteration(window + 1, stage.iterations),
                run.events.iteration(),
                _with_settings_of_window(run, stage, window) as (window_run, window_stage),
            ):
                if needs_training:
                    produce_samples(window_run, window_stage, window)
                    check_answer_collapse(window_run, window_stage, window)
                    training.wait_for_checkpoint()
                    iteration = stage.iteration_of(window)
                    score(window_run, window_stage, iteration=iteration)
                    training.train(plan_window(window_run, window_stage, window, iteration=iteration))
                if _must_evaluate(run, stage, window + 1):
                    evaluate(window_run, window_stage, window + 1)
                    if best := best_evaluated(window_run, window_stage):
                        training.keep_best(best)
            if not needs_training:
                time_left.skip_iteration()
            elif remaining := time_left.after_iteration(window + 1):
                run.progress.say(f"{stage.name:<16} left     {remaining}")


def _training_of(run: Run, stage: Stage) -> AbstractContextManager[WindowTrainer]:
    """What trains a stage: a worker of the fleet, or processes of this node and, with PET_NNODES, of other nodes."""
    if run.fleet is not None and node_count() == 1:
        return run.fleet.training(stage)
    return Training(run, stage)


@contextmanager
def _with_settings_of_window(run: Run, stage: Stage, window: int) -> Iterator[tuple[Run, Stage]]:
    """Yield the run and the stage with the job settings that apply to a window.

    If the window has older settings than `run`, it gets engines of its own, which are closed at the end of the block.
    """
    window_run, window_stage = run.at(stage, window)
    with nullcontext() if window_run is run else closing(window_run.engines):  # the caller closes the engines of `run`
        yield window_run, window_stage


def produce_samples(run: Run, stage: Stage, window: int) -> None:
    """Produce those samples of a window that are not in the store yet.

    Depending on the stage: store reference answers; roll out and reward; link samples of other stores; or reward
    samples that were imported or linked.
    """
    if stage.data == "reference":
        store_reference(run, stage)
    elif stage.has_stored_samples:
        if stage.sources:
            link_sources(run, stage)
            check_links(run, stage)
        cut_into_windows(run, stage)
        if run.job.objective(stage).needs_rewards:
            reward(run, stage, iteration=stage.iteration_of(window))
    elif stage.rollout.until:  # sample further prompts until enough groups have different rewards
        rollout_until(run, stage, stage.rollout.until, window)
    else:
        rollout(run, stage, window)
        reward(run, stage, iteration=window)
        if stage.discriminator:
            discriminate(run, stage, window)


def rollout_stage(job: Job, stage: Stage, *, console: Console | None = None, follow: bool = False) -> Summary:
    """Produce the samples of the stage's next window, or with `follow` of all its windows.

    follow: run in follow mode (see the head of this file).
    With `rollout.until`, answers are rewarded too, because the rewards decide whether another round of prompts is
    sampled. Returns {"stage", "samples": number of samples of the stage in the store}. Without `follow`, the result
    also has "window" and, for sampled data, "rollouts": one RolloutReport as a dict per sampling policy.
    Raises MopdError; finished work is kept, and calling again with the same arguments continues from there.
    """
    run = open_run(job, Progress(console))
    if follow:
        with closing(run.engines):
            return {"stage": stage.name, "samples": follow_rollout(run, stage)}
    window = run.policies.latest(stage)
    run, stage = run.at(stage, window)
    if stage.data != "rollout":
        produce_samples(run, stage, window)
        return {"stage": stage.name, "window": window, "samples": _count_samples(run, stage)}
    with closing(run.engines):
        rule = stage.rollout.until
        reports = rollout_until(run, stage, rule, window) if rule else rollout(run, stage, window)
    rollouts = [asdict(report) for report in reports]
    return {"stage": stage.name, "window": window, "samples": _count_samples(run, stage), "rollouts": rollouts}


def score_stage(
    job: Job, stage: Stage, *, console: Console | None = None, follow: bool = False, queue: str | None = None
) -> Summary:
    """Compute every signal that a stage's samples lack.

    With `follow` (follow mode, see the head of this file), keep running: score and reward samples as they become
    visible, until the rollouts have ended.
    queue: name of a running TransferQueue whose trajectories are the samples: score them as they become visible, and
    put their signals into the queue, until it ends.
    Returns {"stage", "signals": number of new signals, "loss_tokens": trained tokens that they cover}; with `follow`,
    the new "rewards" and "unscorable" (answers that could not be rewarded) instead of "loss_tokens"; with `queue`, also
    "put": number of trajectories that got their signals.
    Raises MopdError; finished work is kept, and calling again with the same arguments continues from there.
    """
    run = open_run(job, Progress(console), create=follow)  # with follow, rollout may not have created the store yet
    if queue is not None:
        return {"stage": stage.name, **score_queue(run, stage, queue)}
    if follow:
        return {"stage": stage.name, **follow_score(run, stage)}
    run, stage = run.at(stage, run.policies.latest(stage))
    return {"stage": stage.name, **score(run, stage)}


def train_stage(job: Job, stage: Stage, *, console: Console | None = None, follow: bool = False) -> Summary:
    """Train every recorded window that has no policy version yet.

    With `follow` (follow mode, see the head of this file), also plan each window as soon as its samples are scored,
    until all scored samples are trained on or dropped.
    Returns {"stage", "policy_version", "policy": folder of that version, "windows": number trained}; with `follow`, the
    result of follow_train instead of "windows".
    Raises MopdError; finished work is kept, and calling again with the same arguments continues from there.
    """
    run = open_run(job, Progress(console), create=follow)  # with follow, rollout may not have created the store yet
    counts = follow_train(run, stage) if follow else train_recorded(run, stage)
    policy_facts = {"policy_version": run.policies.latest(stage), "policy": str(run.policies.latest_folder(stage))}
    return {"stage": stage.name, **counts, **policy_facts}


def train_recorded(run: Run, stage: Stage) -> dict[str, float]:
    """Train every recorded window that has no policy version yet."""
    windows_trained = 0
    with Training(run, stage) as training:
        # Trained windows that no checkpoint follows: the trainer would train them again before any later window.
        invalid_windows = windows_to_replan(run, stage)
        for plan in recorded_windows(run, stage, run.policies.latest(stage)):
            if trainable_plan(run, stage, plan.window) is None:
                invalid_windows.append(plan.window)
            if invalid_windows:
                raise MismatchError(
                    f"stage {stage.name!r}: the plan of window {invalid_windows[0]} is no longer valid, because "
                    "some of its samples were deleted or the job was changed for it; plan the window again: "
                    f"mopd plan JOB --stage {stage.name}"
                )
            if len(plan.sample_rows):  # an empty window only marks the end of a concurrent stage's plans
                training.train(plan)
                windows_trained += 1
    return {"windows": windows_trained}


def _must_evaluate(run: Run, stage: Stage, version: int) -> bool:
    """Return True if the schedule asks for an evaluation of this policy version: always for the last one, else every
    `eval.every` iterations."""
    every = run.job.eval.every
    last = run.policies.latest(stage) if stage.concurrent else stage.iterations
    return version == last or (every > 0 and version % every == 0)


def _count_samples(run: Run, stage: Stage) -> int:
    return run.store.dataset("samples").count_rows(f"stage = '{stage.name}'")
