"""Sentences of docs/evidence.md that compare arms say what the committed answers say: shares, differences and McNemar's
p, computed here from the strings of right and wrong, and looked up in the page's prose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from right_answers import Answers, gain, listed, nearest, p, right, tenths, whole

from mopd_dataplane.job.load import load_job
from mopd_dataplane.prompts import load_prompts

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
SORTING, SPELLING, SPIRALS = "number_sorting", "spell_backward", "spiral_matrix"
ALL = (SORTING, SPELLING, SPIRALS)
TAUGHT = ("date", "json", "larger")
QUESTIONS = ("larger", "smaller")


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


def pairs(name: str, seed: int = 0) -> Answers:
    """Of jobs/conflict, and under `both` what is right about both numbers of a pair."""
    found = answers("conflict", name, seed)
    both = zip(*(found[domain] for domain in QUESTIONS), strict=True)
    return {**found, "both": "".join(str(int(one == ("1", "1"))) for one in both)}


def nats(name: str, what: str, seeds: Sequence[int] = (0, 1)) -> str:
    """`kl` or `entropy` of an arm of jobs/conflict by seed, a mean over both questions."""
    files = [ROOT / "jobs" / "conflict" / "results" / f"{name}-{seed}.json" for seed in seeds]
    moved = [json.loads(file.read_text())["moved"] for file in files]
    return listed(f"{np.mean([one[domain][what] for domain in QUESTIONS]):.2f}" for one in moved)


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


def of_conflicting_rewards() -> Iterator[str]:
    """What is said below the table of jobs/conflict, and of it in the table of claims; two figures are of two seeds."""
    seeds = (0, 1)
    own, lost = ([gain(pairs("larger", seed), pairs("base", seed), domain) for seed in seeds] for domain in QUESTIONS)
    again, new = ([gain(pairs("cascade", s), pairs("larger", s), domain) for s in seeds] for domain in QUESTIONS)
    yield f"a specialist gains {whole(own)} points of its own question and loses {whole(lost)} of the opposite one"
    yield f"on top of it costs it {whole(again)}"
    yield f"number gains {whole(own)} points of its own question and loses {whole(lost)} of the opposite one"
    other = [nearest(gain(pairs("smaller", 1), pairs("base", 1), domain)) for domain in ("smaller", "larger")]
    yield "that of the smaller number gains {} and loses {} at seed 1".format(*other)
    capitals = [right(pairs(name, 1), "capital") for name in ("base", "smaller")]
    chance = p(pairs("smaller", 1), pairs("base", 1), "capital")
    yield f"loses capitals ({capitals[0]:.1f} to {capitals[1]:.1f} %, p = {chance:.3f})"
    yield (
        f"take {whole(again)} points of it away again (p < 0.001 each) and bring {nearest(new[0])} "
        f"(p = {p(pairs('cascade'), pairs('larger'), 'smaller'):.2f}) and {nearest(new[1])} (p < 0.001) of the new one"
    )
    yield f"right about both numbers of {tenths([right(pairs('base', s), 'both') for s in seeds])} % of the pairs. No"
    less = gain(pairs("smaller"), pairs("base"), "smaller")
    yield f"has {nearest(less)} points less than the base of the very question"
    both = [right(pairs("grpo", s), "both") for s in seeds]
    chance = p(pairs("grpo", 1), pairs("base", 1), "both")
    yield f"leave {both[0]:.1f} % of the pairs at seed 0 (p < 0.001) and {both[1]:.1f} % at seed 1 (p = {chance:.2f})"


def of_terms_against_conflict() -> Iterator[str]:
    """The same of a KL to the start and of an entropy bonus, and of distillation."""
    seeds = (0, 1)
    plain, held = ([pairs(name, s) for s in seeds] for name in ("cascade", "cascade-strong-kl"))
    yield (
        f"ends {nats('cascade-strong-kl', 'kl')} nat from its start where `cascade` ends {nats('cascade', 'kl')} away"
    )
    first = f"has {right(held[1], 'larger'):.1f} % of the larger numbers right where `cascade` has"
    second = f"({right(held[1], 'smaller'):.1f} against {right(plain[1], 'smaller'):.1f} %"
    yield (
        f"{first} {right(plain[1], 'larger'):.1f} (p < 0.001), and as many of the smaller ones {second}, "
        f"p = {p(held[1], plain[1], 'smaller'):.2f})"
    )
    shares = [right(one, "larger") for one in (held[0], plain[0])]
    yield f"({shares[0]:.1f} against {shares[1]:.1f} %, p = {p(held[0], plain[0], 'larger'):.2f})"
    mild = pairs("cascade-kl", 1)
    apart = max(abs(gain(mild, plain[1], domain)) for domain in QUESTIONS)
    chances = [p(mild, plain[1], domain) for domain in QUESTIONS]
    yield f"0.04 ends {nats('cascade-kl', 'kl')} away"
    yield f"at seed 1 within {apart:.1f} points of each (p = {chances[0]:.2f} and {chances[1]:.2f})"
    yield f"{nats('cascade-strong-entropy', 'entropy')} nat where `cascade` has {nats('cascade', 'entropy')}; 0.01 does"
    yield f"({nats('cascade-entropy', 'entropy', (0,))}, seed 0)"
    wide = pairs("cascade-strong-entropy", 1)
    fewer = [(-gain(wide, plain[1], domain), p(wide, plain[1], domain)) for domain in QUESTIONS]
    yield (
        f"at seed 1 {fewer[0][0]:.1f} points of the larger numbers (p = {fewer[0][1]:.2f}) and {fewer[1][0]:.1f} of "
        f"the smaller ones (p = {fewer[1][1]:.2f}) are lost"
    )
    yield f"numbers of {tenths([right(pairs('mopd-exact', s), 'both') for s in seeds])} % of the pairs, more than any"
    teachers, student = ([[right(pairs(name or domain, s), domain) for domain in QUESTIONS] for s in seeds]
                         for name in ("", "mopd-exact"))  # fmt: skip
    yield (
        f"teachers' {tenths(teachers[0])} % at seed 0 it has {tenths(student[0])}, of {tenths(teachers[1])} at seed 1 "
        f"{tenths(student[1])}"
    )
    more, less = ([gain(pairs("mopd-exact", s), pairs("base", s), domain) for s in seeds] for domain in QUESTIONS)
    yield f"{whole(more)} points more than the base of the larger numbers, and {whole(less)} less of the smaller ones"
    neither = list(zip(*(pairs("mopd-exact")[domain] for domain in QUESTIONS), strict=True)).count(("0", "0"))
    yield f"wrong about both numbers of {100 * neither / len(pairs('mopd-exact')['larger']):.1f} % of the pairs"


ORDER = ("spell-high", "sort-low", "spiral-high", "spell-low", "spiral-low", "spell-max", "sort-high", "sort-max",
         "sum-low", "sum-high")  # fmt: skip
"""Of jobs/teacher-count: its domains, each with a teacher, in the order in which they are added."""
COUNTS = {"generalist": 0, "one": 1, "two": 2, "three": 3, "five": 5, "ten": 10}


def counted(name: str) -> Answers:
    return answers("teacher-count", name)


def of_added_teachers() -> Iterator[str]:
    """What is said below the table of jobs/teacher-count, and of it in the table of claims."""
    names = list(COUNTS)
    added = {b: gain(counted(b), counted(a), *ORDER[COUNTS[a] : COUNTS[b]]) for a, b in pairwise(names)}
    lost = [-gain(counted(name), counted("generalist"), *ORDER[COUNTS[name] :]) for name in ("one", "two", "three")]
    means = {name: right(counted(name), *ORDER) for name in names}
    first = whole([added[name] for name in ("one", "two", "three")])
    yield f"The first three add {first} points in their own domains"
    yield f"by {lost[0]:.1f}, {lost[1]:.1f} and {lost[2]:.1f} points of their mean"
    yield (
        f"stays where it began ({means['generalist']:.1f} %, then "
        f"{tenths([means[name] for name in ('one', 'two', 'three')])}"
    )
    yield f"{added['five']:.0f} points there, {means['five']:.1f} % in the mean"
    more = gain(counted("ten"), counted("generalist"), *ORDER)
    yield f"With all ten it is {means['ten']:.1f} %, {more:.1f} points above the generalist (p < 0.001)"
    yield (
        f"gain another {gain(counted('ten'), counted('five'), *ORDER[:5]):.1f} "
        f"(p = {p(counted('ten'), counted('five'), *ORDER[:5]):.3f})"
    )
    yield f"the first three add {first} points where they teach"
    apart = json.loads((ROOT / "jobs/teacher-count/results/ten-0.json").read_text())["teacher_distance"].values()
    yield f"The teachers are {min(apart):.2f} to {max(apart):.2f} nat per token from the generalist"
    yield f"all ten together bring {more:.1f} to the mean"


SAID = [
    *at_equal_cost(), *claims(), *from_a_near_teacher(), *of_a_pretrained_model(), *of_conflicting_rewards(),
    *of_terms_against_conflict(), *of_added_teachers(),
]  # fmt: skip


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


def test_rewards_in_conflict_move_what_the_page_says_and_not_the_capitals() -> None:
    everywhere = [file.stem.rpartition("-") for file in (ROOT / "jobs" / "conflict" / "results").glob("*.json")]
    arms = [(name, int(seed)) for name, _, seed in everywhere]
    fewer = [one for one in arms if p(pairs(*one), pairs("base", one[1]), "capital") < 0.05]
    assert fewer == [("smaller", 1)]
    assert max(p(pairs("smaller", 1), pairs("base", 1), domain) for domain in QUESTIONS) < 0.001
    for seed in (0, 1):
        base, larger, cascade, mopd = (pairs(name, seed) for name in ("base", "larger", "cascade", "mopd-exact"))
        assert max(p(larger, base, domain) for domain in QUESTIONS) < 0.001
        assert p(cascade, larger, "larger") < 0.001
        assert max(p(mopd, base, domain) for domain in (*QUESTIONS, "both")) < 0.001
        others = [right(pairs(*one), "both") for one in arms if one[1] == seed and one[0] != "mopd-exact"]
        assert right(mopd, "both") > max(others)
        alone = [right(pairs(name, seed), "both") for name in ("larger", "smaller", "cascade")]
        assert right(base, "both") > max(alone)
    assert p(pairs("grpo"), pairs("base"), "both") < 0.001
    assert p(pairs("cascade", 1), pairs("larger", 1), "smaller") < 0.001
    assert p(pairs("cascade-strong-kl", 1), pairs("cascade", 1), "larger") < 0.001
    for name in ("cascade-kl", "cascade-strong-entropy"):
        assert all(pairs(name)[domain] == pairs("cascade")[domain] for domain in QUESTIONS)


def test_which_number_of_a_pair_is_named() -> None:
    job = load_job(ROOT / "jobs" / "conflict")
    asked = [p for p in load_prompts("larger", job.domains["larger"]) if p.split == "eval"]
    numbers = [[int(one) for one in re.findall(r"\d+", json.loads(prompt.messages)[-1]["content"])] for prompt in asked]
    first = {"larger": [a > b for a, b in numbers], "smaller": [a < b for a, b in numbers]}

    def as_first(name: str, domain: str) -> float:
        """Share of answers that are right where the first number is, and wrong where it is not."""
        return float(
            np.mean([(one == "1") == right for one, right in zip(pairs(name)[domain], first[domain], strict=True)])
        )

    assert [as_first("cascade", domain) for domain in QUESTIONS] == [1, 1]
    assert all(as_first("smaller", domain) < 0.1 for domain in QUESTIONS)
    assert as_first("mopd-exact", "larger") > 0.85
    assert as_first("mopd-exact", "smaller") < 0.02


def test_what_added_teachers_bring_and_cost_is_told_from_chance() -> None:
    for before, name in pairwise(["generalist", "one", "two", "three"]):
        added, untaught = ORDER[COUNTS[before] : COUNTS[name]], ORDER[COUNTS[name] :]
        assert p(counted(name), counted(before), *added) < 0.003
        assert p(counted(name), counted("generalist"), *untaught) < 0.003
        assert p(counted(name), counted("generalist"), *ORDER) > 0.52
    assert p(counted("five"), counted("three"), *ORDER[3:5]) < 0.001
    assert p(counted("ten"), counted("generalist"), *ORDER) < 0.001
    assert max(gain(counted("ten"), counted("five"), domain) for domain in ("sort-max", "sum-low", "sum-high")) <= 0


def test_students_are_taught_by_the_teachers_that_the_table_says() -> None:
    job = load_job(ROOT / "jobs" / "teacher-count")
    for name, count in list(COUNTS.items())[1:]:
        assert set(job.domains_of(job.stage(name))) == set(ORDER[:count])
