"""Objectives whose weights leave no gradient."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.job.objectives import Objective

TERMS = """
from mopd_dataplane.job.objectives import Term

class Bonus(Term):
    base: float = 2.0

class Other(Bonus):
    pass

Again = Bonus
"""


@pytest.fixture(autouse=True)
def terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "effect_terms.py").write_text(TERMS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "effect_terms", raising=False)


@pytest.mark.parametrize(
    ("settings", "has_effect"),
    [
        ({"cross_entropy": {}}, True),
        ({"cross_entropy": {"weight": 0}}, False),
        ({"cross_entropy": {"weight": 0}, "entropy": {}}, True),
        ({"policy_gradient": {}}, True),
        ({"policy_gradient": {"teacher_coef": 0.0}}, False),
        ({"policy_gradient": {"teacher_coef": 0.0, "reward_coef": 1.0}}, True),
        ({"terms": {"effect_terms:Bonus": {}, "effect_terms:Again": {"weight": -1}}}, False),
        ({"terms": {"effect_terms:Bonus": {}, "effect_terms:Again": {"weight": -0.5}}}, True),
        ({"terms": {"effect_terms:Bonus": {}, "effect_terms:Again": {"weight": -1, "base": 3.0}}}, True),
        ({"terms": {"effect_terms:Bonus": {}, "effect_terms:Other": {"weight": -1}}}, True),
    ],
)
def test_weights_that_are_0_or_cancel_have_no_effect(settings: dict[str, Any], has_effect: bool) -> None:
    assert Objective.model_validate(settings).has_effect is has_effect


def test_the_weights_are_shown_with_their_terms() -> None:
    objective = Objective.model_validate({
        "policy_gradient": {"teacher_coef": 0.0}, "terms": {"effect_terms:Bonus": {"weight": -0.5}},
    })  # fmt: skip
    assert objective.weights_text == "policy_gradient 1 of coefficients 0, effect_terms:Bonus -0.5"
