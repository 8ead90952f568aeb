"""Estimates what a job takes, before the real run: tokens, memory and disk, and shows prompts as its models read them.

Everything here is an upper bound from the job file, model configs and prompts, with every answer at its full length.
What does not fit becomes an uncertain finding with the key that changes it; activations are not counted.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.sections import Train
from mopd_dataplane.load.ring import available_memory
from mopd_dataplane.models.adapter_files import weights_folder
from mopd_dataplane.models.devices import free_memory, resolve_device
from mopd_dataplane.models.hf import load_tokenizer, model_shape
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import given_tokenizer
from mopd_dataplane.prompts import render
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.kinds import engine_kind
from mopd_dataplane.run.adapter_check import adapter_parameters, empty_student, rate_problem
from mopd_dataplane.run.preflight import Finding
from mopd_dataplane.score.engines import SCORING

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
TOKEN_BYTES = 13
"""A sampled token in the store: id, log-prob, mask, teacher log-prob."""


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


@dataclass(frozen=True)
class _Shape:
    """Sizes of a model, from its config and the headers of its weights."""

    parameters: int
    hidden: int
    kv_bytes: int
    """Bytes of one token's keys and values in bfloat16."""
    context: int


def estimate(job: Job, prompts: dict[str, list[Prompt]], rates: Mapping[str, float] = MappingProxyType({})) -> Estimate:
    """Estimate what a job takes. Loads no weights, writes nothing.

    prompts: of the domains whose prompts are known. rates: response tokens a second of some of RATED.

    A model that cannot be looked at (made later by a stage, or missing, which the preflight says) is left out.
    """
    found = Estimate()
    student = _student(job)
    own = {
        name: student if teacher.of_this_job else _folder_shape(teacher.source, teacher.revision)
        for name, teacher in job.teachers.items()
        if teacher.source
    }
    for name, shape in {"student": student, **own}.items():
        found.models[name] = "not known yet" if shape is None else _model_size(shape.parameters)
    _prompts(found, job, prompts)
    for stage in job.stages:
        _tokens(found, job, stage)
        _memory(found, job, stage, student, own)
    _disk(found, job, student, own)
    _time(found, job, rates)
    return found


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


def _student(job: Job) -> _Shape | None:
    if job.student.path:
        return _folder_shape(job.student.path, job.student.revision)
    try:
        model = empty_student(job)
    except (MopdError, ValueError, TypeError, KeyError):
        return None
    return (
        None if model is None else _shape(model.config.to_dict(), sum(weight.numel() for weight in model.parameters()))
    )


