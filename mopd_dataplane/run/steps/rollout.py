"""Rollout: samples one iteration from the policy and commits it to the store through the token log; or stores
reference answers."""

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from mopd_dataplane.base.memory import explain_out_of_memory
from mopd_dataplane.job import memory_advice
from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import Prompt, Sample, sample_uid
from mopd_dataplane.rollout.engines.engine import Engine
from mopd_dataplane.rollout.engines.hf import MixedTeacher
from mopd_dataplane.rollout.engines.kinds import engine_kind
from mopd_dataplane.rollout.rollout_report import RolloutReport
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.rollout.tools.sandbox import SubprocessSandbox
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.environments import environments_of
from mopd_dataplane.run.iteration import sampler_of
from mopd_dataplane.run.open_engine import start_engine
from mopd_dataplane.run.stage_prompts import prompts_of, training_slots
from mopd_dataplane.run.stage_rows import stage_samples
from mopd_dataplane.run.steps.endings import stopped_share, warn_if_mostly_cut_off
from mopd_dataplane.run.steps.self_checks import check_sampler
from mopd_dataplane.run.steps.server_identity import check_policy_server
from mopd_dataplane.run.tasks import SamplingTask
from mopd_dataplane.run.token_log_copy import StoredLog
from mopd_dataplane.store.dataset import Store

REFERENCE_BATCH = 4096
"""Number of reference samples per commit."""


def rollout(run: Run, stage: Stage, iteration: int, *, follow: bool = False, rounds: int = 1) -> list[RolloutReport]:
    """Produce the samples of an iteration that are not in the store yet. Returns one report for each policy that had
    samples to produce.

    The policy version is the one that the iteration starts from; with `follow`, the newest one, switching when another
    is published during the rollout. rounds: number of rounds of prompts that the iteration has, this one included (see
    rollout_until).
    """
    prompts = prompts_of(run, stage, iteration, rounds=rounds)
    _, stored = stage_samples(run.store, stage, iteration, ["uid"])
    skip_uids = set(stored["uid"].to_pylist()) | run.store.deletions.uids()
    samplers = [sampler_of(run.job, stage, prompt, iteration) for prompt in prompts]
    reports = []
    for sampler in dict.fromkeys(samplers):
        sampler_prompts = [
            prompt for prompt, prompt_sampler in zip(prompts, samplers, strict=True) if prompt_sampler == sampler
        ]
        if sampler.policy == "reference":
            store_reference(run, stage, sampler_prompts, iteration=iteration)
        elif not skip_uids.issuperset(uids_of(run, stage, iteration, sampler_prompts)):
            version = run.policies.latest(stage) if follow else iteration
            task = SamplingTask(stage, iteration, sampler, version, sampler_prompts)
            reports.append(_run_sampling_task(run, task, skip_uids, follow=follow))
    if not reports:
        return []
    seconds = sum(report.seconds for report in reports)
    durability_levels = sorted({report.level for report in reports})
    run.record_time(stage, iteration, "rollout", seconds, part=rounds, log="/".join(durability_levels))
    return reports


def _run_sampling_task(run: Run, task: SamplingTask, skip_uids: set[str], *, follow: bool) -> RolloutReport:
    """Sample the prompts of a task with its policy: on an engine in this process, or on the replicas of a fleet."""
    stage, sampler = task.stage, task.sampler
    uids = uids_of(run, stage, task.iteration, task.prompts)
    done_before = len(skip_uids.intersection(uids))
    with run.progress.step(stage.name, "rollout", total=len(uids), unit="samples") as (advance, step_report):

        def show(count: int, **facts: str) -> None:
            if "notice" in facts:
                run.progress.say(f"{stage.name:<16} rollout  {facts['notice']}")
            else:
                advance(done_before + count, **facts)

        if run.fleet is not None:
            report = run.fleet.run_sampling_task(task, skip_uids, show)
        else:
            folder = sampling_policy(run, stage, sampler.policy, task.version)
            # `stays`: this kind of engine takes long to start, so a run keeps it between policies.
            starts_server = engine_kind(run.job.engine.kind).stays and not run.job.engine.url
            verb = f"starting {run.job.engine.kind} with" if starts_server else "loading"
            activity = f"{verb} policy {folder.name}"
            advance(done_before, now=run.progress.describe_wait(stage.name, activity, [folder], slow=starts_server))
            mixed = _mixed_teacher(run, task)
            with run.engines.use(folder, task.version, mixed_teacher=mixed, adapter=task.adapter) as engine:
                writer = f"{sampler.writer_prefix}0"  # number 0: the only engine of this process
                report = sample_on_engine(run, engine, task, writer, skip_uids, show, follow=follow)
        step_report.facts = _facts(report)
        stopped = stopped_share(run, stage, task.iteration)
        if stopped is not None:
            step_report.facts["stopped"] = f"{stopped:.0%}"
    if stopped is not None:
        warn_if_mostly_cut_off(run, stage, task.iteration, stopped)
    return report


