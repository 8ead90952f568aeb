"""Two versions of a tiny real model, and a started engine that the tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from decoding import TINY
from peft_adapters import write_adapter

from mopd_dataplane.job import sections
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.rollout.engines.vllm import VllmEngine

sys.path.insert(0, str(Path(__file__).parent))  # helpers of these tests


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two versions of a random two-layer Qwen3 with one token per character."""
    home = tmp_path_factory.mktemp("models")
    first, second = (make_student(sections.Student(config=TINY), home / f"v{i}", seed=3 + i) for i in range(2))
    return first, second


@pytest.fixture(scope="session")
def adapters(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two adapters on the first version, of other ranks, scales and targets."""
    home = tmp_path_factory.mktemp("adapters")
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 5}, "use_rslora": True}
    first = write_adapter(models[0], home / "first", seed=1)
    return first, write_adapter(models[0], home / "second", seed=2, r=8, **patterns)


@pytest.fixture(scope="session")
def keyed(models: tuple[Path, Path]) -> Iterator[VllmEngine]:
    """vLLM with this package's noise, on the first version."""
    engine = VllmEngine(models[0], slots=8, threads=1)
    yield engine
    engine.close()
