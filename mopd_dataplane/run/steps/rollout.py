"""Rollout: the policy samples one iteration into the store, through the token log; or reference answers are stored."""

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from mopd_dataplane.base.memory import out_of_memory_named
from mopd_dataplane.job import less_memory
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
from mopd_dataplane.run.steps.endings import stopped_share, warn_of_cut_off
from mopd_dataplane.run.steps.self_checks import check_sampler
from mopd_dataplane.run.steps.server_identity import check_policy_server
from mopd_dataplane.run.tasks import Part
from mopd_dataplane.run.token_log_copy import StoredLog
from mopd_dataplane.store.dataset import Store

REFERENCE_BATCH = 4096
"""Reference samples committed together."""


def rollout(run: Run, stage: Stage, iteration: int, *, follow: bool = False, rounds: int = 1) -> list[RolloutReport]:
    """Sample one iteration of a stage, or finish it: a report of each sampling policy, none where all is in the store.

    The policy is the version the iteration starts from; with `follow` the newest, also one published in the middle.
    rounds: of prompts that the iteration has by now.
    """
    prompts = prompts_of(run, stage, iteration, rounds=rounds)
    _, stored = stage_samples(run.store, stage, iteration, ["uid"])
    already = set(stored["uid"].to_pylist()) | run.store.deletions.uids()
    samplers = [sampler_of(run.job, stage, prompt, iteration) for prompt in prompts]
    reports = []
    for sampler in dict.fromkeys(samplers):
        own = [prompt for prompt, by in zip(prompts, samplers, strict=True) if by == sampler]
        if sampler.policy == "reference":
            store_reference(run, stage, own, iteration=iteration)
        elif not already.issuperset(uids_of(run, stage, iteration, own)):
            version = run.policies.latest(stage) if follow else iteration
            reports.append(_sample(run, Part(stage, iteration, sampler, version, own), already, follow=follow))
    if not reports:
        return []
    seconds, levels = sum(report.seconds for report in reports), {report.level for report in reports}
    run.record_time(stage, iteration, "rollout", seconds, part=rounds, log="/".join(sorted(levels)))
    return reports


def _sample(run: Run, part: Part, already: set[str], *, follow: bool) -> RolloutReport:
    """Let one policy answer its prompts of an iteration: on an engine here, or on the replicas of a fleet."""
    stage, sampler = part.stage, part.sampler
    uids = uids_of(run, stage, part.iteration, part.prompts)
    before = len(already.intersection(uids))
    with run.progress.step(stage.name, "rollout", total=len(uids), unit="samples") as (advance, report):

        def show(done: int, **facts: str) -> None:
            if "notice" in facts:
                run.progress.say(f"{stage.name:<16} rollout  {facts['notice']}")
            else:
                advance(before + done, **facts)

        if run.fleet is not None:
            done = run.fleet.roll_out(part, already, show)
        else:
            folder = sampling_policy(run, stage, sampler.policy, part.version)
            starts = engine_kind(run.job.engine.kind).stays and not run.job.engine.url
            what = f"{f'starting {run.job.engine.kind} with' if starts else 'loading'} policy {folder.name}"
            advance(before, now=run.progress.waits_for(stage.name, what, [folder], slow=starts))
            mixed = _mixed_teacher(run, part)
            with run.engines.use(folder, part.version, mixed_teacher=mixed, adapter=part.adapter) as engine:
                done = roll_out(run, engine, part, f"{sampler.writers}0", already, show, follow=follow)
        report.facts = _facts(done)
        share = stopped_share(run, stage, part.iteration)
        if share is not None:
            report.facts["stopped"] = f"{share:.0%}"
    if share is not None:
        warn_of_cut_off(run, stage, part.iteration, share)
    return done


def open_engine(run: Run, part: Part) -> Engine:
    """A new engine that holds the part's policy."""
    folder = sampling_policy(run, part.stage, part.sampler.policy, part.version)
    return start_engine(run.job, folder, part.version, mixed_teacher=_mixed_teacher(run, part), adapter=part.adapter)