def open_engine(run: Run, task: SamplingTask) -> Engine:
    """Start a new engine with the weights of the task's policy."""
    folder = sampling_policy(run, task.stage, task.sampler.policy, task.version)
    return start_engine(run.job, folder, task.version, mixed_teacher=_mixed_teacher(run, task), adapter=task.adapter)


def sample_on_engine(
    run: Run,
    engine: Engine,
    task: SamplingTask,
    writer: str,
    skip_uids: set[str],
    show: Callable[..., None],
    *,
    follow: bool = False,
    only_uids: Collection[str] | None = None,
) -> RolloutReport:
    """Sample the prompts of a task and commit the samples through the token log of `writer`.

    Samples that an earlier call left unfinished in that log are completed first. only_uids: the samples of the task
    that this engine produces; None for all.
    """
    stage, policy = task.stage, task.sampler.policy
    check_policy_server(run, stage, engine)
    check_sampler(run, stage, engine, sampling_policy(run, stage, policy, task.version))
    dropped_count = 0

    def commit(samples: list[Sample]) -> None:
        nonlocal dropped_count
        record_abandoned(run.store, samples)
        receipt = run.writer.commit_samples(samples, keep_first=True)
        for uid in receipt.dropped:  # an earlier commit has the same uid, or the sample was deleted meanwhile
            run.store.add_event(f"dropped/{uid}", stage.name, "dropped", task.iteration, None, {"uid": uid})
        dropped_count += len(receipt.dropped)

    def newest_policy() -> tuple[int, Path]:
        latest = run.policies.latest(stage)
        return latest, sampling_policy(run, stage, policy, latest)

    environment = environments_of(run.job, run.job.domains_of(stage), run.tokenizer, run.decode)
    sandbox = run.root / "sandbox" / stage.name / writer
    rollout_task = RolloutTask(
        stage=stage.name,
        iteration=task.iteration,
        seed=run.job.seed,
        rollout=stage.rollout.model_copy(update={"policy": policy}),
        wal=run.job.wal,
        wal_dir=run.root / "wal",
        render=run.prompt_ids,
        share=only_uids,
        writer=writer,
        copy=StoredLog(run.work.files, f"wal/{stage.name}/{writer}") if run.work.files is not None else None,
    )
    with explain_out_of_memory(f"stage {stage.name!r}: sampling", memory_advice.for_rollout(run.job.engine)):
        report = run_rollout(
            engine,
            task.prompts,
            rollout_task,
            commit=commit,
            skip_uids=skip_uids,
            progress=show,
            policies=lambda version: sampling_policy(run, stage, policy, version),  # the folder of a policy version
            published=newest_policy if follow and policy == "self" else None,  # the newest version and its folder
            environment=environment,
            sandbox=SubprocessSandbox(sandbox) if environment is not None else None,
        )
    report.dropped = dropped_count
    if environment is not None:  # all samples are committed and the log of the commands is deleted
        shutil.rmtree(sandbox, ignore_errors=True)
    return report


def _mixed_teacher(run: Run, task: SamplingTask) -> MixedTeacher | None:
    if not task.sampler.mixed_teacher:
        return None
    return MixedTeacher(run.policies.teacher(task.sampler.mixed_teacher, task.stage), task.stage.rollout.teacher_mix)


def uids_of(run: Run, stage: Stage, iteration: int, prompts: Sequence[Prompt]) -> list[str]:
    """uids of all samples of these prompts (`group_size` each), in the order in which the rollout starts them."""
    return [
        sample_uid(run.job.seed, stage.name, prompt.prompt_id, index, iteration)
        for prompt in prompts
        for index in range(stage.rollout.group_size)
    ]


