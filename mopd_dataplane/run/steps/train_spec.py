"""What the trainer of a window is told: policy, data, objective, teachers' heads, schedule."""

from __future__ import annotations

import math
from pathlib import Path

from mopd_dataplane.job import memory_advice
from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.chat_template import thought_ids
from mopd_dataplane.models.hf import model_shape
from mopd_dataplane.models.hub import is_hub_name
from mopd_dataplane.run.changes import last_change, next_change
from mopd_dataplane.run.check_texts import check_texts
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.exactness import has_self_check, sampling_of
from mopd_dataplane.train.node_agent import node_count
from mopd_dataplane.train.spec import HeadFile, Sampling, TrainSpec

WINDOW_DEADLINE_S = 7 * 86400.0
"""A trainer waits for its next window as long as this process lives; the loader ends with it, and tells."""


def train_spec(run: Run, stage: Stage, window: int, *, checkpoints: Path, scratch: Path, samples: int) -> TrainSpec:
    """Settings of a trainer that begins with a window.

    run, stage: as they are at that window. checkpoints: folder of the stage's checkpoints. scratch: folder of the
    loader's socket. samples: as for Training.
    """
    student, objective = run.job.student, run.job.objective(stage)
    from_hub = stage.start == "init" and is_hub_name(student.path)
    return TrainSpec(
        stage=stage.name,
        start=str(run.policies.start(stage)),
        hub_name=student.path if from_hub else "",
        hub_revision=student.revision if from_hub else "",
        policy_dir=str(run.policies.stage_folder(stage)),
        checkpoint_dir=str(checkpoints),
        checkpoints_every=run.job.retain.checkpoints_every,
        socket=str(scratch / "loader.sock"),
        train=stage.train,
        objective=objective,
        heads=_head_files(run, stage),
        teachers=run.job.teachers_of(stage),
        thought=thought_ids(run.tokenizer, objective.thought) if objective.leaves_thoughts_out else None,
        sampling=sampling_at(run, stage),
        check_texts=_check_texts(run, stage),
        total_steps=_steps_expected(run, stage, window, samples),
        end_window=next_change(run.changes, stage.name, window),
        seed=run.job.seed,
        dtype=run.job.student.dtype,
        temperature=stage.rollout.temperature or 1.0,
        max_new_tokens=stage.rollout.max_new_tokens,
        less_memory=memory_advice.for_training(stage),
        deadline_s=run.job.load.deadline_s,
        window_deadline_s=WINDOW_DEADLINE_S,
        context_parallel=run.job.scale.context_parallel,
        rank_deadline_s=run.job.scale.rank_deadline_s,
        rendezvous=str(scratch / "rendezvous") if node_count() == 1 else "",
    )


def sampling_at(run: Run, stage: Stage) -> Sampling | None:
    """How the samples of a stage were drawn, with which the trainer compares its own log-probs; None where it cannot.

    run, stage: as they are at the window that is trained.
    """
    if run.store.deletions.names():  # a window that was planned again gives a policy other weights than sampled
        return None
    return sampling_of(run.job, stage, model_shape(run.policies.start(stage)))


def _check_texts(run: Run, stage: Stage) -> tuple[tuple[int, ...], ...]:
    """Texts for the trainer's self-check; none where one is recorded."""
    if has_self_check(run.store, stage.name, "trainer"):
        return ()
    return tuple(tuple(text.tolist()) for text in check_texts(run, stage))


def _head_files(run: Run, stage: Stage) -> dict[str, HeadFile]:
    """The LM head of each teacher that has one in the store."""
    stored = run.store.teachers()
    heads = {}
    for name in run.job.teachers_of(stage):
        if name in stored and (file := stored[name].head_file):
            run.work.fetch_file(file)
            heads[name] = HeadFile(path=str(run.root / file), digest=stored[name].head_digest)
    return heads


def _steps_expected(run: Run, stage: Stage, window: int, samples: int) -> int:
    """Optimizer steps of the whole stage, for a schedule that decays: those before the last change of the job, then as
    many for every window as for the first one behind it."""
    start = last_change(run.changes, stage.name, window)
    first = run.store.plan(stage.name, start)
    if first is None:
        return 0
    trained = samples * stage.train.epochs
    windows = math.ceil(trained / len(first.sample_rows)) if trained else stage.iterations - start
    steps = len(first.step_starts) - 1
    if stage.plan.replay and not first.stats.get("replayed"):  # nothing older was there yet
        steps = math.ceil(steps / (1 - stage.plan.replay.share))
    return run.store.steps_before(stage.name, start) + steps * windows