def roll_out(
    run: Run,
    engine: Engine,
    part: Part,
    writer: str,
    already: set[str],
    show: Callable[..., None],
    *,
    follow: bool = False,
    share: Collection[str] | None = None,
) -> RolloutReport:
    """Sample a part, or a share of it, into the store through the token log of `writer`; finish what that log holds."""
    stage, sampler = part.stage, part.sampler.policy
    check_policy_server(run, stage, engine)
    check_sampler(run, stage, engine, sampling_policy(run, stage, sampler, part.version))
    dropped = 0

    def commit(samples: list[Sample]) -> None:
        nonlocal dropped
        record_abandoned(run.store, samples)
        receipt = run.store.commit_samples(samples, keep_first=True)
        for uid in receipt.dropped:
            run.store.add_event(f"dropped/{uid}", stage.name, "dropped", part.iteration, None, {"uid": uid})
        dropped += len(receipt.dropped)

    def newest() -> tuple[int, Path]:
        latest = run.policies.latest(stage)
        return latest, sampling_policy(run, stage, sampler, latest)

    environment = environments_of(run.job, run.job.domains_of(stage), run.tokenizer, run.decode)
    sandbox = run.root / "sandbox" / stage.name / writer
    task = RolloutTask(
        stage=stage.name,
        iteration=part.iteration,
        seed=run.job.seed,
        rollout=stage.rollout.model_copy(update={"policy": sampler}),
        wal=run.job.wal,
        wal_dir=run.root / "wal",
        render=run.prompt_ids,
        share=share,
        writer=writer,
        copy=StoredLog(run.work.files, f"wal/{stage.name}/{writer}") if run.work.files is not None else None,
    )
    with out_of_memory_named(f"stage {stage.name!r}: sampling", less_memory.for_rollout(run.job.engine)):
        report = run_rollout(
            engine,
            part.prompts,
            task,
            commit=commit,
            already=already,
            progress=show,
            policies=lambda version: sampling_policy(run, stage, sampler, version),
            published=newest if follow and sampler == "self" else None,
            environment=environment,
            sandbox=SubprocessSandbox(sandbox) if environment is not None else None,
        )
    report.dropped = dropped
    if environment is not None:  # every sample is in the store, and the log that speaks of its commands is deleted
        shutil.rmtree(sandbox, ignore_errors=True)
    return report


def _mixed_teacher(run: Run, part: Part) -> MixedTeacher | None:
    if not part.sampler.mixed_teacher:
        return None
    return MixedTeacher(run.policies.teacher(part.sampler.mixed_teacher, part.stage), part.stage.rollout.teacher_mix)


def uids_of(run: Run, stage: Stage, iteration: int, prompts: Sequence[Prompt]) -> list[str]:
    """uids of the samples of some prompts, in admission order."""
    return [
        sample_uid(run.job.seed, stage.name, prompt.prompt_id, index, iteration)
        for prompt in prompts
        for index in range(stage.rollout.group_size)
    ]


def sampling_policy(run: Run, stage: Stage, sampler: str, version: int) -> Path:
    """Weights that sample: the stage's own policy of that version (`self`), or a teacher (off-policy data)."""
    return run.policies.folder(stage, version) if sampler == "self" else run.policies.teacher(sampler, stage)


def record_abandoned(store: Store, samples: list[Sample]) -> None:
    """Record each sample that was given up, and why; before it is committed, so that none goes unrecorded."""
    for sample in samples:
        if sample.abandoned:
            name, detail = f"abandon/{sample.uid}", {"reason": sample.abandoned, "uid": sample.uid}
            store.add_event(name, sample.stage, "abandon", sample.iteration, float(sample.response_len), detail)


def _facts(done: RolloutReport) -> dict[str, str]:
    facts = {
        "samples": f"{done.samples:,}",
        "tokens": f"{done.tokens:,}",
        "rate": f"{done.tokens_per_s:,.0f} tokens/s",
        "log": f"{done.level} ({done.filesystem})",
    }
    if done.resumed:
        facts["resumed"] = f"{done.resumed} ({done.exact} exact)"
        restored = f"{done.restored} from saved keys and values, " if done.restored else ""
        facts["prefixes"] = f"{restored}{done.resumed - done.restored} prefilled again"
    if done.dropped:
        facts["dropped"] = f"{done.dropped} that came second under their uid, or were deleted"
    if done.weight_changes:
        facts["newer policies"] = f"{done.weight_changes}"
    return facts


def store_reference(run: Run, stage: Stage, prompts: Sequence[Prompt] | None = None, *, iteration: int = 0) -> None:
    """Commit the reference samples of a stage, or of some prompts of an iteration; what is stored stays as it is, what
    was deleted stays away."""
    slots = prompts if prompts is not None else training_slots(run, stage)
    deleted = run.store.deletions.uids()
    samples = [one for one in _reference_samples(run, stage, slots, iteration) if one.uid not in deleted]
    with run.progress.step(stage.name, "data", total=len(samples), unit="samples") as (advance, report):
        for start in range(0, len(samples), REFERENCE_BATCH):
            run.store.commit_samples(samples[start : start + REFERENCE_BATCH])
            advance(start)
        report.facts = {"samples": f"{len(samples):,}", "tokens": f"{sum(len(s.tokens) for s in samples):,}"}


def _reference_samples(run: Run, stage: Stage, prompts: Sequence[Prompt | None], iteration: int) -> Iterator[Sample]:
    """Reference answers as off-policy samples, as the student would write them, without sampler log-probs.

    prompts: None in place of a deleted one. iteration: the one they belong to, and the policy version they count as.
    """
    job = run.job
    per_domain = -(-stage.examples // len(job.domains_of(stage))) if stage.examples else 0
    taken: dict[str, int] = {}
    for ordinal, prompt in enumerate(prompts):
        if prompt is None:
            continue
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if per_domain and taken[prompt.domain] > per_domain:
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
