"""Rollout: the policy samples one iteration into the store, through the token log."""

from __future__ import annotations

from pathlib import Path

from mopd_dataplane.jobfile import Stage
from mopd_dataplane.records import Prompt, Sample, sample_uid
from mopd_dataplane.rollout.hf import HfEngine
from mopd_dataplane.rollout.prompts import render
from mopd_dataplane.rollout.report import RolloutReport
from mopd_dataplane.rollout.runner import run_rollout
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.logcopy import StoredLog
from mopd_dataplane.run.prompt_order import iteration_prompts
from mopd_dataplane.run.rows import stage_samples
from mopd_dataplane.store.dataset import Store

WRITER = "engine-0"


def rollout(run: Run, stage: Stage, generation: int, *, follow: bool = False) -> list[RolloutReport]:
    """Sample one iteration of a stage, or finish it: a report of each sampling policy, none where all is in the store.

    The policy is the version the iteration starts from; with `follow` the newest there is, also when a newer one is
    published in the middle.
    """
    prompts = generation_prompts(run, stage, generation)
    _, stored = stage_samples(run.store, stage, generation, ["uid"])
    already = set(stored["uid"].to_pylist())
    samplers = [run.job.sampler_of(stage, prompt.domain, prompt.effort) for prompt in prompts]
    reports = []
    for sampler in dict.fromkeys(samplers):
        own = [prompt for prompt, by in zip(prompts, samplers, strict=True) if by == sampler]
        if not already.issuperset(_uids(run, stage, generation, own)):
            reports.append(_sample(run, stage, generation, sampler, own, already, follow=follow))
    if not reports:
        return []
    seconds, levels = sum(report.seconds for report in reports), {report.level for report in reports}
    name = f"time/{stage.name}/{generation}/rollout"
    detail = {"action": "rollout", "log": "/".join(sorted(levels))}
    run.store.add_event(name, stage.name, "stage_time", generation, seconds, detail)
    return reports


def _sample(
    run: Run, stage: Stage, generation: int, sampler: str, prompts: list[Prompt], already: set[str], *, follow: bool
) -> RolloutReport:
    """Let one policy answer its prompts of an iteration."""
    version = run.policies.latest(stage) if follow else generation
    writer = WRITER if sampler == "self" else f"teacher-{sampler}"
    before = len(already.intersection(_uids(run, stage, generation, prompts)))
    with run.progress.step(stage.name, "rollout", total=len(prompts) * stage.rollout.group_size, unit="samples") as (
        advance,
        report,
    ):
        engine = HfEngine(
            sampling_policy(run, stage, sampler, version),
            slots=run.job.engine.slots,
            policy_version=version,
            dtype=run.job.engine.dtype or run.job.student.dtype,
            threads=run.job.engine.threads,
        )

        def commit(samples: list[Sample]) -> object:
            record_abandoned(run.store, samples)
            return run.store.commit_samples(samples, writer=writer)

        def newest() -> tuple[int, Path]:
            latest = run.policies.latest(stage)
            return latest, sampling_policy(run, stage, sampler, latest)

        def as_the_student_reads_it(prompt: Prompt) -> list[int]:
            return render(prompt.text, run.tokenizer, template=run.job.student.prompt_template)

        def show(done: int, **facts: str) -> None:
            if "notice" in facts:
                run.progress.say(f"{stage.name:<16} rollout  {facts['notice']}")
            else:
                advance(before + done, **facts)

        try:
            done = run_rollout(
                engine,
                prompts,
                stage=stage.name,
                generation=generation,
                seed=run.job.seed,
                rollout=stage.rollout.model_copy(update={"policy": sampler}),
                wal=run.job.wal,
                wal_dir=run.root / "wal",
                commit=commit,
                render=as_the_student_reads_it,
                already=already,
                progress=show,
                policies=lambda wanted: sampling_policy(run, stage, sampler, wanted),
                published=newest if follow and sampler == "self" else None,
                writer=writer,
                copy=StoredLog(run.work.files, stage.name, writer) if run.work.files is not None else None,
            )
        finally:
            engine.close()
        report.facts = _facts(done)
    return done


def generation_prompts(run: Run, stage: Stage, generation: int) -> list[Prompt]:
    """Prompts of one iteration, in admission order."""
    return iteration_prompts(
        run.store.prompts(split="train", domains=run.job.domains_of(stage)),
        count=stage.rollout.prompts_per_iteration,
        generation=generation,
        seed=run.job.seed,
        stage=stage.name,
    )


def generation_uids(run: Run, stage: Stage, generation: int) -> list[str]:
    """uids that one iteration is made of: known before anything is sampled."""
    return _uids(run, stage, generation, generation_prompts(run, stage, generation))


def _uids(run: Run, stage: Stage, generation: int, prompts: list[Prompt]) -> list[str]:
    return [
        sample_uid(run.job.seed, stage.name, prompt.prompt_id, index, generation)
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
            store.add_event(name, sample.run, "abandon", sample.generation, float(sample.response_len), detail)


def _facts(done: RolloutReport) -> dict[str, str]:
    facts = {
        "samples": f"{done.samples:,}",
        "tokens": f"{done.tokens:,}",
        "rate": f"{done.tokens_per_s:,.0f} tokens/s",
        "log": f"{done.level} ({done.filesystem})",
    }
    if done.resumed:
        facts["resumed"] = f"{done.resumed} ({done.exact} exact)"
    if done.weight_changes:
        facts["newer policies"] = f"{done.weight_changes}"
    return facts
