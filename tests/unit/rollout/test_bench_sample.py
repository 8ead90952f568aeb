"""`mopd bench sample`: figures of every sampler, with and without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.bench.sample import CUTS, measure
from mopd_dataplane.errors import InputError
from mopd_dataplane.rollout.engines.sampling import SAMPLERS


def test_every_sampler_has_its_turn_at_every_cut(tiny_model: Path) -> None:
    plain, real = measure(300, 3), measure(1, 2, model=tiny_model)
    for figures in (plain, real):
        costs = [value for name, value in figures.items() if name.endswith("ns_per_entry")]
        assert len(costs) == len(SAMPLERS) * len(CUTS)
        assert min(costs) > 0
    assert (plain["vocabulary"], plain["slots"]) == (300, 3)
    assert real["vocabulary"] > 1  # the model's
    assert real["decode_step_ms"] > 0
    assert "decode_step_ms" not in plain


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="slots 0 must be at least 1"):
        measure(10, 0)
