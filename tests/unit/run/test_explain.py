"""Training FLOPs follow the published count, from the shapes of a policy on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mopd_dataplane.run.steps.plan import train_flops


@pytest.mark.parametrize(("tied", "multiplying"), [(False, 4 * 4 + 10 * 4), (True, 4 * 4 + 10 * 4)])
def test_flops_count_what_multiplies(tmp_path: Path, tied: bool, multiplying: int) -> None:
    tensors = {"model.embed_tokens.weight": np.zeros((10, 4), np.float32), "q.weight": np.zeros((4, 4), np.float32)}
    if not tied:
        tensors["lm_head.weight"] = np.zeros((10, 4), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    shape = {"hidden_size": 4, "num_hidden_layers": 3, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    lengths = np.array([5, 7])
    expected = 6 * multiplying * 12 + 6 * 3 * 4 * (25 + 49)
    assert train_flops(tmp_path, lengths) == expected


def test_a_policy_that_is_not_there_has_no_count(tmp_path: Path) -> None:
    assert math.isnan(train_flops(tmp_path / "none", np.array([5])))
