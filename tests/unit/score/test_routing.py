"""The routing that a comparison of teachers proposes."""

from __future__ import annotations

import math
import tomllib
from typing import Any

from mopd_dataplane.score.routing import Choice, propose_routing, routing_toml


def row(domain: str, teacher: str, **figures: Any) -> dict[str, Any]:
    plain = {"discrimination": 0.8, "right_logprob": -0.4, "calibration_error": 0.05, "reverse_kl": 0.3, "failed": {}}
    return {"domain": domain, "teacher": teacher, **plain, **figures}


def test_each_criterion_decides_where_those_before_it_tie() -> None:
    rows = [
        row("a", "one", discrimination=0.6), row("a", "two", right_logprob=-2.0),
        row("b", "one", discrimination=0.83, right_logprob=-0.9), row("b", "two"),
        row("c", "one", calibration_error=0.2), row("c", "two", reverse_kl=0.9),
        row("d", "one", reverse_kl=0.31), row("d", "two"),
        row("e", "one"), row("e", "two"),
    ]  # fmt: skip
    assert propose_routing(rows) == [
        Choice("a", "two", "right over wrong 0.80, next one 0.60"),
        Choice("b", "two", "log p of right answers -0.40, next one -0.90"),
        Choice("c", "two", "calibration error 0.05, next one 0.20"),
        Choice("d", "two", "distance 0.30, next one 0.31"),
        Choice("e", "one", "equal to two in every figure"),
    ]


def test_answers_of_one_kind_leave_the_choice_to_the_other_figures() -> None:
    unknown = {"discrimination": math.nan, "calibration_error": math.nan}
    wrong_only = {**unknown, "right_logprob": math.nan}
    rows = [
        row("right", "one", **unknown, right_logprob=-3.0), row("right", "two", **unknown),
        row("wrong", "one", **wrong_only, reverse_kl=2.0), row("wrong", "two", **wrong_only),
    ]  # fmt: skip
    assert [choice.teacher for choice in propose_routing(rows)] == ["two", "two"]


def test_a_teacher_that_fails_a_check_is_proposed_only_without_another() -> None:
    broken = {"failed": {"uniform": "…"}}
    rows = [row("a", "one", discrimination=0.99, **broken), row("a", "two"), row("b", "one", **broken)]
    one, other = propose_routing(rows)
    assert (one.teacher, one.reason) == ("two", "the only teacher without a failed check")
    assert other.teacher == "one"
    assert other.reason.endswith("every teacher fails a check")


def test_the_proposal_is_toml_for_a_job() -> None:
    choices = [Choice("sums", "adder", "…"), Choice("long words", "speller", "…"), Choice("new", "adder", "…")]
    text = routing_toml(choices, {"sums": "adder", "long words": "adder"})
    assert tomllib.loads(text) == {"routing": {"sums": "adder", "long words": "speller", "new": "adder"}}
    assert [line.partition("# ")[2].partition(";")[0] for line in text.splitlines()[1:]] == [
        "as now", "now adder", "not routed yet"
    ]  # fmt: skip
