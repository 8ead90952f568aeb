"""What a config implies: how far a model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from advice import advises
from families import FAMILIES

from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.models.architecture import UNLIMITED, context_length, has_length_dependent_rope
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.train.microbatch import MicroBatch
from mopd_dataplane.train.student import Student


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 131_072}, "vision_config": {}}, 131_072),
        ({"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131_072),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 2048),
        (
            {
                "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 8192},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            8192,
        ),
        ({"model_type": "mamba2"}, UNLIMITED),
    ],
)  # fmt: skip
def test_context_length(settings: dict[str, Any], length: int) -> None:
    assert context_length(settings) == length


def test_the_trainer_refuses_a_sequence_whose_states_depend_on_its_neighbours(tmp_path: Path) -> None:
    folder = make_student(StudentSettings(config=FAMILIES["llama, dynamic NTK"]), tmp_path / "model", seed=0)
    model = load_model(folder)
    assert has_length_dependent_rope(model.config)
    student = Student(model)
    batch = _batch(129)
    with advises("frequencies are fixed (yarn)") as refused:
        student(batch, lambda states, head: states)
    assert "129 tokens is past the original context" in str(refused.value)
    assert "set plan.pack_tokens = 128 and plan.overlong = 'drop'" in str(refused.value)
    assert student(_batch(128), lambda states, head: states).shape == (1, 64)


def _batch(length: int) -> MicroBatch:
    """One sequence of a length, whose last token is trained."""
    fields: dict[str, Any] = dict.fromkeys(MicroBatch.__dataclass_fields__)
    fields |= {
        "input_ids": torch.full((1, length), 5), "position_ids": torch.arange(length)[None],
        "sequence_lengths": [length], "predictors": torch.tensor([length - 2]),
    }  # fmt: skip
    return MicroBatch(**fields)
