"""Every causal LM class of the installed transformers: right, refused by name, or named as not tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from causal_classes import NOT_TRIED, REFUSED, causal_classes, outcome_of, tiny_settings

pytestmark = pytest.mark.usefixtures("one_thread")  # tiny products gain nothing from several, and wait for each other
TOLERANCE = 1e-4
"""nat, as for the families of docs/models.md."""
QUICK = ("zaya", "dbrx", "bert", "bart", "qwen4_exp_text", "blt")
"""One of each way to end, and those whose own code raises at unusual places."""


def check_outcome(model_type: str, folder: Path) -> None:
    outcome = outcome_of(model_type, folder)
    if model_type in NOT_TRIED:
        assert outcome.kind == "not tried"
    elif model_type in REFUSED:
        assert outcome.kind == "refused", f"{model_type} is measured now: take it out of REFUSED"
        assert model_type in outcome.reason or "Unrecognized configuration class" in outcome.reason
        assert "use another model" in outcome.reason or "transformers" in outcome.reason
    else:
        assert outcome.kind == "measured", outcome.reason
        assert outcome.worst < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("model_type", QUICK)
def test_one_class_of_each_outcome(model_type: str, tmp_path: Path) -> None:
    check_outcome(model_type, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in causal_classes() if name not in QUICK])
def test_every_class(model_type: str, tmp_path: Path) -> None:
    check_outcome(model_type, tmp_path / "model")


@pytest.mark.parametrize("model_type", sorted({*NOT_TRIED}))
def test_what_is_not_tried_exists(model_type: str) -> None:
    assert model_type in causal_classes()


def test_tiny_models_pass_their_windows() -> None:
    """Sizes that are lost to a renamed setting would make the measurement easy."""
    windows = ("sliding_window", "attention_chunk_size")
    settings = {name: tiny_settings(name) for name in ("mistral", "cohere2", "gemma3_text", "llama4_text", "afmoe")}
    for name, config in settings.items():
        assert [config[key] for key in windows if key in config] == [8], name
