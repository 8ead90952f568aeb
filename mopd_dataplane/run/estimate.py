"""Estimates what a job takes, before the real run: tokens, memory and disk, and shows prompts as its models read them.

Everything here follows from the job file, model configs and prompts, with every answer at its full length. What does
not fit becomes an uncertain finding with the key that changes it. What cannot be known yet is called unknown, with the
reason; activations are not counted.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mopd_dataplane.base.memory import available_memory
from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.sections import Train
from mopd_dataplane.models.devices import free_memory, resolve_device
from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import given_tokenizer
from mopd_dataplane.prompts import render
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.kinds import engine_kind
from mopd_dataplane.run.adapter_check import adapter_parameters, rate_problem
from mopd_dataplane.run.disk_estimate import Amount, DiskEstimate, estimate_disk
from mopd_dataplane.run.model_sizes import ModelSize, Size, student_size, teacher_size
from mopd_dataplane.run.preflight import Finding
from mopd_dataplane.score.engines import SCORING
from mopd_dataplane.store.dataset import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOKED_AT = 512
"""Prompts of a domain whose length is measured."""
SHOWN = 600
"""Characters of a rendered prompt."""
RATED = ("rollout", "score", "train")
"""Steps whose time is estimated, as `mopd show` names them."""
TRAINED = 16
"""Bytes a parameter takes in training: float32 weight, gradient and two optimizer moments."""


@dataclass
class Estimate:
    """Estimates of a job, formatted for display; `findings` lists what does not fit."""

    models: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    time: dict[str, str] = field(default_factory=dict)
    """Duration by step, of those whose rate was given."""
    memory: dict[str, str] = field(default_factory=dict)
    disk: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def doubt(self, key: str, problem: str) -> None:
        """Add a finding that does not stop the job."""
        self.findings.append(Finding(key, problem, certain=False))


def estimate(job: Job, prompts: dict[str, list[Prompt]], rates: Mapping[str, float] = MappingProxyType({})) -> Estimate:
    """Estimate what a job takes. Loads no weights, writes nothing.

    prompts: of the domains whose prompts are known. rates: response tokens a second of some of RATED.
    """
    result = Estimate()
    store = _store(job)
    student = student_size(job, store)
    teachers = {name: teacher_size(job, name, student) for name, teacher in job.teachers.items() if teacher.source}
    for name, size in {"student": student, **teachers}.items():
        result.models[name] = f"unknown: {size}" if isinstance(size, str) else _model_size(size.parameters)
    _prompts(result, job, prompts)
    for stage in job.stages:
        _tokens(result, job, stage)
        _memory(result, job, stage, student, teachers)
    every = [] if store is None else store.prompts()
    every += [prompt for own in prompts.values() for prompt in own]
    adapters = {stage.name: _adapter(job, stage) for stage in job.stages if stage.train.lora.r}
    _disk(result, job, estimate_disk(job, student, teachers, every, store, adapters))
    _time(result, job, rates)
    return result


def _store(job: Job) -> Store | None:
    """The job's store; None where there is none, or it cannot be opened, which the preflight says."""
    try:
        return Store.find(job.store)
    except MopdError:
        return None


def training_bytes(parameters: int, train: Train, *, dtype: str = "float32", adapter: int = 0) -> tuple[int, int]:
    """(bytes on the device, bytes on the host) of weights, gradients and optimizer state; activations apart.

    parameters: of the model; adapter: of the adapter that is trained instead where `train.lora` asks for one. dtype: of
    the forward pass. Where that is bfloat16, what is trained in float32 has a copy in it.

    >>> training_bytes(1_000, Train()), training_bytes(1_000, Train(offload=True), dtype="bfloat16")
    ((16000, 0), (2000, 16000))
    """
    width, copy = (2, 2) if dtype == "bfloat16" else (4, 0)
    hosted = TRAINED if train.offload else 0
    if train.lora.r:
        return width * parameters + (4 if train.offload else TRAINED) * adapter + copy * adapter, hosted * adapter
    if train.offload:
        return width * parameters, hosted * parameters
    return (TRAINED if train.master_weights else TRAINED + copy) * parameters, 0


def _tokenizer(job: Job) -> PreTrainedTokenizerBase | None:
    student = job.student
    try:
        if student.config:
            return given_tokenizer(student)
        return load_tokenizer(model_folder(student.path, student.revision)) if student.path else None
    except MopdError:
        return None


