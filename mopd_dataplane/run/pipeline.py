"""The whole job on one page: every stage in order, each continuing where it stopped.

    for every stage:  reference answers -> plan -> train                                  (data = "reference")
                      for every iteration: rollout -> reward -> score -> plan -> train    (data = "rollout")
                      evaluate on held-out prompts
    then the report.

Each step looks at what the store already has and does the rest, so the same call continues after any kill.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.query.report import write_report
from mopd_dataplane.run.changes import Accept, never
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.follow import join_job, rollout_follow, run_concurrent, score_follow, train_follow
from mopd_dataplane.run.pace import Pace
from mopd_dataplane.run.preflight import check_converted
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.queue_score import score_queue
from mopd_dataplane.run.ray.cluster import check_cluster, ray_fleet
from mopd_dataplane.run.steps.collapse import check_collapse
from mopd_dataplane.run.steps.discriminate import discriminate
from mopd_dataplane.run.steps.endings import say_endings
from mopd_dataplane.run.steps.evaluate import accuracy, evaluate, keep_best
from mopd_dataplane.run.steps.link import check_links, link_sources
from mopd_dataplane.run.steps.plan import lost_windows, plan_window, recorded_windows, trainable_plan
from mopd_dataplane.run.steps.reward import reward
from mopd_dataplane.run.steps.rollout import rollout, store_reference
from mopd_dataplane.run.steps.rounds import rollout_until
from mopd_dataplane.run.steps.score import score
from mopd_dataplane.run.steps.self_checks import check_models
from mopd_dataplane.run.steps.train import Training
from mopd_dataplane.train.node_agent import node_rank

Summary = dict[str, Any]


def run_job(
    job: Job,
    *,
    console: Console | None = None,
    only: str | None = None,
    ray: str | None = None,
    from_here: bool = False,
    ask: Accept = never,
) -> Summary:
    """Run a job to its end, or one stage of it; on a node besides the first (PET_NODE_RANK) only take part in training.

    only: name of the stage. ray: address of the Ray cluster that rolls out and scores, "" the one that a bare `--ray`
    takes (docs/ray.md); None: this process does. from_here: accept changes of a job that has begun, for what is still
    to come; ask: decides on them where from_here is False, from a description (docs/change.md).
    Returns {"store", "accuracy": {stage: {domain: share}} of the newest policies, where evaluated, "report": its file}.
    Raises MopdError; whatever was finished stays, and the same call continues.
    """
    if node_rank() > 0:
        join_job(job, Progress(console), only)
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
            run_stage(run, stage, later=[other for other in stages[number:] if not run.is_done(other)])
    report = write_report(run.store, run.root / "report.html")
    run.work.publish_file("report.html")
    accuracies = {stage.name: accuracy(run, stage.name, run.policies.latest(stage)) for stage in run.job.stages}
    evaluated = {name: by_domain for name, by_domain in accuracies.items() if by_domain}
    return {"store": run.store.uri, "accuracy": evaluated, "report": str(report)}


def run_stage(run: Run, stage: Stage, *, later: Sequence[Stage] = ()) -> None:
    """One stage to its end: its models are checked and the policy that it starts from is evaluated, then it is run and
    evaluated.

    later: stages that follow in this call, for the time that is left.
    """
    if run.is_done(stage):
        run.progress.say(f"{stage.name:<16} done")
        return
    check_models(run, stage)
    if stage.start != "init":  # evaluated again on domains that were added after it was trained
        start = run.job.stage(stage.start)
        evaluate(run, start, run.policies.latest(start))
    elif stage.data == "rollout":
        evaluate(run, stage, 0)
    if stage.data == "rollout":
        say_endings(run, stage)
    if stage.concurrent:
        run_concurrent(run, stage)
        newest = run.policies.latest(stage)
        for version in range(1, newest + 1):
            if _is_evaluated(run, stage, version):
                with run.progress.iteration(version, newest):
                    evaluate(run, stage, version)
    else:
        run_in_turn(run, stage, later=later)
    run.mark_done(stage)


def run_in_turn(run: Run, stage: Stage, *, later: Sequence[Stage] = ()) -> None:
    """Every iteration of a stage: its data, signals, plan and training, then its evaluation."""
    pace = Pace(run.job, stage, stage.iterations, later=later)
    with Training(run, stage) as training:
        for window in range(stage.iterations):
            is_new = run.policies.latest(stage) <= window
            with run.progress.iteration(window + 1, stage.iterations), _at(run, stage, window) as (now, settings):
                if is_new:
                    produce(now, settings, window)
                    check_collapse(now, settings, window)
                    training.settle()
                    iteration = stage.iteration_of(window)
                    score(now, settings, iteration=iteration)
                    training.train(plan_window(now, settings, window, iteration=iteration))
                if _is_evaluated(run, stage, window + 1):
                    evaluate(now, settings, window + 1)
                    keep_best(now, settings)
            if not is_new:
                pace.skip()
            elif left := pace.lap(window + 1):
                run.progress.say(f"{stage.name:<16} left     {left}")


@contextmanager
def _at(run: Run, stage: Stage, window: int) -> Iterator[tuple[Run, Stage]]:
    """The run and the stage by the job that a window goes by; engines of an earlier job end with the block."""
    now, settings = run.at(stage, window)
    with nullcontext() if now is run else closing(now.engines):
        yield now, settings


def produce(run: Run, stage: Stage, window: int) -> None:
    """The samples of a window: reference answers, rollouts with their rewards, what was imported, or what other stores
    have."""
    if stage.data == "reference":
        store_reference(run, stage)
    elif stage.is_stored:
        if stage.sources:
            link_sources(run, stage)
            check_links(run, stage)
        if run.job.objective(stage).needs_rewards:
            reward(run, stage)
    elif stage.rollout.until:
        rollout_until(run, stage, stage.rollout.until, window)
    else:
        rollout(run, stage, window)
        reward(run, stage, iteration=window)
        if stage.discriminator:
            discriminate(run, stage, window)


def rollout_stage(job: Job, stage: Stage, *, console: Console | None = None, follow: bool = False) -> Summary:
    """Produce the samples of the stage's next window, or with `follow` of all its windows.

    With `rollout.until` answers are rewarded too, since their rewards say whether further prompts follow. Returns
    {"stage", "samples": how many the store has of the stage}; without `follow` also "window" and, where
    policies sampled, "rollouts", a RolloutReport of each. Raises MopdError; the same call then continues.
    """
    run = open_run(job, Progress(console))
    if follow:
        with closing(run.engines):
            return {"stage": stage.name, "samples": rollout_follow(run, stage)}
    window = run.policies.latest(stage)
    run, stage = run.at(stage, window)
    if stage.data != "rollout":
        produce(run, stage, window)
        return {"stage": stage.name, "window": window, "samples": _samples(run, stage)}
    with closing(run.engines):
        until = stage.rollout.until
        reports = rollout_until(run, stage, until, window) if until else rollout(run, stage, window)
    rollouts = [asdict(report) for report in reports]
    return {"stage": stage.name, "window": window, "samples": _samples(run, stage), "rollouts": rollouts}


def score_stage(
    job: Job, stage: Stage, *, console: Console | None = None, follow: bool = False, queue: str | None = None
) -> Summary:
    """Compute every signal that a stage's samples lack; with `follow`, as they appear, and the rewards too.

    queue: name of a running TransferQueue whose trajectories are the samples; they are scored as they appear, and the
    signals are put back beside them. Returns {"stage", "signals": how many are new} and their "loss_tokens", or with
    `follow` the new "rewards", and with `queue` how many trajectories were "put". Raises MopdError; the same call then
    continues.
    """
    run = open_run(job, Progress(console), make=follow)
    if queue is not None:
        return {"stage": stage.name, **score_queue(run, stage, queue)}
    if follow:
        return {"stage": stage.name, **score_follow(run, stage)}
    run, stage = run.at(stage, run.policies.latest(stage))
    return {"stage": stage.name, **score(run, stage)}


def train_stage(job: Job, stage: Stage, *, console: Console | None = None, follow: bool = False) -> Summary:
    """Train every recorded window that has no policy version; with `follow`, plan windows as they become possible.

    Returns {"stage", "policy_version", "policy": its folder}, "windows" trained, or with `follow` what train_follow
    returns. Raises MopdError; the same call then continues.
    """
    run = open_run(job, Progress(console), make=follow)
    trained = train_follow(run, stage) if follow else train_recorded(run, stage)
    newest = {"policy_version": run.policies.latest(stage), "policy": str(run.policies.last(stage))}
    return {"stage": stage.name, **trained, **newest}


def train_recorded(run: Run, stage: Stage) -> dict[str, float]:
    """Train every recorded window that has no policy version yet."""
    trained = 0
    with Training(run, stage) as training:
        lost = lost_windows(run, stage)
        for plan in recorded_windows(run, stage, run.policies.latest(stage)):
            lost += [plan.window] if trainable_plan(run, stage, plan.window) is None else []
            if lost:
                raise MismatchError(
                    f"stage {stage.name!r}: samples of window {lost[0]} were deleted, or the job was changed for "
                    f"it, so its plan was forgotten; plan what is left: mopd plan JOB --stage {stage.name}"
                )
            if len(plan.sample_rows):
                training.train(plan)
                trained += 1
    return {"windows": trained}


def _is_evaluated(run: Run, stage: Stage, version: int) -> bool:
    """The last version of a stage always is, others every so many iterations."""
    every, last = run.job.eval.every, run.policies.latest(stage) if stage.concurrent else stage.iterations
    return version == last or (every > 0 and version % every == 0)


def _samples(run: Run, stage: Stage) -> int:
    return run.store.dataset("samples").count_rows(f"stage = '{stage.name}'")
