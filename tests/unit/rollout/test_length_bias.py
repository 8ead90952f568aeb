"""The length-bias experiment at a size that fits here: resume is exact, every control is caught."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.bench import length_bias, length_stats
from mopd_dataplane.bench.length_stats import equivalence


def test_resume_is_exact_and_the_controls_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_stats, "PERMUTATIONS", 299)
    monkeypatch.setattr(length_bias, "MAX_NEW", 150)
    plot = tmp_path / "plot.png"
    report = length_bias.measure(250, dose=0.5, plot=plot, resume_kills=6)
    arms = report["arms"]
    assert arms["B"]["identical"] == arms["D"]["identical"] == 250
    same = arms["B"]["equivalence"]
    assert (same["ratio"], same["low"], same["high"]) == (1, 1, 1)
    assert same["p_value"] < 1e-9
    for control in "CEG":
        assert arms[control]["p_value"] < 0.01
        assert arms[control]["difference_percent"] < -10
    assert arms["F"]["p_value"] < 0.01
    assert arms["F"]["difference_percent"] > 10
    assert arms["F"]["equivalence"]["p_value"] > 0.5
    assert abs(arms["H"]["difference_percent"]) < 15, "another draw of the same law"
    assert arms["H"]["identical"] < 250
    assert 0.4 < arms["C"]["tilt_over_hazard"] < 2
    assert {name for name, arm in arms.items() if arm["prompts_lost"]} == {"E", "G"}
    low, middle, high = (report["doses"][dose]["difference_percent"] for dose in ("0.1", "0.25", "0.5"))
    assert low > middle > high
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_tilt_is_the_one_the_theory_predicts_at_every_dose() -> None:
    report = length_bias.measure(10_000)
    assert report["arms"]["B"]["identical"] == 10_000
    doses = [report["doses"][str(dose)] for dose in length_bias.DOSES]
    shorter = [dose["difference_percent"] for dose in doses]
    assert 0 > shorter[0] > shorter[1] > shorter[2]
    assert all(0.8 < dose["tilt_over_hazard"] < 1.2 for dose in doses)


def lognormal(seed: int, count: int = 4000) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(3, 0.9, count).astype(np.int64) + 1


def test_equal_means_are_called_equal_only_when_pairs_say_so() -> None:
    lengths = lognormal(0)
    nearly = lengths + np.random.default_rng(1).integers(-1, 2, len(lengths))
    paired = equivalence(nearly, lengths)
    assert paired.p_value < 1e-3
    assert 0.98 < paired.low < paired.ratio < paired.high < 1.02
    assert equivalence(lognormal(2), lengths).p_value > 0.05, "unpaired, this many samples cannot show it"


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_means_that_differ_are_not_called_equal(factor: float) -> None:
    lengths = lognormal(0) * 100
    tilted = equivalence((lengths * factor).astype(np.int64), lengths)
    assert tilted.p_value > 0.99
    assert tilted.ratio == pytest.approx(factor, abs=1e-3)


def test_the_equivalence_test_keeps_its_error_rate_at_the_margin() -> None:
    """Means that differ by exactly the margin are called equal in about 5 % of trials, not more."""
    draw = np.random.default_rng(3)
    wrong = 0
    for _ in range(400):
        theirs = draw.lognormal(5, 0.5, 500)
        ours = theirs * 1.02 + draw.normal(0, 5, 500)
        wrong += equivalence(ours, theirs).p_value < 0.05
    assert 5 <= wrong <= 36
