"""One TOML file is one whole run.

`load_job(path)` returns a frozen, fully checked `Job`, or raises JobFileError naming the file, the key, what is
allowed and the nearest match, before any work starts. Tables `[rollout]`, `[score]`, `[plan]` and `[train]` at the
top level are defaults; a stage may override single keys of them. An objective may bring `[plan]` and `[train]`
keys of its own for the stages that name it: exact and sampled gradients want other batches and learning rates.
`extends = { job = "../quickstart", stages = ["base"] }` takes over another job's tables and the stages it lists;
`domains` lists the domains, where not all are wanted.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from mopd_dataplane.config import (
    CrossEntropyTerm,
    Discriminator,
    Domain,
    Engine,
    Eval,
    Load,
    Name,
    Objective,
    Plan,
    Retain,
    Rollout,
    Scale,
    Score,
    Section,
    Student,
    Teacher,
    Train,
    Wal,
)
from mopd_dataplane.errors import JobFileError, nearest
from mopd_dataplane.jobread import child, read_job, with_stage_defaults


class Stage(Section):
    """One training run inside the job: data, objective, and the policy it leaves behind."""

    name: Name
    start: str = "init"
    """`init` (the student as configured), or the name of an earlier stage."""
    data: Literal["reference", "rollout", "stored"] = "rollout"
    """Reference answers (off-policy), rollouts, or what the store already holds under the stage's name (imports)."""
    domains: tuple[str, ...] = ()
    """Default: every domain of the job."""
    examples: int = Field(default=0, ge=0)
    """Reference data: prompts used, spread over the domains; 0 takes all."""
    iterations: int = Field(default=1, ge=1)
    """Rounds of rollout, score, plan, train; each publishes one policy version."""
    objective: str = "cross-entropy"
    routing: dict[str, str] = Field(default_factory=dict)
    """Teacher of each domain (or `domain/effort`); default: the job's [routing]."""
    rollout: Rollout = Rollout()
    score: Score = Score()
    plan: Plan
    train: Train = Train()
    overlap: bool = False
    """Rollout, scoring and training run at once, each in a process of its own; `plan.max_staleness` bounds how far."""
    discriminator: Discriminator | None = None
    """Where the outcome rewards that are trained on come from, instead of the domains' verifiers."""

    @property
    def verifier(self) -> str:
        """Whose rewards are trained on; empty for the domains' verifiers."""
        return "discriminator" if self.discriminator else ""


class Job(Section):
    """A whole run."""

    name: Name
    shows: str = ""
    """What running it shows, in a line."""
    source: str = ""
    """Paper, report or code that it follows."""
    store: str
    """Folder, or `s3://bucket/prefix`; credentials come from the environment only."""
    work: str = ""
    """Local folder for what an object store cannot hold while it is written; default: runs/staging/<bucket>/<key>."""
    single_writer: bool = False
    """Promise that one process writes: needed on an object store that ignores If-None-Match."""
    seed: int = Field(default=0, ge=0)
    student: Student
    domains: dict[Name, Domain]
    teachers: dict[Name, Teacher] = Field(default_factory=dict)
    routing: dict[str, str] = Field(default_factory=dict)
    engine: Engine = Engine()
    wal: Wal = Wal()
    load: Load = Load()
    retain: Retain = Retain()
    scale: Scale = Scale()
    objectives: dict[str, Objective] = Field(default_factory=dict)
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
        raise JobFileError(f"no teacher for domain {domain!r}: {nearest(domain, routing)}; add it to [routing]")

    def members_of(self, teacher: str) -> tuple[str, ...]:
        """Teachers with weights of their own that a teacher is made of: itself, or the members of its blend."""
        return tuple(self.teachers[teacher].blend) or (teacher,)

    def sampler_of(self, stage: Stage, who: str, domain: str, effort: str = "") -> str:
        """Who `rollout.policy` or `rollout.rest` means for a domain's prompts: `self`, `reference`, or a teacher."""
        return self.teacher_of(stage, domain, effort) if who == "routed" else who

    def teachers_of(self, stage: Stage) -> tuple[str, ...]:
        """Teachers that judge some domain of a stage, in order of first use; empty when no signal is needed."""
        objective = self.objective(stage)
        if not objective.signals:
            return ()
        names = [self.teacher_of(stage, d, self.domains[d].effort) for d in self.domains_of(stage)]
        return tuple(dict.fromkeys(names))


