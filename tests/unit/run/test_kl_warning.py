"""The warnings when a student moves away from its teachers, or from its own samples, in its first steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mopd_dataplane.run.steps.train_records import kl_warning


def test_a_rise_is_named_with_both_values_and_the_next_step() -> None:
    warning = kl_warning(np.linspace(0.1, 0.9, 12).tolist())
    assert "from 0.209 to 0.791 nat per token over the first 12 steps" in warning
    assert "train.learning_rate" in warning


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
    assert kl_warning(values) == ""


def test_noise_alone_is_rarely_taken_for_a_rise() -> None:
    draw = np.random.default_rng(0)
    said = [bool(kl_warning((0.3 + 0.1 * draw.standard_normal(24)).tolist())) for _ in range(400)]
    assert np.mean(said) < 0.05


def test_a_clear_rise_under_noise_is_seen() -> None:
    draw = np.random.default_rng(1)
    rise = np.linspace(0.2, 0.6, 24)
    said = [bool(kl_warning((rise + 0.05 * draw.standard_normal(24)).tolist())) for _ in range(50)]
    assert all(said)


SAMPLED = {  # reverse KL of the first 16 steps of jobs/near's icepop at seed 0, by learning rate
    2e-4: [0.057, 0.017, 0.045, 0.045, 0.029, 0.057, 0.036, 0.02, 0.044, 0.028, 0.024, 0.041, 0.027, 0.046, 0.011,
           0.027],
    1.5e-3: [0.057, 0.016, 0.039, 0.025, -0.021, 0.015, -0.058, -0.137, -0.186, -0.298, -0.318, -0.298, -0.414, -0.38,
             -0.464, -0.422],
}  # fmt: skip


def test_an_estimate_below_zero_is_a_student_that_left_its_samples() -> None:
    """The run at the high rate ends with 2 % of the tuning prompts right, from 43; that at the low one with 42."""
    assert "fell from 0.023 to -0.396 nat per token" in kl_warning(SAMPLED[1.5e-3])
    assert kl_warning(SAMPLED[2e-4]) == ""


def test_noise_around_zero_is_no_estimate_below_it() -> None:
    draw = np.random.default_rng(2)
    said = [kl_warning((0.02 * draw.standard_normal(24)).tolist()) for _ in range(400)]
    assert not any("below 0" in warning for warning in said)
