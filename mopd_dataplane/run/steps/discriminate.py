"""The discriminator of a stage: trained online on a teacher's text and the student's answers (GAD).

    window g:  rollout -> pairs (teacher text, student text) of each prompt -> version g + 1 -> its score is the reward

Versions lie in `discriminators/<stage>/v<g>`. A version is a function of the one before and the window's samples, and
the rewards of a window are one commit, so a run that was killed anywhere continues with the same bits.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.devices import free_device_memory, resolve_device
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import Rows, stage_samples
from mopd_dataplane.score.discriminator import WEIGHTS, Discriminator, Pair


def answered_by_teacher(run: Run, stage: Stage, source: str, prompts: list[Prompt | None]) -> list[Prompt | None]:
    """Prompts that have a text of the teacher, with which answers are compared; None of deleted prompts stay.

    Raises MismatchError when none has.
    """
    if source == "reference":
        return prompts
    _, samples = stage_samples(run.store, run.job.stage(source), None, ["prompt_id"])
    answered = set(samples["prompt_id"].to_pylist())
    answered_prompts = [prompt for prompt in prompts if prompt is None or prompt.prompt_id in answered]
    if not any(answered_prompts):
        raise MismatchError(
            f"stage {stage.name!r}: discriminator.text = {source!r}, but that stage has answered no prompt of these "
            f"domains; run it first: mopd run JOB --stage {source}"
        )
    return answered_prompts


def discriminate(run: Run, stage: Stage, window: int) -> dict[str, float]:
    """Train the discriminator on a window's samples, and reward them with it; nothing when that was done before.

    Returns {"rewards": count, "loss", "accuracy"}.
    """
    settings = stage.discriminator
    assert settings is not None
    rows, samples = _by_uid(*stage_samples(run.store, stage, window, ["uid", "prompt_id"]))
    scored = run.store.table("rewards", ["sample_row"], filter=f"verifier = '{stage.verifier}'")
    if np.isin(rows, scored["sample_row"].to_numpy()).all():
        return {"rewards": 0.0}
    students = _tokens(run, rows)
    teachers = _teacher_texts(run, stage, settings.text)
    answers = zip(samples["prompt_id"].to_pylist(), students, strict=True)
    pairs = [Pair(teachers[prompt], text) for prompt, text in answers if prompt in teachers]  # others were deleted
    free_device_memory()
    device = resolve_device(stage.score.device)
    critic = Discriminator(run.policies.start(stage), settings, seed=run.job.seed, device=device)
    before, after = (f"discriminators/{stage.name}/v{version}" for version in (window, window + 1))
    epochs = settings.epochs + (0 if window else settings.warmup_epochs)
    facts: dict[str, float] = {}
    total = epochs * -(-len(pairs) // settings.batch_pairs)
    with run.progress.step(stage.name, "discriminate", total=total, unit="updates") as (advance, report):
        if run.work.fetch(after):
            critic.load(run.root / after)
        else:
            if window:
                run.work.fetch(before)
                critic.load(run.root / before)
            done = critic.steps
            facts = critic.update(pairs, epochs=epochs, progress=lambda steps: advance(steps - done))
            critic.save(run.root / after)
            run.work.publish(after)
        scores = critic.scores(students)
        _store(run, stage, rows, samples["uid"].to_pylist(), scores, run.root / after)
        report.facts = {name: f"{value:.3f}" for name, value in facts.items()}
    for name, value in facts.items():
        event = f"discriminator/{stage.name}/{window}/{name}"
        run.store.add_event(event, stage.name, "discriminator", window, value, {"measure": name})
    return {"rewards": float(len(rows)), **facts}


def _by_uid(rows: Rows, samples: pa.Table) -> tuple[Rows, pa.Table]:
    order = np.argsort(samples["uid"].to_pylist())
    return rows[order], samples.take(order)


def _store(run: Run, stage: Stage, rows: Rows, uids: list[str], scores: NDArray[np.float32], version: Path) -> None:
    """One commit for the whole window: scores of one forward pass differ in their last bits from those of another."""
    digest = file_digest(version / WEIGHTS)[:12]
    said = {"verifier": stage.verifier, "verifier_version": f"{version.name}@{digest}"}
    run.store.add_rewards(
        {"uid": uid, "sample_row": int(row), "reward": float(score), **said}
        for uid, row, score in zip(uids, rows, scores, strict=True)
    )


def _teacher_texts(run: Run, stage: Stage, source: str) -> dict[str, NDArray[np.int64]]:
    """Prompt and teacher text of each prompt, as the student's tokens; of several answers the first by uid."""
    if source != "reference":
        rows, samples = _by_uid(*stage_samples(run.store, run.job.stage(source), None, ["uid", "prompt_id"]))
        named = zip(samples["prompt_id"].to_pylist(), _tokens(run, rows), strict=True)
        return dict(reversed(list(named)))  # the first comes last, and stays
    texts = {}
    for prompt in run.store.prompts(split="train", domains=run.job.domains_of(stage)):
        prompt_ids, response_ids = run.answer_ids(prompt, prompt.answer)
        texts[prompt.prompt_id] = np.array([*prompt_ids, *response_ids], np.int64)
    return texts


def _tokens(run: Run, rows: Rows) -> list[NDArray[np.int64]]:
    """[P + R] tokens of each sample."""
    token_lists = run.store.read_tokens(rows, columns=["tokens"])["tokens"]
    return [tokens.values.to_numpy().astype(np.int64) for tokens in token_lists]
