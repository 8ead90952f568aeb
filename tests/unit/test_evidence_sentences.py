"""Sentences of docs/evidence.md that compare arms say what the committed answers say: shares, differences and McNemar's
p, computed here from the strings of right and wrong, and looked up in the page's prose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from right_answers import Answers, gain, nearest, p, right, tenths, whole

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
SORTING, SPELLING, SPIRALS = "number_sorting", "spell_backward", "spiral_matrix"
ALL = (SORTING, SPELLING, SPIRALS)
TAUGHT = ("date", "json", "larger")


@cache
def answers(job: str, arm: str, seed: int = 0) -> Answers:
    """Of an arm's last policy."""
    result = json.loads((ROOT / "jobs" / job / "results" / f"{arm}-{seed}.json").read_text())
    return {domain: said["correct"] for domain, said in result["curve"][-1]["right"].items()}


def arm(name: str, seed: int = 0) -> Answers:
    """Of jobs/alternatives."""
    return answers("alternatives", name, seed)


def near(name: str) -> Answers:
    """Of jobs/near."""
    return answers("near", name)


def smol(name: str) -> Answers:
    """Of jobs/smollm2-mopd."""
    return answers("smollm2-mopd", name)


def of_seeds(name: str, other: str, *domains: str) -> list[float]:
    """Gain over another arm of jobs/alternatives, seed by seed."""
    return [gain(arm(name, seed), arm(other, seed), *domains) for seed in range(3)]


def at_equal_cost() -> Iterator[str]:
    """What is said below the table of jobs/alternatives."""
    curve = json.loads((ROOT / "jobs/alternatives/results/mopd-exact-0.json").read_text())["curve"]
    yield "{:g}, {:g}, {:g} and {:g} % of sorting".format(
        *(right({SORTING: point["right"][SORTING]["correct"]}, SORTING) for point in curve)
    )
    ahead = [gain(arm(name, 1), arm("mopd-exact", 1), *ALL) for name in ("joint-sft", "teacher-sft", "teacher-forward")]
    yield f"by {nearest(min(ahead))} to {nearest(max(ahead))} points at seed 1"
    for name, said in (("mopd-sampled", "{} % at the three rates without it"), ("mopd-baseline", "and {} % with it")):
        tried = json.loads((ROOT / f"jobs/alternatives/results/{name}-0.json").read_text())["tried"]
        yield said.format(tenths([100 * one["accuracy"] for one in tried]))
    lower, higher, high = of_seeds("mopd-baseline", "mopd-sampled", *ALL)
    chances = [p(arm("mopd-baseline", seed), arm("mopd-sampled", seed), *ALL) for seed in range(3)]
    yield (
        f"{-lower:.1f} points lower at seed 0 (p = {chances[0]:.2f}), {higher:.1f} higher at seed 1 "
        f"(p = {chances[1]:.2f}) and {high:.1f} higher at seed 2 (p = {chances[2]:.2f})"
    )


def claims() -> Iterator[str]:
    """What the table of claims answers."""
    yield f"end {whole(of_seeds('group-4', 'mopd-exact', *ALL))} points lower"
    yield f"by {whole(of_seeds('teacher-forward', 'mopd-exact', *ALL))} points"
    weak = [[nearest(right(arm(name, seed), SPIRALS)) for name in ("mopd-exact", "gkd", "teacher-sft")]
            for seed in (1, 2)]  # fmt: skip
    yield f"exact MOPD ends at {weak[0][0]} %, GKD with half of the teachers' answers at {weak[0][1]} %"
    yield f"at 41 % (seed 2) {weak[1][0]}, {weak[1][1]} and {weak[1][2]} %"
    ends = [
        np.mean([right(arm(name, seed), *ALL) for seed in range(3)])
        for name in ("weak-on-policy", "weak-imitation-first")
    ]
    yield f"reach {ends[0]:.1f} % on-policy and {ends[1]:.1f} % with imitation first"
    spelt = [
        np.mean([right(arm(name, seed), SPELLING) for seed in range(3)]) for name in ("sorter", "base", "wrong-teacher")
    ]
    yield f"which spells {spelt[0]:.1f} % right, the student falls from {spelt[1]:.0f} to {spelt[2]:.0f} %"
    yield f"{gain(arm('wrong-teacher', 2), arm('mopd-exact', 2), SPIRALS):.1f} points better"
    yield f"adds {whole(of_seeds('two-teachers', 'one-teacher', SORTING))} points of its domain"
    third = of_seeds("mopd-exact", "two-teachers", SPIRALS)
    yield (
        f"{third[0]:.0f} and {nearest(third[2])} at seeds 0 and 2 (p < 0.001) and {third[1]:.1f} at seed 1 "
        f"(p = {p(arm('mopd-exact', 1), arm('two-teachers', 1), SPIRALS):.2f})"
    )
    yield f"adds nothing significant to the base ({tenths(of_seeds('one-teacher', 'base', SPELLING))} points"
    yield f"three are above it ({tenths(of_seeds('mopd-exact', 'base', *ALL))})"