def load_job(path: str | Path, *, overrides: list[str] | None = None) -> Job:
    """Read and check a job file, the `job.toml` of a job folder, or the `job.json` that a store keeps.

    overrides: `key.path=value` in TOML syntax; a stage is addressed by its name, as in
    `stages.student.objective="full-vocab"`.
    Raises JobFileError.
    """
    raw, where = read_job(path, overrides or [])
    return check_job(raw, where=where)


def check_job(raw: dict[str, Any], *, where: str) -> Job:
    """Build a Job from parsed TOML; `where` names the file in messages. Raises JobFileError."""
    raw = with_stage_defaults(raw, where)
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        raise JobFileError(_explain(error, raw, where)) from None
    _check_references(job, where)
    return job


def _check_references(job: Job, where: str) -> None:
    known_starts = {"init"}
    names = [stage.name for stage in job.stages]
    if len(set(names)) != len(names):
        raise JobFileError(f"{where}: two stages share a name: {sorted(n for n in names if names.count(n) > 1)[0]!r}")
    _check_blends(job, where)
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
        if stage.overlap and stage.data != "rollout":
            raise JobFileError(f'{at}.overlap: stored reference data has nothing to overlap; set data = "rollout"')
        bound = job.retain.hidden_versions
        if 0 < bound <= stage.plan.max_staleness or (stage.data != "rollout" and 0 < bound < stage.iterations):
            raise JobFileError(
                f"{where}: retain.hidden_versions = {bound} frees hidden states that stage {stage.name!r} still needs; "
                f"set it above {max(stage.plan.max_staleness, stage.iterations - 1)}, or 0"
            )
        passes = stage.iterations * stage.train.epochs
        if stage.data != "rollout" and 0 < job.retain.hidden_passes < passes:
            raise JobFileError(
                f"{where}: retain.hidden_passes = {job.retain.hidden_passes} frees hidden states before stage "
                f"{stage.name!r} has passed over its data {passes} times; set it to at least {passes}, or 0"
            )
        term = job.objective(stage).policy_gradient
        if job.scale.context_parallel > 1 and term is not None and term.discount:
            raise JobFileError(
                f"{at}: objective {stage.objective!r} sums over later tokens (discount = {term.discount}), which the "
                "ranks of scale.context_parallel do not share; set scale.context_parallel = 1, or discount = 0"
            )
        if stage.data == "rollout":
            _check_rollout(job, stage, at)
        _check_discriminator(job, stage, at)
        _check_reads(job, stage, at)
        _check_weights(job, stage, at)
        _check_routing(job, stage, at)
        known_starts.add(stage.name)


def _check_blends(job: Job, where: str) -> None:
    for name, teacher in job.teachers.items():
        for member in teacher.blend:
            if member not in job.teachers:
                hint = nearest(member, job.teachers)
                raise JobFileError(f"{where}: teachers.{name}.blend names no teacher {member!r}: {hint}")
            if job.teachers[member].blend:
                raise JobFileError(f"{where}: teachers.{name}.blend: {member!r} is a blend itself; name its members")


