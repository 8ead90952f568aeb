"""Estimates what a job writes to its store: samples and signals, hidden states, policies and checkpoints.

Every answer is taken at its full length. What depends on something that is not known yet is called unknown, with the
reason, and then the sum is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mopd_dataplane.fields import PACK_KINDS
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.model_sizes import ModelSize, Size
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.newest import KEEP

PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES = 4, 13
"""Bytes of a token in the store: its id; of a response also log-prob, loss mask and the teacher's log-prob."""
SAMPLE_BYTES = 1024
"""Bytes of a sample's rows in `samples`, `scores`, `rewards`, `events` and `token_stats`."""
WINDOW_BYTES = 300_000
"""Bytes of the files that describe a window's commits, its plan, its steps and its evaluation."""
REPORT_BYTES = 250_000
"""Bytes of the report."""
CHECKPOINT_NUMBER_BYTES = 12
"""Bytes of a trained number in a checkpoint: float32 weight and two moments of the optimizer."""
Amount = int | str
"""Bytes, or the reason why they are not known."""


@dataclass
class DiskEstimate:
    """Bytes by part of the store."""

    parts: dict[str, Amount] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of what is known."""
        return sum(amount for amount in self.parts.values() if isinstance(amount, int))

    @property
    def unknown(self) -> list[str]:
        """Parts whose bytes are not known."""
        return [name for name, amount in self.parts.items() if isinstance(amount, str)]


@dataclass(frozen=True)
class _Volume:
    """Samples of a stage."""

    samples: int
    prompt_tokens: int
    response_tokens: int
    windows: int


def estimate_disk(
    job: Job,
    student: Size,
    teachers: Mapping[str, Size],
    prompts: Sequence[Prompt],
    store: Store | None,
    adapters: Mapping[str, Amount],
) -> DiskEstimate:
    """Estimate what a job writes.

    teachers: sizes of those with weights. prompts: of every domain, as far as they are known. adapters: parameters of
    the adapter of each stage that trains one.
    """
    sizes = DiskEstimate()
    if not job.student.path:
        sizes.parts["initial student"] = student if isinstance(student, str) else _policy_bytes(job, student)
    scorers = {name for stage in job.stages for teacher in job.scorers_of(stage) for name in job.members_of(teacher)}
    for name in sorted(name for name in scorers if not job.teachers[name].is_remote):  # a remote one has no head here
        size = teachers[name]
        sizes.parts[f"LM head of teacher {name}"] = size if isinstance(size, str) else 4 * size.vocabulary * size.hidden
    sizes.parts["prompts"] = sum(_bytes_of(p.text, p.answer, p.verifier_data, p.messages) for p in prompts)
    for stage in job.stages:
        volume = _volume(job, stage, prompts, store)
        sizes.parts[f"{stage.name} samples and signals"] = (
            volume if isinstance(volume, str) else _sample_bytes(job, stage, volume)
        )
        if "hidden" in job.objective(stage).signals:
            sizes.parts[f"{stage.name} hidden states"] = _hidden_bytes(job, stage, teachers, volume)
        sizes.parts[f"{stage.name} policies and checkpoints"] = _trained_bytes(
            job, stage, student, volume, adapters.get(stage.name)
        )
        if kept := _kept_versions(job, _versions(stage, volume)):
            each = adapters.get(stage.name, student if isinstance(student, str) else student.parameters)
            sizes.parts[f"{stage.name} checkpoints of {kept} earlier versions ([retain])"] = (
                each if isinstance(each, str) else kept * CHECKPOINT_NUMBER_BYTES * each
            )
        if stage.discriminator:
            sizes.parts[f"{stage.name} discriminator"] = "its checkpoints are not estimated"
        if "experts" in stage.rollout.record:
            sizes.parts[f"{stage.name} recorded experts"] = "the model decides how many a token has"
        if any(job.teachers[teacher].tokenizer == "own" for teacher in job.teachers_of(stage)):
            sizes.parts[f"{stage.name} alignments"] = "the number of tokens in the teacher's own tokenizer is not known"
        if other := [kind for kind in stage.score.signals if kind not in PACK_KINDS]:
            sizes.parts[f"{stage.name} signals {', '.join(other)}"] = "the package that adds them decides their size"
    sizes.parts["report"] = REPORT_BYTES
    return sizes


def _bytes_of(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)


def _volume(job: Job, stage: Stage, prompts: Sequence[Prompt], store: Store | None) -> _Volume | str:
    """Samples and tokens of a whole stage; of reference answers a byte counts as a token, which is an upper bound."""
    rollout, domains = stage.rollout, job.domains_of(stage)
    if stage.data == "rollout":
        every = sum(job.domains[name].train for name in domains)
        most = (rollout.prompts_per_iteration or every) * rollout.most_rounds
        samples = most * rollout.group_size * stage.iterations
        prompt, response = samples * rollout.max_prompt_tokens, samples * rollout.max_new_tokens
        return _Volume(samples, prompt, response, _windows(stage, samples, prompt + response))
    if stage.has_stored_samples:
        if stage.sources:
            return "its samples stay in other stores"
        stored = None if store is None else store.table("samples", ["prompt_len", "response_len"], _of(stage))
        if not stored:
            return "its samples are not imported yet"
        lengths = [sum(stored[name].to_pylist()) for name in ("prompt_len", "response_len")]
        return _Volume(0, 0, lengths[1], stage.iterations)  # the samples themselves are there already
    own = [prompt for prompt in prompts if prompt.domain in domains and prompt.split == "train"]
    if not own:
        return "its prompts are not known"
    share = min(1.0, stage.examples / len(own)) if stage.examples else 1.0
    frame = len(job.student.prompt_template) + 1
    prompt_tokens = int(share * sum(_bytes_of(prompt.text) + frame for prompt in own))
    answers = int(share * sum(_bytes_of(prompt.answer) + 1 for prompt in own))
    return _Volume(int(share * len(own)), prompt_tokens, answers, stage.iterations)


def _of(stage: Stage) -> str:
    return f"stage = '{stage.name}'"


def _windows(stage: Stage, samples: int, tokens: int) -> int:
    """Windows of a stage that rolls out, each of which publishes a policy: its iterations, or in a concurrent stage
    its batches."""
    if not stage.concurrent:
        return stage.iterations
    plan = stage.plan
    return -(-samples // plan.batch_samples) if plan.batch_samples else -(-tokens // plan.batch_tokens)


def _sample_bytes(job: Job, stage: Stage, volume: _Volume) -> int:
    each = RESPONSE_TOKEN_BYTES
    if "topk" in job.objective(stage).signals:
        each += 8 * stage.score.topk
    if "sampling_mask" in stage.rollout.record:
        each += 4 * stage.rollout.top_k
    tokens = PROMPT_TOKEN_BYTES * volume.prompt_tokens + each * volume.response_tokens
    return tokens + SAMPLE_BYTES * volume.samples + WINDOW_BYTES * volume.windows


def _hidden_bytes(job: Job, stage: Stage, teachers: Mapping[str, Size], volume: _Volume | str) -> Amount:
    """Hidden states of a stage, as many at a time as `retain` keeps."""
    from mopd_kernels.codecs import row_bytes

    if isinstance(volume, str):
        return volume
    widest = 0
    for name in job.teachers_of(stage):
        for member in job.members_of(name):
            size = teachers[member]
            if isinstance(size, str):
                return f"the width of teacher {member} is not known: {size}"
            widest = max(widest, size.hidden)
    windows = volume.windows
    if job.retain.hidden_passes:
        windows = min(windows, 1 + stage.plan.max_staleness)
    if job.retain.hidden_versions:
        windows = min(windows, 1 + job.retain.hidden_versions)
    return row_bytes(stage.score.hidden_codec, widest) * volume.response_tokens * windows // max(volume.windows, 1)


def _policy_bytes(job: Job, student: ModelSize) -> int:
    return student.parameters * (2 if job.student.dtype == "bfloat16" else 4) + student.other_files


def _trained_bytes(job: Job, stage: Stage, student: Size, volume: _Volume | str, adapter: Amount | None) -> Amount:
    """Every policy version of a stage, and the checkpoints that are kept of it."""
    if isinstance(student, str):
        return f"the student's size is not known: {student}"
    if isinstance(volume, str) and stage.concurrent:
        return volume
    versions = _versions(stage, volume)
    checkpoint = _checkpoints(stage, volume, versions) * CHECKPOINT_NUMBER_BYTES
    versions = _stored_versions(job, versions)
    if adapter is None:
        return versions * _policy_bytes(job, student) + checkpoint * student.parameters
    if isinstance(adapter, str):
        return f"the adapter's size is not known: {adapter}"
    merged = _policy_bytes(job, student) if stage.train.lora.merge == "end" else 0
    return versions * (4 * adapter + student.other_files) + checkpoint * adapter + merged


def _versions(stage: Stage, volume: _Volume | str) -> int:
    return stage.iterations if isinstance(volume, str) else volume.windows


def _checkpoints(stage: Stage, volume: _Volume | str, versions: int) -> int:
    """Checkpoints that are there in the end: those of the last versions, and of those inside of windows one that is
    among the newest."""
    inside = 0
    if not isinstance(volume, str) and volume.samples and stage.plan.batch_samples:
        steps = stage.train.epochs * math.ceil(volume.samples / volume.windows / stage.plan.batch_samples)
        inside = int(steps > stage.train.checkpoint_steps)
    return min(versions, KEEP) + inside


def _stored_versions(job: Job, versions: int) -> int:
    """Policy versions that `retain` leaves, at most."""
    most = job.retain.policies
    return min(versions, max(most, KEEP) + _kept_versions(job, versions)) if most else versions


def _kept_versions(job: Job, versions: int) -> int:
    """Versions besides the last ones whose checkpoints `retain` keeps, at most: the best may be among the others."""
    every, earlier = job.retain.checkpoints_every, max(0, versions - KEEP)
    regular = len(range(every, earlier + 1, every)) if every else 0
    return min(earlier, regular + job.retain.best_checkpoints)
