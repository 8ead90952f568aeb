"""A tiny real model with a real tokenizer, a toy rollout, and a store made of one list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from decoding import TINY, Shelf

from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.rollout.runner import RolloutReport, RolloutTask, run_rollout
from mopd_dataplane.testing.toy_engine import ToyEngine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Qwen3 with one token per character."""
    from mopd_dataplane.models.initial_weights import make_student

    return make_student(sections.Student(config=TINY), tmp_path_factory.mktemp("models") / "tiny", seed=3)


@pytest.fixture
def shelf() -> Shelf:
    """An empty store."""
    return Shelf()


TASK = {field.name for field in fields(RolloutTask)}


@pytest.fixture
def roll(tmp_path: Path) -> Callable[..., RolloutReport]:
    """run_rollout on the toy engine over `count` prompts, with everything else defaulted."""

    def rolled(
        shelf: Shelf, *, count: int = 20, slots: int = 8, home: Path | None = None, **overrides: Any
    ) -> RolloutReport:
        settings = {
            "stage": "student",
            "iteration": 1,
            "seed": 7,
            "rollout": sections.Rollout(max_new_tokens=60),
            "wal": sections.Wal(segment_bytes=1 << 14, full_disk_wait_s=0),
            "wal_dir": home or tmp_path / "wal",
            "commit": shelf.commit,
            "render": lambda prompt: [ord(c) % 12 for c in prompt.text],
            "skip_uids": set(shelf.samples),
        } | overrides
        engine = settings.pop("engine", None) or ToyEngine(slots=slots)
        prompts = settings.pop("prompts", None)
        if prompts is None:
            prompts = [Prompt(prompt_id=f"p{i}", domain="toy", text=f"{i}+{i}") for i in range(count)]
        task = RolloutTask(**{name: settings.pop(name) for name in TASK & settings.keys()})
        return run_rollout(engine, prompts, task, **settings)

    return rolled


@pytest.fixture
def reference(roll: Callable[..., RolloutReport], tmp_path: Path) -> dict[str, Sample]:
    """What an uninterrupted rollout of the default prompts gives."""
    shelf = Shelf()
    roll(shelf, home=tmp_path / "reference")
    return dict(shelf.samples)
