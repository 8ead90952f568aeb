"""Units of work that a step hands to this process, or to a fleet of workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.score.server_use import ServerUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from mopd_dataplane.job.job import Stage
    from mopd_dataplane.job.sections import Lora
    from mopd_dataplane.records import PlanWindow, Prompt
    from mopd_dataplane.rollout.rollout_report import RolloutReport
    from mopd_dataplane.run.iteration import Sampler
    from mopd_dataplane.score.health import Health

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class SamplingTask:
    """The prompts that one policy answers in one iteration of a stage."""

    stage: Stage
    iteration: int
    sampler: Sampler
    version: int
    """Policy version that samples."""
    prompts: list[Prompt]
    """In admission order."""

    @property
    def adapter(self) -> Lora | None:
        """LoRA settings of the sampler's later policies, where they are adapters; a teacher stays as it is."""
        return self.stage.adapter if self.sampler.policy == "self" else None


@dataclass(frozen=True)
class ScoreTask:
    """Samples that one teacher reads once."""

    teacher: str
    kinds: tuple[str, ...]
    rows: Rows
    """Rows of `samples`."""


class HealthKey(NamedTuple):
    """The samples over which the health of a signal is measured."""

    teacher: str
    domain: str
    iteration: int
    policy_version: int


@dataclass(frozen=True)
class ScoredTask:
    """Result of a task."""

    teacher: str
    signals: int
    """That are new in the store."""
    loss_tokens: int
    health: dict[HealthKey, Health] = field(default_factory=dict)
    """Figures of its log-prob signals."""
    use: ServerUse = field(default_factory=ServerUse)
    """What was requested from the teacher's server."""


class PlannedWindow(NamedTuple):
    """What a window that was planned holds."""

    samples: int
    steps: int


class WindowTrainer(Protocol):
    """What trains the windows of a stage; see steps.train.Training."""

    def train(self, plan: PlanWindow) -> dict[str, str]:
        """Train a recorded window."""

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint of the newest policy is in the store."""

    def keep_best(self, versions: Sequence[int]) -> None:
        """Have the checkpoints of these policy versions stay."""


class Fleet(Protocol):
    """Workers that roll out, score and train in place of this process."""

    def run_sampling_task(
        self, sampling_task: SamplingTask, skip_uids: set[str], show: Callable[..., None]
    ) -> RolloutReport:
        """Sample the prompts of a task, except the samples in `skip_uids`."""

    def score(self, stage: Stage, tasks: Sequence[ScoreTask], done: Callable[[ScoredTask], None]) -> None:
        """Score every task; `done` is called as each one ends."""

    def training(self, stage: Stage) -> AbstractContextManager[WindowTrainer]:
        """What trains the windows of a stage."""
