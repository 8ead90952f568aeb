"""One TOML file is one whole run; docs/job.md says how its tables, `extends` and overrides combine.

load.py reads a file as a Job. An objective may bring `[plan]` and `[train]` keys of its own for the
stages that name it: exact and sampled gradients want other batches and learning rates.
"""

from typing import Annotated, Literal

from pydantic import Field

from mopd_dataplane.errors import JobFileError, nearest
from mopd_dataplane.job import sections
from mopd_dataplane.job.further_samples import Data, OtherStores, SourceStore
from mopd_dataplane.job.objectives import CrossEntropyTerm, Objective
from mopd_dataplane.job.retain import Retain
from mopd_dataplane.job.scale import Scale
from mopd_dataplane.job.section import Fixed, Free, Section
from mopd_dataplane.job.values import Name

QuestionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
"""A word of SQL."""
MOST_SEED = (1 << 63) - 1
"""Largest seed: generators of random numbers take 64 bits."""


class Stage(Section):
    """One training run inside the job: data, objective, and the policy it leaves behind."""

    fixed_because = "the stage's policies and samples in the store are of it; add another stage"
    name: Fixed[Name]
    """Name of the stage, by which later stages, teachers, policies and tables refer to it."""
    start: Fixed[str] = "init"
    """`init` (the student as configured), or the name of an earlier stage."""
    data: Fixed[Data] = "rollout"
    """Reference answers (off-policy), rollouts, what the store already holds under the stage's name (imports), or
    samples of other stores, whose payload stays there: `{ from = ["runs/a", { store = "runs/b", where = "reward > 0",
    stage = "student" }] }`."""
    domains: tuple[str, ...] = ()
    """Default: every domain of the job."""
    examples: Fixed[int] = Field(default=0, ge=0)
    """Reference data: prompts used, spread over the domains; 0 takes all."""
    iterations: int = Field(default=1, ge=1)
    """Rounds of rollout, score, plan, train; each publishes one policy version."""
    window_samples: Fixed[int] = Field(default=0, ge=0)
    """Stored data: samples of an iteration, which follow one another in the store; these windows come in a random
    order, a new one each time all have come. 0: every iteration takes all samples."""
    objective: str = "cross-entropy"
    """A table of `[objectives]`, or `cross-entropy`, which needs none."""
    routing: dict[str, str] = Field(default_factory=dict)
    """Teacher of each domain (or `domain/effort`); default: the job's [routing]."""
    rollout: sections.Rollout = sections.Rollout()
    """Keys of `[rollout]` that differ in this stage."""
    score: sections.Score = sections.Score()
    """Keys of `[score]` that differ in this stage."""
    plan: sections.Plan
    """Keys of `[plan]` that differ in this stage."""
    train: sections.Train = sections.Train()
    """Keys of `[train]` that differ in this stage."""
    concurrent: Fixed[bool] = False
    """Rollout, scoring and training run concurrently, in a process each; `plan.max_staleness` bounds the staleness."""
    discriminator: sections.Discriminator | None = None
    """A trained model that gives the outcome rewards, instead of the domains' verifiers."""

    def iteration_of(self, window: int) -> int | None:
        """The iteration whose samples a window takes; None where every window takes all samples of the stage."""
        return window if self.data == "rollout" or self.window_samples else None

    @property
    def has_stored_samples(self) -> bool:
        """Check if the samples exist before the stage begins, in this store or in others."""
        return self.data == "stored" or bool(self.sources)

    @property
    def sources(self) -> tuple[SourceStore, ...]:
        """Other stores whose samples it trains on."""
        return self.data.sources if isinstance(self.data, OtherStores) else ()

    @property
    def verifier(self) -> str:
        """Name of the verifier whose rewards are trained on; empty for the domains' verifiers."""
        return "discriminator" if self.discriminator else ""

    @property
    def adapter(self) -> sections.Lora | None:
        """The adapter that is trained; None where the weights themselves are."""
        return self.train.lora if self.train.lora.r else None


class Eval(Section):
    """Held-out evaluation."""

    every: Free[int] = Field(default=1, ge=0)
    """Iterations between evaluations of a stage's policy; 0 evaluates only its last version."""
    split: Literal["eval", "tune"] = "eval"
    """Which held-out prompts are answered: `tune` while settings are chosen, `eval` for the final figure."""
    temperature: float = Field(default=0.0, ge=0)
    """Temperature of held-out answers; 0 takes the likeliest token."""
    max_new_tokens: int = Field(default=0, ge=0)
    """0 takes the rollout's."""
    reverse_kl: Free[bool] = False
    """Also measure reverse KL to the routed teacher on held-out prompts."""