def from_a_near_teacher() -> Iterator[str]:
    """What is said below the table of jobs/near."""
    base, exact = near("base"), near("exact")
    lost = {name: p(near(name), base, SPELLING) for name in ("exact", "corrected-64", "skew-reverse")}
    assert max(lost.values()) < 0.001
    kept = {name: right(near(name), SPELLING) for name in ("tail-8", "skew-forward", "corrected-8")}
    chance = {name: p(near(name), base, SPELLING) for name in kept}
    yield f"the student's top 8 with a tail {kept['tail-8']:.1f} (p = {chance['tail-8']:.3f})"
    yield f"skewed forward {kept['skew-forward']:.1f} (p = {chance['skew-forward']:.2f})"
    yield f"({kept['corrected-8']:.1f}, p = {chance['corrected-8']:.2f})"
    skewed = near("skew-reverse")
    yield f"({gain(skewed, exact, SORTING):.1f} points, p = {p(skewed, exact, SORTING):.2f})"
    below = gain(exact, near("skew-forward"), SORTING)
    yield f"skewed forward is {below:.1f} below it (p = {p(near('skew-forward'), exact, SORTING):.3f})"


def of_a_pretrained_model() -> Iterator[str]:
    """What is said below the table of jobs/smollm2-mopd."""
    base, exact = smol("base"), smol("mopd-exact")
    capitals = [right(one, "capital") for one in (base, smol("grpo"))]
    yield f"({capitals[0]:.1f} to {capitals[1]:.1f} %, p = {p(smol('grpo'), base, 'capital'):.3f})"
    parts = [right(one, "larger") for one in (exact, smol("mopd-sampled"))]
    yield f"({parts[0]:.0f} against {parts[1]:.0f} %, p = {p(exact, smol('mopd-sampled'), 'larger'):.3f})"
    parts = [right(one, *TAUGHT) for one in (exact, smol("mopd-sampled"))]
    yield f"({parts[0]:.0f} and {parts[1]:.0f} %, p = {p(exact, smol('mopd-sampled'), *TAUGHT):.2f})"
    yield f"({right(smol('grpo'), *TAUGHT):.0f} %, p = {p(exact, smol('grpo'), *TAUGHT):.2f})"


SAID = [*at_equal_cost(), *claims(), *from_a_near_teacher(), *of_a_pretrained_model()]


@pytest.mark.parametrize("sentence", SAID)
def test_the_page_says_what_the_answers_say(sentence: str) -> None:
    assert " ".join(sentence.split()) in PAGE


def test_rewards_and_sampled_tokens_do_not_differ_from_the_base() -> None:
    arms = ("mopd-sampled", "mopd-baseline", "mopd-outcome", "grpo", "cascade")
    moved = [
        (name, seed, domain)
        for name in arms for seed in range(3) for domain in ALL
        if p(arm(name, seed), arm("base", seed), domain) < 0.05
    ]  # fmt: skip
    assert moved == [("mopd-baseline", 2, SPIRALS), ("cascade", 2, SPELLING), ("cascade", 2, SPIRALS)]
    assert all(p(arm(name, seed), arm("base", seed), *ALL) > 0.05 for name in arms for seed in range(3))