def _check_rollout(job: Job, stage: Stage, at: str) -> None:
    rollout, gradient = stage.rollout, job.objective(stage).policy_gradient
    for key, others in (("policy", ("self",)), ("rest", ("reference",))):
        known = [*others, "routed", *job.teachers]
        if (who := getattr(rollout, key)) not in known:
            raise JobFileError(f"{at}.rollout.{key}: no teacher {who!r}: {nearest(who, known)}")
    if rollout.group_size > 1 and not stage.plan.strict_batches:
        raise JobFileError(
            f"{at}: rollout.group_size = {rollout.group_size} keeps groups in one step, which "
            "plan.strict_batches = false cannot; set plan.strict_batches = true, or rollout.group_size = 1"
        )
    if gradient and (rollout.top_p < 1 or rollout.top_k):
        raise JobFileError(
            f"{at}: under rollout.top_p = {rollout.top_p:g}, top_k = {rollout.top_k} the sampler's log-probs are those "
            "of the tokens it keeps, the trainer's those of all, so the ratios of a policy gradient would be wrong; "
            f"set top_p = 1 and top_k = 0, or give objective {stage.objective!r} a divergence instead"
        )
    if rollout.teacher_mix and rollout.policy != "self":
        raise JobFileError(f'{at}: rollout.teacher_mix mixes a teacher into the student; set rollout.policy = "self"')
    if rollout.teacher_mix and job.engine.kind != "hf":
        raise JobFileError(
            f"{at}: rollout.teacher_mix = {rollout.teacher_mix} draws each token from two models, which engine.kind = "
            f'{job.engine.kind!r} cannot; set engine.kind = "hf", or rollout.teacher_mix = 0'
        )
    if rollout.teacher_mix and gradient and gradient.teacher_coef and gradient.student_logprob == "sampler":
        raise JobFileError(
            f"{at}: under rollout.teacher_mix the sampler's log-prob is the mixture's, not the student's; set "
            f'objectives.{stage.objective}.policy_gradient.student_logprob = "current"'
        )
    if rollout.student_share < 1 and rollout.rest == "reference":
        if gradient:
            raise JobFileError(
                f"{at}: reference answers have no sampler log-prob for a policy gradient; set rollout.student_share = "
                "1, or rollout.rest to a teacher"
            )
        if rollout.group_size > 1:
            raise JobFileError(f"{at}: a prompt has one reference answer, not {rollout.group_size}: set group_size = 1")


def _check_reads(job: Job, stage: Stage, at: str) -> None:
    served = [name for name, teacher in job.teachers.items() if teacher.url]
    if stage.score.reads == "extract_hidden_states" and served:
        raise JobFileError(
            f'{at}.score.reads = "extract_hidden_states" is for teachers that vLLM runs on this machine, but teacher '
            f'{served[0]!r} has a url; set reads = "states" (a pooling server), or leave the url out'
        )


def _check_discriminator(job: Job, stage: Stage, at: str) -> None:
    if stage.discriminator is None:
        return
    earlier = ["reference", *(s.name for s in job.stages[: job.stages.index(stage)])]
    if (text := stage.discriminator.text) not in earlier:
        raise JobFileError(f"{at}.discriminator.text: no earlier stage {text!r}: {nearest(text, earlier)}")
    if stage.overlap:
        raise JobFileError(f"{at}: a discriminator learns between rollout and training; set overlap = false")
    if stage.data != "rollout" or not job.objective(stage).needs_rewards:
        raise JobFileError(
            f'{at}: a discriminator rewards rollouts; set data = "rollout", and reward_coef in objective '
            f"{stage.objective!r}"
        )


def _check_weights(job: Job, stage: Stage, at: str) -> None:
    domains, teachers = job.domains_of(stage), job.objective(stage).teacher_weights
    for domain in domains if stage.plan.mixture else ():
        if domain not in stage.plan.mixture:
            raise JobFileError(f"{at}.plan.mixture: domain {domain!r} has no weight; give one (0 leaves it out)")
    for domain in stage.plan.mixture:
        if domain not in domains:
            raise JobFileError(f"{at}.plan.mixture: no domain {domain!r} in the stage: {nearest(domain, domains)}")
    for teacher in teachers:
        if teacher not in job.teachers:
            hint = nearest(teacher, job.teachers)
            raise JobFileError(f"{at}: objective {stage.objective!r} weighs no teacher {teacher!r}: {hint}")


