"""A long text read in segments has the states of one pass over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.hf import hidden_states, load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.score import segments
from mopd_dataplane.score.readers import HfReader
from mopd_dataplane.score.segments import Segments

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096, "vocab_size": 200,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "full": {"model_type": "llama"},
    "window": {"model_type": "mistral", "sliding_window": 24},
    "both": {
        "model_type": "gemma3_text", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    },
    "plain attention": {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


def model_of(config: dict[str, Any], folder: Path) -> Any:
    return load_model(make_student(Student(config=SMALL | config), folder / "m", seed=0))


def lengths_read(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Tokens of each pass of a model from now on."""
    lengths: list[int] = []
    forward = model.model.forward

    def counted(*arguments: Any, **names: Any) -> Any:
        lengths.append(names["input_ids"].shape[1])
        return forward(*arguments, **names)

    monkeypatch.setattr(model.model, "forward", counted)
    return lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_segments_are_those_of_one_pass(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(FAMILIES[family], tmp_path)
    monkeypatch.setattr(segments, "LONGEST_PASS", 50)
    monkeypatch.setattr(segments, "MASK_CELLS", 2500)
    monkeypatch.setattr(segments, "_SHORTEST", 7)
    monkeypatch.setattr(segments, "_LONGEST", 31)
    rng = np.random.default_rng(0)
    texts = [rng.integers(4, 99, count) for count in (131, 20)]
    predicted = [np.arange(9, 131), np.array([3, 19])]
    reader = HfReader(model)
    assert Segments(model).is_better(131)
    passes = lengths_read(monkeypatch, model)
    ours = reader.predicting_states(texts, predicted)
    assert max(passes[-3:]) <= 31
    whole: list[Tensor] = [hidden_states(model, torch.from_numpy(text)[None])[0] for text in texts]
    theirs = torch.cat([states[places - 1] for states, places in zip(whole, predicted, strict=True)])
    # float32 sums of another order, through two layers.
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-4)


def test_texts_of_a_usual_length_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(FAMILIES["full"], tmp_path)
    passes = lengths_read(monkeypatch, model)
    HfReader(model).predicting_states([np.arange(300) % 90], [np.arange(1, 300)])
    assert passes == [300]


@pytest.mark.parametrize(
    ("family", "tokens", "length"),
    [("full", 100_000, 671), ("full", 1_000_000, 67), ("window", 1_000_000, 1024), ("both", 1_000_000, 67)],
)
def test_a_mask_is_bounded_whatever_the_length(family: str, tokens: int, length: int, tmp_path: Path) -> None:
    assert Segments(model_of(FAMILIES[family], tmp_path)).length(tokens) == length


def test_a_model_that_keeps_a_state_is_read_in_one_pass(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 200}
    model = load_model(make_student(Student(config=config), tmp_path / "m", seed=0))
    assert not Segments(model).is_better(1_000_000)


def test_a_model_that_computes_something_else_with_a_cache_is_read_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(FAMILIES["full"], tmp_path)
    forward = model.model.forward

    def forgetful(*arguments: Any, **names: Any) -> Any:
        return forward(*arguments, **names | {"past_key_values": None, "use_cache": False})

    monkeypatch.setattr(model.model, "forward", forgetful)
    assert not Segments(model).is_better(1_000_000)
