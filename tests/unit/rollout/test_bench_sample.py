"""`mopd bench sample` and `mopd bench decode`: figures of every sampler, and of a step beside generate's."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_dataplane.bench import decode
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


def test_a_step_of_every_model_is_measured_beside_generate() -> None:
    figures = decode.measure("tiny", 2, 4)
    assert list(figures) == list(decode.MODELS)
    for own in figures.values():
        assert own.keys() == {"parameters", "sampler_ms", "generate_ms", "ratio"}
        assert min(own.values()) > 0


def test_unknown_models_and_impossible_lengths_are_refused() -> None:
    with pytest.raises(InputError, match=r"gpt5, huge: take a size of tiny, mid and models of llama"):
        decode.measure("huge", 2, 4, models=["gpt5"])
    with pytest.raises(InputError, match="tokens 3 at least 4"):
        decode.measure("tiny", 2, 3)
