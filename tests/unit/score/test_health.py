"""Figures of a signal where they are known by construction, and the checks that each broken one fails."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mopd_dataplane.score.health import Health, ReadSample, measure, merged
from mopd_dataplane.score.health_checks import CHECKS, Evidence, Probe, findings

ROOT = Path(__file__).parents[3]
VOCABULARY = 100
GUESS = math.log(VOCABULARY)


def healthy(tokens: int = 40, *, seed: int = 0) -> ReadSample:
    rng = np.random.default_rng(seed)
    teacher = -rng.gamma(1.0, 0.5, tokens).astype(np.float32)
    return ReadSample(
        teacher=teacher,
        student=(teacher + rng.normal(0, 0.2, tokens)).astype(np.float32),
        entropy=rng.uniform(0, 2, tokens).astype(np.float32),
        is_first_choice=rng.random(tokens) < 0.7,
        has_ended=True,
    )


def like(values: NDArray[np.float32], entropy: float | None = None) -> ReadSample:
    student = np.full(len(values), -0.5, np.float32)
    return ReadSample(
        teacher=values, student=student,
        entropy=None if entropy is None else np.full(len(values), entropy, np.float32),
    )  # fmt: skip


def health_of(*samples: ReadSample) -> Health:
    health = measure(samples, VOCABULARY)
    assert health is not None
    return health


def failed(health: Health | None = None, **probes: object) -> set[str]:
    evidence = Evidence("teacher", "domain", VOCABULARY, health, **probes)  # type: ignore[arg-type]
    return {finding.check for finding in findings(evidence)}


def test_a_healthy_signal_fails_no_check() -> None:
    samples = [healthy(seed=seed) for seed in range(8)]
    health = health_of(*samples)
    assert (health.uniform, health.constant, health.zero, health.collapsed) == (0, 0, 0, 0)
    assert health.collapse_position is None
    assert health.mean_logprob == pytest.approx(np.concatenate([one.teacher for one in samples]).mean(), rel=1e-6)
    assert health.end_logprob == pytest.approx(np.mean([one.teacher[-1] for one in samples]), rel=1e-6)
    assert failed(health) == set()


def test_figures_of_parts_are_those_of_the_whole() -> None:
    samples = [healthy(10 + 7 * seed, seed=seed) for seed in range(4)]
    samples += [like(np.full(20, -GUESS, np.float32)), like(-np.linspace(0.1, 2, 9, dtype=np.float32))]
    whole, parts = (
        health_of(*samples),
        merged([health_of(*samples[:1]), health_of(*samples[1:4]), health_of(*samples[4:])]),
    )
    for name in Health.__dataclass_fields__:
        if name not in ("student_logprob",):  # float32 sums round otherwise
            assert getattr(parts, name) == pytest.approx(getattr(whole, name)), name
    assert parts.student_logprob == pytest.approx(whole.student_logprob, rel=1e-6)


def test_a_uniform_signal_is_named_with_and_without_entropies() -> None:
    for entropy in (None, GUESS):
        health = health_of(like(np.full(64, -GUESS, np.float32), entropy))
        assert health.uniform == 1
        assert {"uniform", "constant", "collapse"} <= failed(health)
    by_chance = health_of(like(np.full(64, -GUESS, np.float32), 1.0))
    assert by_chance.uniform == 0, "an entropy far from the guess says that the log-prob hit it by chance"


def test_zeros_count_only_where_the_student_doubted() -> None:
    certain = ReadSample(teacher=np.zeros(64, np.float32), student=np.full(64, -1e-4, np.float32))
    assert failed(health_of(certain)) == set()
    assert {"zero", "collapse"} <= failed(health_of(like(np.zeros(64, np.float32))))


def test_the_position_of_a_collapse_is_reported() -> None:
    broken = healthy(60).teacher.copy()
    broken[23:] = -GUESS
    health = health_of(like(broken), like(healthy(60, seed=1).teacher))
    assert (health.collapse_position, health.collapsed) == (23, 0.5)
    (finding,) = [one for one in findings(Evidence("t", "d", VOCABULARY, health)) if one.check == "collapse"]
    assert "the first at trained token 23" in finding.text


def test_a_teacher_that_does_not_end_answers_is_named() -> None:
    samples = []
    for seed in range(6):
        one = healthy(seed=seed)
        teacher = one.teacher.copy()
        teacher[-1] = -9.0
        samples.append(ReadSample(teacher=teacher, student=one.student, has_ended=True))
    assert failed(health_of(*samples)) == {"end"}


def test_probes_name_a_teacher_that_cannot_lead() -> None:
    good, student = Probe(tokens=80, reference=-0.3, entropy=0.4, own=-0.1), Probe(tokens=80, reference=-1.5)
    assert failed(probe=good, student=student, others={"other": Probe(tokens=80, reference=-0.6)}) == set()
    assert failed(probe=good, student=Probe(tokens=80, reference=-0.1)) == {"lead"}
    assert failed(probe=good, student=Probe(tokens=80, reference=-0.3)) == {"base"}
    assert failed(probe=good, student=student, others={"other": Probe(tokens=80, reference=0.0)}) == set()
    weak = Probe(tokens=80, reference=-1.0, entropy=1.0, own=-0.2)
    assert failed(probe=weak, student=student, others={"other": good}) == {"rival"}
    assert failed(probe=Probe(tokens=80, reference=-0.9, entropy=2.0, own=-3.0)) == {"flat", "own"}
    assert failed(probe=Probe(tokens=8, reference=-9.0)) == set(), "too few tokens to judge by"


def test_a_message_names_everything_that_helps() -> None:
    evidence = Evidence("sorter", "sorting", VOCABULARY, health_of(like(np.full(64, -GUESS, np.float32), GUESS)))
    text = next(finding.text for finding in findings(evidence) if finding.check == "uniform")
    for part in (
        "teacher 'sorter'",
        "domain 'sorting'",
        "check uniform",
        "is 1,",
        "at most 0.2",
        "Likely cause",
        "load",
    ):
        assert part in text, part


def test_the_page_has_every_check_with_its_reason() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "signal_health.md").read_text())
    for check in CHECKS:
        assert f"| `{check.name}` | {check.what} |" in page
        assert check.reason in page
