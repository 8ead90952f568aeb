"""A tiny student, in-memory batches and a source that behaves like the loader's client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from objectives import Case, random_pack

from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.records import Batch, Pack

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="session")
def make_policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny random causal LM; keyword arguments replace keys of its config."""

    def make(seed: int = 0, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("policy") / "start"
        return make_student(StudentSettings(config=CONFIG | changes), folder, seed=seed)

    return make


@pytest.fixture(scope="session")
def policy(make_policy: Callable[..., Path]) -> Path:
    """The tiny student's start."""
    return make_policy()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(kw_only=True)
class MemoryBatch(Batch):
    """A batch held in ordinary memory; remembers what was released."""

    released: list[int] = field(default_factory=list)
    on_release: Callable[[Pack], None] = lambda pack: None

    def release(self, *packs: Pack) -> None:
        for pack in packs:
            self.released.append(pack.index)
            self.on_release(pack)


@dataclass
class MemorySource:
    """Batches by window, served like the loader's client serves them."""

    windows: dict[int, list[MemoryBatch]]
    asked: list[tuple[int, int]] = field(default_factory=list)

    def batches(self, stage: str, window: int, start_step: int) -> Iterator[MemoryBatch]:
        self.asked.append((window, start_step))
        yield from self.windows[window][start_step:]

    def plan(self, stage: str, window: int) -> dict[str, Any]:
        """The plan log ends after the last window."""
        steps = len(self.windows.get(window, []))
        return {"steps": steps, "plan_digest": f"plan{window}", "snapshot_digest": f"snap{window}"}


def as_batch(packs: list[Pack], *, step: int = 0, window: int = 0) -> MemoryBatch:
    """A whole step of one rank."""
    return MemoryBatch(
        stage="student",
        window=window,
        step=step,
        packs=packs,
        loss_tokens=int(sum(pack.loss_mask.sum() for pack in packs)),
        sequences=sum(len(pack.cu_seqlens) - 1 for pack in packs),
    )


@pytest.fixture(scope="session")
def pack() -> Callable[..., Pack]:
    return random_pack


@pytest.fixture(scope="session")
def batch() -> Callable[..., MemoryBatch]:
    return as_batch


@pytest.fixture(scope="session")
def source() -> type[MemorySource]:
    return MemorySource


@pytest.fixture
def case(pack: Callable[..., Pack]) -> Case:
    return Case(pack)