def _prompts(result: Estimate, job: Job, prompts: dict[str, list[Prompt]]) -> None:
    """Templates on real prompts, and the longest sample against the packs."""
    tokenizer = _tokenizer(job)
    if tokenizer is None:
        return
    longest = 0
    for name, own in prompts.items():
        if not own:
            continue
        step = max(1, len(own) // LOOKED_AT)
        said = result.prompts[name] = {}
        try:
            lengths = [len(_read(job, prompt, tokenizer)) for prompt in own[::step]]
            said["student reads"] = _text(tokenizer, _read(job, own[0], tokenizer))
        except Exception:  # a chat template is a program: it may raise anything, and the preflight says so
            continue
        for teacher in dict.fromkeys(t for stage in job.stages for t in _scoring(job, stage, name)):
            if template := job.teachers[teacher].prompt_template:
                try:
                    ids = render(own[0].asked, tokenizer, template=template, context=own[0].teacher_context)
                    said[f"{teacher} reads"] = _text(tokenizer, ids)
                except Exception as error:
                    problem = (
                        f"fails on prompt {own[0].prompt_id!r}: {error!s:.200}; correct the template or the prompt"
                    )
                    result.findings.append(Finding(f"teachers.{teacher}.prompt_template", problem))
        longest = max(longest, *lengths)
        said["longest"] = f"{max(lengths)} tokens, of {len(lengths):,} prompts"
    for stage in job.stages:
        most = longest + stage.rollout.max_new_tokens
        if stage.data == "rollout" and most > stage.plan.pack_tokens and stage.plan.overlong == "error":
            result.doubt(
                f"stages.{stage.name}.plan.pack_tokens",
                f"a sample may have {most:,} tokens, a pack holds {stage.plan.pack_tokens:,}, and "
                'overlong = "error" stops at the first that is longer; raise it, or set overlong = "drop"',
            )


def _read(job: Job, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return render(prompt.asked, tokenizer, template=job.student.prompt_template)


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return f"{tokenizer.decode(list(ids))!r:.{SHOWN}} ({len(ids)} tokens)"


def _scoring(job: Job, stage: Stage, domain: str) -> list[str]:
    if domain not in job.domains_of(stage) or not job.objective(stage).signals:
        return []
    return [job.teacher_of(stage, domain, job.domains[domain].effort)]


def _samples(job: Job, stage: Stage) -> int:
    """Samples of one iteration, the most where further prompts may follow."""
    every = sum(job.domains[name].train for name in job.domains_of(stage))
    if stage.data != "rollout":
        return min(stage.examples or every, every)
    return (stage.rollout.prompts_per_iteration or every) * stage.rollout.most_rounds * stage.rollout.group_size


def _most_tokens(job: Job, stage: Stage) -> int:
    """Response tokens of a whole stage, every answer as long as it may be."""
    rounds = stage.iterations if stage.data == "rollout" else 1
    return _samples(job, stage) * rounds * stage.rollout.max_new_tokens


def _tokens(result: Estimate, job: Job, stage: Stage) -> None:
    if stage.data == "rollout":
        samples = f"{'up to ' if stage.rollout.until else ''}{_samples(job, stage):,} samples"
        result.tokens[stage.name] = f"{stage.iterations:,} x {samples}, at most {_most_tokens(job, stage):,} tokens"
    else:
        result.tokens[stage.name] = f"{_samples(job, stage):,} stored answers"


def _time(result: Estimate, job: Job, rates: Mapping[str, float]) -> None:
    """Seconds of steps at given rates when every answer is as long as it may be; what is stored is not counted."""
    total = 0.0
    for stage in job.stages:
        if stage.data != "rollout":
            continue
        for step, rate in rates.items():
            if step == "score" and not job.objective(stage).signals:
                continue
            seconds = _most_tokens(job, stage) / rate
            result.time[f"{stage.name} {step}"] = f"at most {_duration(seconds)} at {rate:,g} tokens/s"
            total += seconds
    if result.time:
        result.time["all"] = f"at most {_duration(total)}"
        missing = [step for step in RATED if step not in rates]
        if missing:
            result.time["all"] += f", without {' and '.join(missing)}, whose rate was not given"


def _memory(result: Estimate, job: Job, stage: Stage, student: Size, teachers: Mapping[str, Size]) -> None:
    """Weights, keys and values, optimizer state of each step, each against what its device has free."""
    if not isinstance(student, str):
        _rollout_memory(result, job, stage, student)
    _score_memory(result, job, stage, teachers)
    if isinstance(student, str):
        steps = ["train", *["rollout"] * (stage.data == "rollout")]
        result.memory |= {f"{stage.name} {step}": f"unknown: {student}" for step in sorted(steps)}
        return
    adapter = _adapter(job, stage) if stage.train.lora.r else 0
    if isinstance(adapter, str):
        result.memory[f"{stage.name} train"] = f"unknown: {adapter}"
        return
    trained, hosted = training_bytes(student.parameters, stage.train, dtype=job.student.dtype, adapter=adapter)
    on_cpu = hosted and _local_device(stage.train.device) == "cpu"
    here = (trained + hosted if on_cpu else trained) // job.scale.ranks
    _fits(result, f"{stage.name} train", stage.train.device, here, "scale.ranks")
    if hosted and not on_cpu:
        _fits(result, f"{stage.name} train, host", "cpu", hosted, "train.offload")
    if problem := rate_problem(stage, student.hidden, pretrained=not job.student.config):
        result.doubt(f"stages.{stage.name}.train.learning_rate", problem)


def _rollout_memory(result: Estimate, job: Job, stage: Stage, student: ModelSize) -> None:
    width = 2 if (job.engine.dtype or job.student.dtype) == "bfloat16" else 4
    rollout = stage.rollout
    longest = min(rollout.max_prompt_tokens + rollout.max_new_tokens, student.context or 1 << 31)
    cache = job.engine.slots * longest * student.kv_bytes * width // 2
    if stage.data == "rollout" and engine_kind(job.engine.kind).here:
        _fits(result, f"{stage.name} rollout", job.engine.device, student.parameters * width + cache, "engine.slots")


def _score_memory(result: Estimate, job: Job, stage: Stage, teachers: Mapping[str, Size]) -> None:
    """The largest teachers of a stage, as many as are in memory together."""
    names = {member for name in job.teachers_of(stage) for member in job.members_of(name)}
    if not names or not SCORING[stage.score.engine].here:
        return
    sizes = []
    for name in sorted(names):
        size = teachers[name]
        if isinstance(size, str):
            result.memory[f"{stage.name} score"] = f"unknown: {size}"
            return
        sizes.append(size.parameters * (2 if job.teachers[name].dtype == "bfloat16" else 4))
    need = sum(sorted(sizes, reverse=True)[: stage.score.max_resident])
    _fits(result, f"{stage.name} score", stage.score.device, need, "score.max_resident")


def _adapter(job: Job, stage: Stage) -> Amount:
    """Numbers in a stage's adapter, or the reason why they are not known."""
    try:
        return adapter_parameters(job, stage.train.lora) or "the student's shape, or the package peft, is missing"
    except MopdError as error:
        return str(error)


def _local_device(device: str) -> str:
    """A job's device on this machine; empty where it has none, which the preflight says."""
    try:
        return resolve_device(device)
    except MopdError:
        return ""


def _fits(result: Estimate, what: str, device: str, need: int, key: str) -> None:
    where = _local_device(device)
    if not where:
        return
    free = available_memory() if where == "cpu" else free_memory(where)
    result.memory[what] = f"{_size(need)} on {where}, {_size(free)} free"
    if need > free:
        result.doubt(key, f"{what} needs about {_size(need)} on {where}, which has {_size(free)} free; change {key}")


def _disk(result: Estimate, job: Job, disk: DiskEstimate) -> None:
    """What the job writes, against the room beside the store."""
    for name, amount in disk.parts.items():
        result.disk[name] = f"unknown: {amount}" if isinstance(amount, str) else f"about {_size(amount)}"
    missing = f", without {', '.join(disk.unknown)}" if disk.unknown else ""
    result.disk["all"] = f"{'at least' if missing else 'about'} {_size(disk.total)}{missing}"
    if "://" in job.store:
        return
    folder = Path(job.store).absolute()
    existing = next(folder for folder in (folder, *folder.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    result.disk["free"] = f"{_size(free)} at {existing}"
    if disk.total > free:
        result.doubt(
            "store",
            f"may grow to {_size(disk.total)}, {existing} has {_size(free)} free; set retain.hidden_passes = 1, a "
            "smaller "
            "score.hidden_codec or rollout.max_new_tokens, or another store",
        )


def _size(count: int) -> str:
    """A number of bytes with a unit.

    >>> _size(1_500_000_000), _size(377_000_000), _size(90_000)
    ('1.5 GB', '377 MB', '0.1 MB')
    """
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{max(count / 1e6, 0.1):.1f} MB"


def _duration(seconds: float) -> str:
    """A duration with a unit.

    >>> _duration(40), _duration(600), _duration(9_000), _duration(400_000)
    ('40 s', '10 min', '2.5 h', '4.6 days')
    """
    for unit, name, form in ((86_400, "days", ".1f"), (3_600, "h", ".1f"), (60, "min", ".0f")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:{form}} {name}"
    return f"{seconds:.0f} s"


def _model_size(count: int) -> str:
    """Parameters of a model with a unit.

    >>> _model_size(1_110_000), _model_size(7_600_000_000)
    ('1.11 M parameters', '7.6 B parameters')
    """
    return f"{count / 1e9:.3g} B parameters" if count >= 1e9 else f"{count / 1e6:.3g} M parameters"
