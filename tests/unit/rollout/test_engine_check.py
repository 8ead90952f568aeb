"""The self-check of an engine in another process, made here with the built-in engine in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoding import TINY

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models import self_check
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.models.self_check import LONGEST_ON_HOST, affordable_on_host, texts_to_check
from mopd_dataplane.rollout.engines.engine import StepOutput
from mopd_dataplane.rollout.engines.engine_check import NEW_TOKENS, check_engine
from mopd_dataplane.rollout.engines.hf import HfEngine

TEXTS = texts_to_check([np.arange(length) % 40 + 5 for length in (6, 23, 11)], 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of one random model."""
    home = tmp_path_factory.mktemp("models")
    first, second = (make_student(sections.Student(config=TINY), home / f"v{n}", seed=n) for n in range(2))
    return first, second


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_engine_passes(models: tuple[Path, Path], dtype: str) -> None:
    engine = HfEngine(models[0], slots=2, dtype=dtype)
    passed = check_engine(engine, models[0], TEXTS, dtype=dtype)
    assert passed.gap is not None
    assert 0 <= passed.gap <= passed.band
    assert "Qwen3ForCausalLM" in passed.model
    assert passed.tokens == 64 + NEW_TOKENS
    again = check_engine(engine, models[0], TEXTS, dtype=dtype)
    assert again == passed, "every slot is free again"


def test_weights_of_another_version_are_found(models: tuple[Path, Path]) -> None:
    with pytest.raises(MismatchError, match=r"first at position \d+, and 0.001 is allowed in float32"):
        check_engine(HfEngine(models[1], slots=2), models[0], TEXTS, dtype="float32")


class Scaled(HfEngine):
    """Log-probs of another temperature, as of a lost logit scale."""

    def step(self) -> StepOutput:
        output = super().step()
        return replace(output, logprobs=output.logprobs * np.float32(1.05))


class Missing(HfEngine):
    """Log-probs that are no numbers."""

    def step(self) -> StepOutput:
        output = super().step()
        return replace(output, logprobs=np.full_like(output.logprobs, np.nan))


@pytest.mark.parametrize("engine", [Scaled, Missing])
def test_wrong_log_probs_are_found(models: tuple[Path, Path], engine: type[HfEngine]) -> None:
    with pytest.raises(MismatchError, match="Nothing was sampled"):
        check_engine(engine(models[0], slots=2), models[0], TEXTS, dtype="float32")


def test_a_model_that_does_not_fit_into_memory_is_not_compared(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (models[0] / "model.safetensors").stat().st_size
    monkeypatch.setattr(self_check, "available_memory", lambda: 2 * weights - 1)
    assert check_engine(HfEngine(models[1], slots=2), models[0], TEXTS, dtype="float32").gap is None
    monkeypatch.setattr(self_check, "available_memory", lambda: 2 * weights)
    with pytest.raises(MismatchError, match="Nothing was sampled"):
        check_engine(HfEngine(models[1], slots=2), models[0], TEXTS, dtype="float32")


def test_the_texts_are_the_first_prompt_and_the_longest_with_a_filler() -> None:
    first, long = TEXTS
    assert (len(first), len(long)) == (6, 64)
    assert long[:23].tolist() == (np.arange(23) % 40 + 5).tolist()
    assert texts_to_check([], 64) == []
    assert [len(text) for text in texts_to_check([np.zeros(90, np.int64)], 64)] == [90, 90], "cut where they are read"


def test_a_text_is_read_as_far_as_the_plain_pass_affords(models: tuple[Path, Path]) -> None:
    engine = HfEngine(models[0], slots=2)
    engine.context_length = 40
    assert check_engine(engine, models[0], TEXTS, dtype="float32").tokens == 40
    assert affordable_on_host(10**6) == LONGEST_ON_HOST
    assert 64 < affordable_on_host(8 * 10**9) < LONGEST_ON_HOST
    assert affordable_on_host(10**12) == 64
