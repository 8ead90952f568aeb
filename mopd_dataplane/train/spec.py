"""TrainSpec, the trainer's settings: a JSON file from the job that every rank reads and checks before it loads
torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.objectives import Objective
from mopd_dataplane.job.parse import parse_section
from mopd_dataplane.job.section import Section
from mopd_dataplane.job.sections import Train


class HeadFile(Section):
    """A teacher's LM head on disk."""

    path: str
    digest: str
    """sha256 of the file."""


class Window(Section):
    """One planned window to train on."""

    window: int
    plan_digest: str
    snapshot_digest: str
    steps: int = Field(ge=0)
    """Number of optimizer steps; 0 closes the plan log."""
    policy_version: int = Field(ge=0)
    """Policy version from which the window starts; its end publishes the next one."""


class Sampling(Section):
    """How the samples of a stage were drawn, for stages whose trainer must reproduce the sampler's log-probs."""

    engine: str
    """Kind of the engine."""
    dtype: Literal["float32", "bfloat16"]
    """Dtype of the sampling policy."""
    served: bool = False
    """True if a running server samples, whose weights were not loaded by this job."""
    routes: bool = False
    """True if the model is a mixture of experts."""
    records_experts: bool = False
    """True if the samples record the experts that they were drawn with."""


class TrainSpec(Section):
    stage: str
    start: str
    """Policy folder the stage starts from (weights, config, tokenizer)."""
    hub_name: str = ""
    """Hub name and commit of the start, if it comes from the hub; an adapter names it as its base."""
    hub_revision: str = ""
    policy_dir: str
    """`policies/<stage>`: versions are published as `v<n>` below it."""
    checkpoint_dir: str
    """`checkpoints/<stage>`: checkpoints and metrics.jsonl."""
    checkpoints_every: int = Field(default=0, ge=0)
    """Checkpoints at the end of every so many windows stay; 0: only the last ones do."""
    socket: str
    """Unix socket of the loader."""
    train: Train
    objective: Objective
    heads: dict[str, HeadFile] = Field(default_factory=dict)
    teachers: tuple[str, ...] = ()
    """Teachers of the stage; metrics are reported for each."""
    thought: tuple[int, int] | None = None
    """Token ids that begin and end a thought, if a teacher does not judge thoughts."""
    sampling: Sampling | None = None
    """How the samples were drawn; None if the sampler's log-probs are of another distribution, or missing."""
    check_texts: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts that the self-check reads besides one that is made up."""
    total_steps: int = Field(default=0, ge=0)
    """Optimizer steps of the whole stage, for the schedule; 0 when unknown (schedule must then be constant)."""
    end_window: int | None = Field(default=None, ge=0)
    """Window before which training ends, because another spec follows; None: train until the plan log is closed."""
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forward pass; master weights stay float32."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, at which log-probs of the policy-gradient term are computed."""
    max_new_tokens: int = Field(default=1, ge=1)
    """Longest response in tokens, by which the `constant` normaliser divides."""
    less_memory: str = ""
    """What to set when memory runs out, as a clause of a message."""
    window_deadline_s: float = Field(default=60.0, gt=0)
    """Longest wait, in seconds, for a window that is still being planned, while the loader reports that it waits."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Longest wait for the loader, in seconds."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share a pack."""
    rank_deadline_s: float = Field(default=600.0, gt=0)
    """Longest wait of one rank for another, in seconds."""
    rendezvous: str = ""
    """File in which the ranks of one node find each other; empty: at MASTER_ADDR, as under torchrun."""


def load_spec(path: str | Path) -> TrainSpec:
    """Read and check a spec. Raises InputError naming the file and the key."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise InputError(f"no train spec at {path}: {error.strerror}") from None
    return parse_section(TrainSpec, text, str(path))
