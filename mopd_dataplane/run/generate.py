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
from mopd_dataplane.run.prompt_order import iteration_prompts
from mopd_dataplane.run.rows import stage_samples
from mopd_dataplane.store.dataset import Store

WRITER = "engine-0"


def rollout(run: Run, stage: Stage, generation: int, *, follow: bool = False) -> RolloutReport | None:
    """Sample one iteration of a stage, or finish it; None when every sample of it is in the store.

    The policy is the version the iteration starts from; with `follow` the newest there is, also when a newer one is
    published in the middle.
    """
    prompts = generation_prompts(run, stage, generation)
    _, stored = stage_samples(run.store, stage, generation, ["uid"])
    already = set(stored["uid"].to_pylist())
    if len(already) == len(prompts) * stage.rollout.group_size:
        return None
    version = run.policies.latest(stage) if follow else generation
    with run.progress.step(stage.name, "rollout", total=len(prompts) * stage.rollout.group_size, unit="samples") as (
        advance,
        report,
    ):
        engine = HfEngine(
            sampling_policy(run, stage, version),
            slots=run.job.engine.slots,
            policy_version=version,
            dtype=run.job.student.dtype,
            threads=run.job.engine.threads,
        )

        def commit(samples: list[Sample]) -> object:
            record_abandoned(run.store, samples)
            return run.store.commit_samples(samples, writer=WRITER)

        def newest() -> tuple[int, Path]:
            latest = run.policies.latest(stage)
            return latest, sampling_policy(run, stage, latest)

        def as_the_student_reads_it(prompt: Prompt) -> list[int]:
            return render(prompt.text, run.tokenizer, template=run.job.student.prompt_template)

        def show(done: int, **facts: str) -> None:
            if "notice" in facts:
                run.progress.say(f"{stage.name:<16} rollout  {facts['notice']}")
            else:
                advance(len(already) + done, **facts)

        try:
            done = run_rollout(
                engine,
                prompts,
                stage=stage.name,
                generation=generation,
                seed=run.job.seed,
                rollout=stage.rollout,
                wal=run.job.wal,
                wal_dir=run.root / "wal",
                commit=commit,
                render=as_the_student_reads_it,
                already=already,
                progress=show,
                policies=lambda wanted: sampling_policy(run, stage, wanted),
                published=newest if follow and stage.rollout.policy == "self" else None,
                writer=WRITER,
            )
        finally:
            engine.close()
        report.facts = _facts(done)
    name = f"time/{stage.name}/{generation}/rollout"
    run.store.add_event(
        name, stage.name, "stage_time", generation, report.seconds, {"action": "rollout", "log": done.level}
    )
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
    return [
        sample_uid(run.job.seed, stage.name, prompt.prompt_id, index, generation)
        for prompt in generation_prompts(run, stage, generation)
        for index in range(stage.rollout.group_size)
    ]


def sampling_policy(run: Run, stage: Stage, version: int) -> Path:
    """Weights that sample: the stage's own policy of that version, or a teacher (off-policy data)."""
    if stage.rollout.policy == "self":
        return run.policies.folder(stage, version)
    return run.policies.teacher(stage.rollout.policy, stage)


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
