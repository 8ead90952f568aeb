"""Records how exact the models of a run are: their self-checks, and the trainer's log-probs beside the sampler's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.models.self_check import SelfCheck
from mopd_dataplane.records import StepMetrics
from mopd_dataplane.run.event_batch import EventBatch
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.sampler_gap import SELF_CHECK, Gap, allowed_gap, gap_problem
from mopd_dataplane.train.spec import Sampling


def record_self_check(store: Store, stage: str, part: str, passed: SelfCheck, *, teacher: str = "") -> None:
    """Record the self-check of a stage's sampler, trainer or a teacher, once for each dtype."""
    name = "/".join(filter(None, ("self_check", stage, part, teacher, passed.dtype)))
    detail = {"part": part, "teacher": teacher, **{key: value for key, value in asdict(passed).items() if key != "gap"}}
    store.add_event(name, stage, "self_check", -1, passed.gap, detail)


def has_self_check(store: Store, stage: str, part: str, *, teacher: str = "") -> bool:
    """Whether a stage's sampler, trainer or one of its teachers has passed a self-check."""
    rule = f"kind = 'self_check' AND stage = '{stage}'"
    details = [json.loads(text) for text in store.table("events", ["detail"], filter=rule)["detail"].to_pylist()]
    return any((detail["part"], detail["teacher"]) == (part, teacher) for detail in details)


def record_trainers_self_check(store: Store, stage: str, folder: Path) -> None:
    """Record the self-check that a stage's trainer has left beside its checkpoints, if it has."""
    file = folder / SELF_CHECK
    if file.is_file():
        record_self_check(store, stage, "trainer", SelfCheck(**json.loads(file.read_text())))


def sampling_of(job: Job, stage: Stage, shape: dict[str, object]) -> Sampling | None:
    """How the samples of a stage were drawn; None where the trainer cannot find the sampler's log-probs again.

    That is so for text that the stage's own policy did not write alone, for cuts without recorded masks, at temperature
    0, and where dropout changes the trainer's policy. shape: config of the policy.
    """
    rollout, train = stage.rollout, stage.train
    own = stage.data == "rollout" and rollout.policy == "self" and rollout.student_share == 1
    is_cut = (rollout.top_k > 0 or rollout.top_p < 1) and "sampling_mask" not in rollout.record
    drops = train.dropout or train.lora.dropout > 0
    if not own or rollout.teacher_mix > 0 or rollout.temperature == 0 or is_cut or drops:
        return None
    return Sampling(
        engine=job.engine.kind,
        dtype=job.engine.dtype or job.student.dtype,
        served=bool(job.engine.url),
        routes=any("expert" in key for key in shape),
        records_experts="experts" in rollout.record,
    )


def record_sampler_gap(events: EventBatch, first: StepMetrics, sampling: Sampling, *, dtype: str) -> str:
    """Record a window's comparison with the sampler, from the metrics of its first step.

    Returns a warning when the difference is above its band, else an empty text.
    """
    gap = Gap.of_metrics(first.extra)
    if gap is None:
        return ""
    warning = gap_problem(gap, sampling, stage=first.stage, policy_version=first.policy_version, dtype=dtype)
    detail = {
        **{name: value for name, value in asdict(gap).items() if name != "mean"},
        "band": allowed_gap(sampling, dtype),
        "engine": sampling.engine,
        "sampler_dtype": sampling.dtype,
        "dtype": dtype,
        "policy_version": first.policy_version,
        "warning": warning,
    }
    events.add(f"sampler_gap/{first.stage}/{first.window}", first.stage, "sampler_gap", first.window, gap.mean, detail)
    return warning