def sampling_policy(run: Run, stage: Stage, policy: str, version: int) -> Path:
    """Folder of the weights to sample with.

    policy: "self" for the stage's own policy at this version, or the name of a teacher (off-policy data).
    """
    return run.policies.folder(stage, version) if policy == "self" else run.policies.teacher(policy, stage)


def record_abandoned(store: Store, samples: list[Sample]) -> None:
    """Add an event with the reason for each abandoned sample.

    Called before the commit, so that a kill in between cannot lose the event.
    """
    for sample in samples:
        if sample.abandoned:
            name, detail = f"abandon/{sample.uid}", {"reason": sample.abandoned, "uid": sample.uid}
            store.add_event(name, sample.stage, "abandon", sample.iteration, float(sample.response_len), detail)


def _facts(report: RolloutReport) -> dict[str, str]:
    facts = {
        "samples": f"{report.samples:,}",
        "tokens": f"{report.tokens:,}",
        "rate": f"{report.tokens_per_s:,.0f} tokens/s",
        "log": f"{report.level} ({report.filesystem})",
    }
    if report.resumed:
        facts["resumed"] = f"{report.resumed} ({report.exact} with bit-identical log-probs)"
        restored = f"{report.restored} restored from saved keys and values, " if report.restored else ""
        facts["prefixes"] = f"{restored}{report.resumed - report.restored} prefilled again"
    if report.dropped:
        facts["dropped"] = f"{report.dropped}: another commit had the same uid, or they were deleted"
    if report.weight_changes:
        facts["newer policies"] = f"{report.weight_changes}"
    return facts


def store_reference(run: Run, stage: Stage, prompts: Sequence[Prompt] | None = None, *, iteration: int = 0) -> None:
    """Commit the reference answers of prompts as samples: those of `prompts`, or of the whole stage if None.

    Samples that are in the store already are not changed; deleted samples are not added again.
    """
    # One slot per prompt; None in place of a deleted prompt, so that the positions of the others do not change.
    prompt_slots = prompts if prompts is not None else training_slots(run, stage)
    deleted = run.store.deletions.uids()
    reference = _reference_samples(run, stage, prompt_slots, iteration)
    samples = [sample for sample in reference if sample.uid not in deleted]
    with run.progress.step(stage.name, "data", total=len(samples), unit="samples") as (advance, report):
        for start in range(0, len(samples), REFERENCE_BATCH):
            batch = samples[start : start + REFERENCE_BATCH]
            run.store.commit_samples(batch)
            advance(start + len(batch))
        report.facts = {"samples": f"{len(samples):,}", "tokens": f"{sum(len(s.tokens) for s in samples):,}"}


def _reference_samples(run: Run, stage: Stage, prompts: Sequence[Prompt | None], iteration: int) -> Iterator[Sample]:
    """Yield reference answers as off-policy samples: in the student's tokens and template, without sampler log-probs.

    prompts: None in place of each deleted prompt. iteration: iteration of the samples, also recorded as their policy
    version.
    """
    job = run.job
    max_per_domain = -(-stage.examples // len(job.domains_of(stage))) if stage.examples else None
    count_by_domain: dict[str, int] = {}
    for ordinal, prompt in enumerate(prompts):
        if prompt is None:
            continue
        count_by_domain[prompt.domain] = count_by_domain.get(prompt.domain, 0) + 1
        if max_per_domain is not None and count_by_domain[prompt.domain] > max_per_domain:
            continue
        prompt_ids, response = run.answer_ids(prompt, prompt.answer)
        yield Sample(
            uid=sample_uid(job.seed, stage.name, prompt.prompt_id, 0, iteration),
            prompt_id=prompt.prompt_id,
            group_id=f"{prompt.prompt_id}#{iteration}",
            group_index=0,
            iteration=iteration,
            domain=prompt.domain,
            effort=prompt.effort,
            stage=stage.name,
            writer="reference",
            writer_seq=ordinal,
            policy="reference",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            prompt_len=len(prompt_ids),
            tokens=np.array(prompt_ids + response, np.int32),
            logprobs=None,
            loss_mask=np.ones(len(response), np.uint8),
            version_starts=np.zeros(1, np.int32),
            versions=np.full(1, iteration, np.int32),
            finish_reason="reference",
            tokenizer=run.tokenizer_digest,
        )
