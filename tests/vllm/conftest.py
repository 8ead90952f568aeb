"""Two versions of a tiny real model, and a started engine that the tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from decoding import TINY

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
def keyed(models: tuple[Path, Path]) -> Iterator[VllmEngine]:
    """vLLM with this package's noise, on the first version."""
    engine = VllmEngine(models[0], slots=8, threads=1)
    yield engine
    engine.close()