class Job(Section):
    """A whole run."""

    fixed_because = "initial weights, prompts of an iteration, samples and shuffles follow from the seed"
    name: Free[Name]
    """Name of the run in reports and trackers."""
    shows: Free[str] = ""
    """What the job demonstrates, in one line."""
    source: Free[str] = ""
    """Paper, report or code that it follows."""
    store: Free[str]
    """Folder, or `s3://bucket/prefix`; credentials come from the environment only."""
    work: Free[str] = ""
    """Local folder for what an object store cannot hold while it is written; default: `runs/staging/<bucket>/<key>`."""
    single_writer: Free[bool] = False
    """Promise that one process writes: needed on an object store that ignores If-None-Match."""
    group_commit: Free[bool] = False
    """One process commits the samples and signals of all engines and scorers together: for runs with many of them."""
    seed: Fixed[int] = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of everything that is random: initial weights, prompts of an iteration, samples, shuffles."""
    student: sections.Student
    """The policy that is trained."""
    domains: dict[Name, sections.Domain]
    """Prompts and verifiers, one table a domain."""
    teachers: dict[Name, sections.Teacher] = Field(default_factory=dict)
    """The models that score the student's tokens, one table a teacher."""
    routing: dict[str, str] = Field(default_factory=dict)
    """Teacher of each domain, or of one effort mode of it (`domain/effort`)."""
    engine: sections.Engine = sections.Engine()
    """The engine that samples."""
    wal: sections.Wal = sections.Wal()
    """The token log."""
    load: sections.Load = sections.Load()
    """The shared-memory ring between disk and trainer."""
    retain: Retain = Retain()
    """How long hidden states are kept."""
    scale: Scale = Scale()
    """How many processes share the work."""
    objectives: dict[str, Objective] = Field(default_factory=dict)
    """The losses that stages can name, one table an objective."""
    stages: tuple[Stage, ...]
    """The training runs of the job, in order; write `[[stages]]`."""
    eval: Eval = Eval()
    """Held-out evaluation."""
    questions: dict[QuestionName, str] = Field(default_factory=dict)
    """Names for conditions on samples, `hard = "kl > 1"`, to be used in every other condition."""

    def stage(self, name: str) -> Stage:
        """The stage of that name; raises JobFileError naming the known ones."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise JobFileError(f"no stage {name!r} in job {self.name!r}: {nearest(name, [s.name for s in self.stages])}")

    def objective(self, stage: Stage) -> Objective:
        """The objective a stage names; `cross-entropy` needs no table."""
        return self.objectives.get(stage.objective) or Objective(cross_entropy=CrossEntropyTerm())

    def domains_of(self, stage: Stage) -> tuple[str, ...]:
        """Domain names of a stage, in the job's order."""
        return stage.domains or tuple(self.domains)

    def teacher_of(self, stage: Stage, domain: str, effort: str = "") -> str:
        """Teacher that scores a domain in a stage; raises JobFileError when no rule covers it."""
        routing = stage.routing or self.routing
        for key in (f"{domain}/{effort}", domain):
            if key in routing:
                return routing[key]
        raise JobFileError(f"no teacher for domain {domain!r}: {nearest(domain, routing)}; add it to [routing]")

    def routes_by_effort(self, stage: Stage) -> bool:
        """Whether some domain of a stage has a teacher for one effort mode only."""
        return any("/" in key for key in stage.routing or self.routing)

    def members_of(self, teacher: str) -> tuple[str, ...]:
        """Teachers with weights of their own that a teacher is made of: itself, or the members of its blend."""
        return tuple(self.teachers[teacher].blend) or (teacher,)

    def sampler_of(self, stage: Stage, who: str, domain: str, effort: str = "") -> str:
        """The sampler that `rollout.policy` or `rollout.rest` names for a domain: `self`, `reference`, or a teacher."""
        return self.teacher_of(stage, domain, effort) if who == "routed" else who

    def teachers_of(self, stage: Stage) -> tuple[str, ...]:
        """Teachers that score some domain of a stage, in order of first use; empty when no signal is needed."""
        if not (self.objective(stage).signals or stage.score.signals):
            return ()
        names = [self.teacher_of(stage, d, self.domains[d].effort) for d in self.domains_of(stage)]
        return tuple(dict.fromkeys(names))

    def others_of(self, stage: Stage) -> tuple[str, ...]:
        """Teachers that score every sample of a stage beside its own: the reference policy, and those of Cal-OPD."""
        term = self.objective(stage).policy_gradient
        return tuple(dict.fromkeys(term.others.values())) if term else ()

    def scorers_of(self, stage: Stage) -> tuple[str, ...]:
        """Teachers whose signals a stage needs: those that score a domain, and those beside them."""
        return tuple(dict.fromkeys((*self.teachers_of(stage), *self.others_of(stage))))