def _folder_shape(place: str, revision: str) -> _Shape | None:
    try:
        folder = model_folder(place, revision)
        return _shape(model_shape(folder), sum(map(_parameters, weights_folder(folder).glob("*.safetensors"))))
    except (MopdError, OSError, ValueError, LookupError):
        return None


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    with file.open("rb") as stored:
        header = json.loads(stored.read(int.from_bytes(stored.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _shape(config: dict[str, Any], parameters: int) -> _Shape:
    def first(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head") or 1
    width = first("head_dim") or hidden // heads
    layers = first("num_hidden_layers", "n_layer")
    return _Shape(
        parameters, hidden, 2 * 2 * layers * (first("num_key_value_heads") or heads) * width,
        first("max_position_embeddings", "n_positions"),
    )  # fmt: skip


def _tokenizer(job: Job) -> PreTrainedTokenizerBase | None:
    student = job.student
    try:
        if student.config:
            return given_tokenizer(student)
        return load_tokenizer(model_folder(student.path, student.revision)) if student.path else None
    except MopdError:
        return None


def _prompts(found: Estimate, job: Job, prompts: dict[str, list[Prompt]]) -> None:
    """Templates on real prompts, and the longest sample against the packs."""
    tokenizer = _tokenizer(job)
    if tokenizer is None:
        return
    longest = 0
    for name, own in prompts.items():
        if not own:
            continue
        step = max(1, len(own) // LOOKED_AT)
        said = found.prompts[name] = {}
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
                    found.findings.append(Finding(f"teachers.{teacher}.prompt_template", problem))
        longest = max(longest, *lengths)
        said["longest"] = f"{max(lengths)} tokens, of {len(lengths):,} prompts"
    for stage in job.stages:
        most = longest + stage.rollout.max_new_tokens
        if stage.data == "rollout" and most > stage.plan.pack_tokens and stage.plan.overlong == "error":
            found.doubt(
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
    """Samples of one iteration."""
    every = sum(job.domains[name].train for name in job.domains_of(stage))
    if stage.data != "rollout":
        return min(stage.examples or every, every)
    return (stage.rollout.prompts_per_iteration or every) * stage.rollout.group_size


def _most_tokens(job: Job, stage: Stage) -> int:
    """Response tokens of a whole stage, every answer as long as it may be."""
    rounds = stage.iterations if stage.data == "rollout" else 1
    return _samples(job, stage) * rounds * stage.rollout.max_new_tokens


def _tokens(found: Estimate, job: Job, stage: Stage) -> None:
    if stage.data == "rollout":
        found.tokens[stage.name] = (
            f"{stage.iterations:,} x {_samples(job, stage):,} samples, at most {_most_tokens(job, stage):,} tokens"
        )
    else:
        found.tokens[stage.name] = f"{_samples(job, stage):,} stored answers"


def _time(found: Estimate, job: Job, rates: Mapping[str, float]) -> None:
    """Seconds of steps at given rates when every answer is as long as it may be; what is stored is not counted."""
    total = 0.0
    for stage in job.stages:
        if stage.data != "rollout":
            continue
        for step, rate in rates.items():
            if step == "score" and not job.objective(stage).signals:
                continue
            seconds = _most_tokens(job, stage) / rate
            found.time[f"{stage.name} {step}"] = f"at most {_duration(seconds)} at {rate:,g} tokens/s"
            total += seconds
    if found.time:
        found.time["all"] = f"at most {_duration(total)}"
        missing = [step for step in RATED if step not in rates]
        if missing:
            found.time["all"] += f", without {' and '.join(missing)}, whose rate was not given"


def _memory(
    found: Estimate, job: Job, stage: Stage, student: _Shape | None, teachers: dict[str, _Shape | None]
) -> None:
    """Weights, keys and values, optimizer state of each step, each against what its device has free."""
    if student is None:
        return
    width = 2 if (job.engine.dtype or job.student.dtype) == "bfloat16" else 4
    rollout = stage.rollout
    longest = min(rollout.max_prompt_tokens + rollout.max_new_tokens, student.context or 1 << 31)
    cache = job.engine.slots * longest * student.kv_bytes * width // 2
    if stage.data == "rollout" and engine_kind(job.engine.kind).here:
        _fits(found, f"{stage.name} rollout", job.engine.device, student.parameters * width + cache, "engine.slots")
    sizes = sorted(
        (shape.parameters * (2 if job.teachers[name].dtype == "bfloat16" else 4) for name, shape in teachers.items()
         if shape is not None and name in job.teachers_of(stage)), reverse=True,
    )  # fmt: skip
    if sizes and SCORING[stage.score.engine].here:
        need = sum(sizes[: stage.score.max_resident])
        _fits(found, f"{stage.name} score", stage.score.device, need, "score.max_resident")
    adapter = _adapter(job, stage) if stage.train.lora.r else 0
    trained, hosted = training_bytes(student.parameters, stage.train, dtype=job.student.dtype, adapter=adapter)
    on_cpu = hosted and _place(stage.train.device) == "cpu"
    here = (trained + hosted if on_cpu else trained) // job.scale.ranks
    _fits(found, f"{stage.name} train", stage.train.device, here, "scale.ranks")
    if hosted and not on_cpu:
        _fits(found, f"{stage.name} train, host", "cpu", hosted, "train.offload")
    if problem := rate_problem(stage, student.hidden, pretrained=not job.student.config):
        found.doubt(f"stages.{stage.name}.train.learning_rate", problem)


def _adapter(job: Job, stage: Stage) -> int:
    """Numbers in a stage's adapter; 0 where they are not known, or the preflight says why there is none."""
    try:
        return adapter_parameters(job, stage.train.lora)
    except MopdError:
        return 0


def _place(device: str) -> str:
    """A job's device on this machine; empty where it has none, which the preflight says."""
    try:
        return resolve_device(device)
    except MopdError:
        return ""


def _fits(found: Estimate, what: str, device: str, need: int, key: str) -> None:
    where = _place(device)
    if not where:
        return
    free = available_memory() if where == "cpu" else free_memory(where)
    found.memory[what] = f"{_size(need)} on {where}, {_size(free)} free"
    if need > free:
        found.doubt(key, f"{what} needs about {_size(need)} on {where}, which has {_size(free)} free; change {key}")


def _disk(found: Estimate, job: Job, student: _Shape | None, teachers: dict[str, _Shape | None]) -> None:
    """Samples and signals, hidden states, policies and checkpoints against the room beside the store."""
    from mopd_kernels.codecs import row_bytes

    total = 0
    for stage in job.stages:
        tokens = _most_tokens(job, stage) if stage.data == "rollout" else 0
        signals = job.objective(stage).signals
        bytes_each = TOKEN_BYTES + (8 * stage.score.topk if "topk" in signals else 0)
        widest = max((s.hidden for name in job.teachers_of(stage) if (s := teachers.get(name))), default=0)
        if "hidden" in signals and widest:
            hidden = row_bytes(stage.score.hidden_codec, widest) * tokens
            kept = hidden // stage.iterations if job.retain.hidden_passes or job.retain.hidden_versions else hidden
            found.disk[f"{stage.name} hidden states"] = f"at most {_size(kept)}"
            total += kept
        found.disk[f"{stage.name} samples and signals"] = f"at most {_size(bytes_each * tokens)}"
        total += bytes_each * tokens
        if student is not None:
            policy, state = student.parameters * (2 if job.student.dtype == "bfloat16" else 4), student.parameters
            if stage.train.lora.r:
                state = _adapter(job, stage)
                policy = 4 * state
            weights = policy * stage.iterations + 2 * 12 * state
            found.disk[f"{stage.name} policies and checkpoints"] = _size(weights)
            total += weights
    if "://" in job.store:
        return
    store = Path(job.store).absolute()
    place = next(folder for folder in (store, *store.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    found.disk["all"] = f"at most {_size(total)}, {_size(free)} free at {place}"
    if total > free:
        found.doubt(
            "store",
            f"may grow to {_size(total)}, {place} has {_size(free)} free; set retain.hidden_passes = 1, a smaller "
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
