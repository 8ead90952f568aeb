"""The length-bias experiment at a size that fits here: resume is exact, every control is caught."""

from __future__ import annotations

from pathlib import Path

from mopd_dataplane.bench import length_bias


def test_resume_is_exact_and_the_controls_are_rejected(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(length_bias, "PERMUTATIONS", 299)
    monkeypatch.setattr(length_bias, "MAX_NEW", 150)
    plot = tmp_path / "plot.png"
    found = length_bias.measure(250, dose=0.5, plot=plot, resume_kills=6)
    arms = found["arms"]
    assert arms["B"]["identical"] == arms["D"]["identical"] == 250
    for control in "CEG":
        assert arms[control]["p_value"] < 0.01
        assert arms[control]["difference_percent"] < -10
    assert arms["F"]["p_value"] < 0.01
    assert arms["F"]["difference_percent"] > 10
    assert 0.4 < arms["C"]["tilt_over_hazard"] < 2
    assert plot.read_bytes().startswith(b"\x89PNG")