def _samplers(job: Job, stage: Stage) -> set[str]:
    """Teachers that write, or help to write, some sample of a stage."""
    rollout = stage.rollout
    if stage.data != "rollout":
        return set()
    writers = [rollout.policy] if rollout.student_share else []
    writers += [rollout.rest] if rollout.student_share < 1 else []
    writers += ["routed"] if rollout.teacher_mix else []
    found = {job.sampler_of(stage, who, d, job.domains[d].effort) for who in writers for d in job.domains_of(stage)}
    return found - {"self", "reference"}


def _check_routing(job: Job, stage: Stage, at: str) -> None:
    earlier = [s.name for s in job.stages[: job.stages.index(stage)]]
    for key, teacher in (stage.routing or job.routing).items():
        if key.partition("/")[0] not in job.domains:
            raise JobFileError(f"{at}: routing names an unknown domain {key!r}: {nearest(key, job.domains)}")
        if teacher not in job.teachers:
            raise JobFileError(
                f"{at}: routing of {key!r} names no teacher {teacher!r}: {nearest(teacher, job.teachers)}"
            )
    try:
        samplers = _samplers(job, stage)
        teachers = {*job.teachers_of(stage), *samplers}
    except JobFileError as error:
        raise JobFileError(f"{at}: {error}") from None
    for sampler in sorted(samplers):
        if job.teachers[sampler].blend:
            raise JobFileError(f"{at}.rollout: teacher {sampler!r} is a blend and cannot answer; name a member")
    reference = job.objective(stage).policy_gradient
    teachers |= {reference.reference} & set(job.teachers) if reference else set()
    for teacher in sorted({member for name in teachers for member in job.members_of(name)}):
        rounded = job.teachers[teacher].quantisation
        if rounded != "none" and stage.score.engine == "vllm":
            raise JobFileError(
                f"{at}: teachers.{teacher}.quantisation = {rounded!r} is what the Hugging Face scorer applies; set "
                'score.engine = "hf", or quantisation = "none"'
            )
        source = job.teachers[teacher].source
        if not source.startswith("stage:") or source[6:] in earlier:
            continue
        names = [s.name for s in job.stages]
        if source[6:] in names:
            raise JobFileError(f"{at}: teacher {teacher!r} comes from stage {source[6:]!r}, which runs later")
        hint = nearest(source[6:], names)
        raise JobFileError(f"{at}: teachers.{teacher}.source names no stage {source[6:]!r}: {hint}")


_MOST_PROBLEMS = 20


def _explain(error: ValidationError, raw: dict[str, Any], where: str) -> str:
    """One line per problem: the key as written in the file, what is wrong, and the nearest valid key."""
    lines = []
    for problem in error.errors()[:_MOST_PROBLEMS]:
        path, section = _locate(problem["loc"], raw)
        if problem["type"] == "extra_forbidden" and section is not None:
            lines.append(f"{where}: unknown key `{path}`: {nearest(str(problem['loc'][-1]), section.model_fields)}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: missing key `{path}`")
        else:
            found = problem.get("input")
            shown = f", found {found!r}" if not isinstance(found, dict | list) else ""
            lines.append(f"{where}: `{path}`: {problem['msg'].removeprefix('Value error, ')}{shown}")
    if error.error_count() > len(lines):
        lines.append(f"{where}: and {error.error_count() - len(lines):,} more")
    return "\n".join(lines)


def _locate(location: tuple[int | str, ...], raw: dict[str, Any]) -> tuple[str, type[Section] | None]:
    """Dotted path with stage names in place of indices, and the section the last key would belong to."""
    parts: list[str] = []
    node: Any = raw
    section: type[Section] | None = Job
    for depth, key in enumerate(location):
        node = child(node, key)
        named = isinstance(key, int) and isinstance(node, dict)
        parts.append(str(node.get("name", key)) if named and isinstance(node, dict) else str(key))
        if depth < len(location) - 1 and section is not None:
            section = _section_under(section, key)
    return ".".join(parts), section


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
