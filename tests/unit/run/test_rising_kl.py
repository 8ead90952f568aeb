"""The warning when a student moves away from its teachers in its first steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mopd_dataplane.run.steps.train import rising_kl


def test_a_rise_is_named_with_both_values_and_the_next_step() -> None:
    found = rising_kl(np.linspace(0.1, 0.9, 12).tolist())
    assert "from 0.209 to 0.791 nat per token over the first 12 steps" in found
    assert "train.learning_rate" in found


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(0.9, 0.1, 12).tolist(),
        [0.5] * 12,
        [0.5, 0.52] * 6,
        [0.1, 0.9, 0.9, 0.9],
        [math.nan] * 12,
        [],
    ],
    ids=["falls", "stays", "wavers", "too few steps", "not measured", "no step"],
)
def test_nothing_is_said_without_a_clear_rise(values: list[float]) -> None:
    assert rising_kl(values) == ""


def test_noise_alone_is_rarely_taken_for_a_rise() -> None:
    draw = np.random.default_rng(0)
    said = [bool(rising_kl((0.3 + 0.1 * draw.standard_normal(24)).tolist())) for _ in range(400)]
    assert np.mean(said) < 0.05


def test_a_clear_rise_under_noise_is_seen() -> None:
    draw = np.random.default_rng(1)
    rise = np.linspace(0.2, 0.6, 24)
    said = [bool(rising_kl((rise + 0.05 * draw.standard_normal(24)).tolist())) for _ in range(50)]
    assert all(said)
