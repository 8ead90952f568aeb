"""What the READMEs of the recipes say was measured is what their committed results say: every number of a text stands
in a sentence that is put together here from the answers, or in the job's settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from right_answers import Answers, gain, listed, p, right, tenths, whole

ROOT = Path(__file__).parents[2]
SORTING, SPELLING, SPIRALS = "number_sorting", "spell_backward", "spiral_matrix"
ALL = (SORTING, SPELLING, SPIRALS)


class Recipe:
    """A recipe's results, seed by seed."""

    def __init__(self, name: str) -> None:
        files = sorted((ROOT / "jobs" / name / "results").glob("*.json"))
        self.results: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]

    @property
    def seeds(self) -> str:
        """`seeds 0, 1 and 2`."""
        numbers = [str(result["seed"]) for result in self.results]
        return f"seed{'s' if len(numbers) > 1 else ''} {listed(numbers)}"

    def ends(self, stage: str) -> list[Answers]:
        """What a stage's last policy got right."""
        found = [result["stages"][stage] for result in self.results]
        return [{domain: said["correct"] for domain, said in domains.items()} for domains in found]

    def each(self, stage: str, *domains: str) -> list[float]:
        """Per cent right, seed by seed."""
        return [right(end, *domains) for end in self.ends(stage)]

    def mean(self, stage: str, *domains: str) -> float:
        """Per cent right, mean over seeds."""
        return float(np.mean(self.each(stage, *domains)))

    def gains(self, stage: str, rival: str, *domains: str) -> list[float]:
        """Points that a stage is above another."""
        return [gain(a, b, *domains) for a, b in zip(self.ends(stage), self.ends(rival), strict=True)]

    def gain(self, stage: str, rival: str, *domains: str) -> float:
        """Points, mean over seeds."""
        return float(np.mean(self.gains(stage, rival, *domains)))

    def ps(self, stage: str, rival: str, *domains: str) -> list[float]:
        """McNemar's p."""
        return [p(a, b, *domains) for a, b in zip(self.ends(stage), self.ends(rival), strict=True)]

    def has(self, stage: str, *domains: str) -> str:
        """`36.5, 33.0 and 30.0`: per cent right at each seed."""
        return tenths(self.each(stage, *domains))

    def gained(self, stage: str, rival: str, *domains: str) -> str:
        """`10.0, 8.0 and 5.5 points (p = 0.002, < 0.001 and = 0.02)`: at no seed is the stage below the other."""
        gains = self.gains(stage, rival, *domains)
        assert min(gains) >= 0
        return f"{tenths(gains)} points ({chances(self.ps(stage, rival, *domains))})"

    def moved(self, stage: str, rival: str, *domains: str) -> str:
        """`+1.5, -0.5 and +4.0 points (p = 0.3, = 0.8 and = 0.04)`."""
        gains = self.gains(stage, rival, *domains)
        return f"{signed(gains)} points ({chances(self.ps(stage, rival, *domains))})"

    def note(self, stage: str, rival: str, *domains: str) -> str:
        """`+1.5, -0.5 and +4.0 points, p = 0.3, = 0.8 and = 0.04`: what stands in brackets."""
        return f"{signed(self.gains(stage, rival, *domains))} points, {chances(self.ps(stage, rival, *domains))}"

    def reward(self, stage: str, domain: str) -> float:
        """Mean reward of held-out answers, mean over seeds."""
        return float(np.mean([result["stages"][stage][domain]["reward"] for result in self.results]))

    def training(self, stage: str, name: str) -> list[Any]:
        """What a stage's steps or samples were like, of the seeds whose results say so."""
        return [result["training"][stage][name] for result in self.results if "training" in result]


def chances(ps: list[float]) -> str:
    """`p < 0.001, = 0.052 and = 0.41`."""
    if max(ps) < 0.001:
        return "p < 0.001" + (" at each seed" if len(ps) > 1 else "")
    return f"p {listed('< 0.001' if one < 0.001 else f'= {one:.2g}' for one in ps)}"


def least(*ps: list[float]) -> str:
    """`p of 0.14 and more`: of comparisons in which nothing was seen."""
    found = min(one for several in ps for one in several)
    assert found > 0.05
    return "p = 1" if found == 1 else f"p of {int(found * 100) / 100:.2f} and more"


def signed(values: list[float]) -> str:
    """`+1.5, -0.5 and +4.0`."""
    return listed(f"{value:+.1f}" for value in values)


def of_async(r: Recipe) -> Iterator[str]:
    rest = [r.ps(stage, "base", SPELLING) for stage in ("in-turn", "async-icepop", "async-tis")]
    yield f"Sorting, which alone is taught, gains {r.moved('in-turn', 'base', SORTING)}"
    yield f"{r.seeds}"
    yield f"concurrent with IcePop {r.moved('async-icepop', 'base', SORTING)}"
    yield f"with TIS {r.moved('async-tis', 'base', SORTING)}"
    yield f"IcePop ends at {r.moved('async-icepop', 'in-turn', SORTING)}"
    yield f"TIS at {r.moved('async-tis', 'in-turn', SORTING)}"
    yield f"in turn by {r.moved('in-turn', 'base', SPIRALS)}"
    yield f"with IcePop by {r.moved('async-icepop', 'base', SPIRALS)}"
    yield f"with TIS by {r.moved('async-tis', 'base', SPIRALS)}"
    yield f"{least(*rest)}"


def of_black_box(r: Recipe) -> Iterator[str]:
    apart = [[100 * share for share in one] for one in r.training("gad", "discriminator")]
    assert max(max(one[1:]) for one in apart) - min(min(one[1:]) for one in apart) < 6
    sorting = [r.mean(stage, SORTING) for stage in ("sorter", "text-only")]
    spelling = [r.mean(stage, SPELLING) for stage in ("speller", "text-only")]
    yield f"The teachers' text alone lifts the mean over three domains by {r.gained('text-only', 'base', *ALL)}"
    yield f"{r.seeds}"
    yield f"the spirals, by {r.gained('text-only', 'base', SPIRALS)}"
    yield f"sorting gains {r.gained('text-only', 'base', SORTING)}"
    yield f"spelling nothing that is seen ({least(r.ps('text-only', 'base', SPELLING))})"
    yield f"the sorter has {sorting[0]:.1f} % of sorting and the student {sorting[1]:.1f}"
    yield f"the speller {spelling[0]:.1f} % of spelling and the student {spelling[1]:.1f}"
    yield f"The discriminator's reward then changes the mean by {r.moved('gad', 'text-only', *ALL)}"
    yield f"in no domain ({least(*(r.ps('gad', 'text-only', domain) for domain in ALL))})"
    yield f"in {tenths([one[1] for one in apart])} % of pairs in the second window"
    yield f"in {tenths([one[-1] for one in apart])} % in the last, at seeds 1 and 2"


def of_coevolve(r: Recipe) -> Iterator[str]:
    loses = [r.ps("sorter-2", "student-1", domain) for domain in (SPELLING, SPIRALS)]
    yield f"in the mean by {r.gained('student-2', 'student-1', *ALL)}"
    yield f"{r.seeds}"
    yield f"by {r.gained('student-1-longer', 'student-1', *ALL)}"
    yield f"{r.moved('student-2', 'student-1-longer', *ALL)}"
    yield f"the first student has {r.has('student-1', SPIRALS)} %"
    yield f"the second {r.has('student-2', SPIRALS)} %"
    yield f"the control {r.has('student-1-longer', SPIRALS)} %"
    yield f"{chances(r.ps('student-2', 'student-1-longer', SPIRALS))}"
    yield f"the second stands at {r.has('student-2', SORTING)} %"
    yield f"the control at {r.has('student-1-longer', SORTING)} %"
    yield f"{chances(r.ps('student-2', 'student-1-longer', SORTING))}"
    yield f"gains {r.gained('sorter-2', 'student-1', SORTING)} of sorting"
    yield f"{least(*loses)}"


def of_deepseek_v4(r: Recipe) -> Iterator[str]:
    own = [{name: said[name]["correct"] for name, said in one["stages"].items() if name in said} for one in r.results]
    students, domains = r.ends("student"), sorted(own[0])
    gains = signed([gain(student, one, *domains) for student, one in zip(students, own, strict=True)])
    ps = chances([p(student, one, *domains) for student, one in zip(students, own, strict=True)])
    theirs = tenths([right(one, *domains) for one in own])
    unlearnt = ("sort-max", "sum-low", "sum-high")
    assert max(right(one, domain) for one in own for domain in unlearnt) <= 12
    yield f"the generalist has {r.has('generalist', *domains)} %"
    yield f"the specialists, each in its own domain, {theirs} %"
    yield f"the student {r.has('student', *domains)} %"
    yield f"{r.seeds}"
    yield f"the student differs by {gains} points ({ps})"
    yield f"of the large spirals has {tenths([right(one, 'spiral-high') for one in own])} %"


def of_exopd(r: Recipe) -> Iterator[str]:
    yield f"the base has {r.has('base', SORTING)} % and the teacher {r.has('sorter', SORTING)} %"
    yield f"{r.seeds}"
    yield f"at {r.has('lambda-050', SORTING)} % with λ = 0.5"
    yield f"at {r.has('lambda-100', SORTING)} % with 1"
    yield f"at {r.has('lambda-125', SORTING)} % with 1.25 and at {r.has('lambda-150', SORTING)} % with 1.5"
    yield f"{r.moved('lambda-050', 'lambda-100', SORTING)}"
    yield f"1.25 against 1 is {r.moved('lambda-125', 'lambda-100', SORTING)}"
    yield f"1.5 against 1 {r.moved('lambda-150', 'lambda-100', SORTING)}"
    yield f"λ = 1.5 is beside it by {r.moved('lambda-150', 'sorter', SORTING)}"
    yield f"with λ = 1 {r.gained('base', 'lambda-100', SPELLING)} of spelling"
    yield f"{r.gained('base', 'lambda-100', SPIRALS)} of the spirals"
    yield f"of which the bases have {r.has('base', SPIRALS)} %"
    yield f"gain {r.gained('sampled-150', 'base', SORTING)}"


def of_glm_5(r: Recipe) -> Iterator[str]:
    yield f"`general` gains {r.gained('general', 'reasoning-rl', SORTING)} of sorting"
    yield f"{r.seeds}"
    yield f"loses {r.gained('reasoning-rl', 'general', SPELLING)} of spelling"
    yield f"{r.gained('reasoning-rl', 'general', SPIRALS)} of the spirals"
    yield f"`cross-stage` brings back {r.gained('cross-stage', 'general', SPELLING)} of spelling"
    yield f"{r.gained('cross-stage', 'general', SPIRALS)} of the spirals"
    yield f"{r.note('cross-stage', 'general', SORTING)}"
    yield f"by {r.gained('cross-stage', 'general', *ALL)}"
    yield f"by {r.gained('cross-stage', 'reasoning-rl', *ALL)}"
    yield f"{r.has('base', SPIRALS)} % of the spirals"
    yield f"from {r.reward('base', SPELLING):.3f} to {r.reward('reasoning-rl', SPELLING):.3f}"
    yield f"{r.moved('reasoning-rl', 'base', SPELLING)}"


def of_grpo(r: Recipe) -> Iterator[str]:
    trained = ("grpo", "dapo", "dr-grpo")
    for one in r.results:
        held_out = [one["stages"][stage][SPELLING]["reward"] for stage in ("base", *trained)]
        assert min(held_out[1:]) > held_out[0]
    rewards = [f"{r.reward(stage, SPELLING):.3f}" for stage in ("base", *trained)]
    unseen = least(*(r.ps(stage, "base", SPELLING) for stage in trained))
    yield f"from {rewards[0]} to {rewards[1]} (GRPO), {rewards[2]} (DAPO) and {rewards[3]} (Dr.GRPO)"
    yield f"{unseen}"
    yield f"GRPO changes them by {r.moved('grpo', 'base', SPELLING)}"
    yield f"{r.seeds}"
    yield f"DAPO by {r.moved('dapo', 'base', SPELLING)}"
    yield f"Dr.GRPO by {r.moved('dr-grpo', 'base', SPELLING)}"


def of_mimo_v2_flash(r: Recipe) -> Iterator[str]:
    yield f"distillation alone {r.moved('mopd', 'base', *ALL)}"
    yield f"{r.seeds}"
    yield f"with the outcome's advantage {r.moved('mopd-orm', 'base', *ALL)}"
    yield f"the outcome alone {r.moved('orm', 'base', *ALL)}"
    assert min(r.ps("mopd", "base", *ALL)) > 0.05
    yield f"above the outcome alone by {r.gained('mopd-orm', 'orm', *ALL)}"
    yield f"beside distillation alone at {r.moved('mopd-orm', 'mopd', *ALL)}"
    yield f"{r.note('orm', 'base', SPELLING)}"
    yield f"{r.note('mopd', 'base', SORTING)}"
    yield f"with the outcome {r.note('mopd-orm', 'base', SORTING)}"
    yield f"{r.has('mopd', SORTING)} of {r.has('sorter', SORTING)} %"
    yield f"{r.note('speller-rl', 'base', SPELLING)}"
    yield f"lost a little ({r.note('mopd', 'base', SPELLING)})"
    yield f"changes nothing ({least(r.ps('mopd', 'base', SPIRALS))})"
    yield f"gains at seed 2 ({r.note('mopd-orm', 'base', SPIRALS)})"
    yield f"as the outcome alone does ({r.note('orm', 'base', SPIRALS)})"


def of_minillm_gkd(r: Recipe) -> Iterator[str]:
    yield f"in the mean by {r.gained('gkd', 'base', *ALL)}"
    yield f"{r.seeds}"
    yield f"by {r.gained('minillm', 'base', *ALL)}"
    yield f"{r.moved('gkd', 'gkd-supervised', *ALL)} from its supervised form"
    yield f"the bases have {r.has('base', SPIRALS)} %"
    yield f"{r.moved('gkd', 'gkd-supervised', SPIRALS)}"
    yield f"{r.moved('minillm', 'minillm-unmixed', *ALL)} in the mean"
    yield f"{r.moved('minillm', 'minillm-unmixed', SORTING)}"


def of_nemotron_cascade_2(r: Recipe) -> Iterator[str]:
    yield f"sorting gains {r.moved('mopd', 'first-rl', SORTING)}"
    yield f"{r.seeds}"
    yield f"the mean {r.moved('mopd', 'first-rl', *ALL)}"
    yield f"changes the mean by {r.moved('next-rl', 'mopd', *ALL)}"
    yield f"ahead by {r.moved('next-rl', 'next-rl-unbalanced', *ALL)} in the mean"
    yield f"by {r.moved('next-rl', 'next-rl-unbalanced', SORTING)} in sorting"
    yield f"differs from the base by {r.moved('first-rl', 'base', SPELLING)}"
    yield f"rises from {r.reward('base', SPELLING):.3f} to {r.reward('first-rl', SPELLING):.3f}"


def of_opcd(r: Recipe) -> Iterator[str]:
    bare = zip(
        r.gains("context", "base", "bare_word"), r.each("base", SPELLING), r.each("base", "bare_word"), strict=True
    )
    way = [100 * gained / (teacher - base) for gained, teacher, base in bare]
    yield f"right in {r.has('context', 'bare_word')} % of cases at {r.seeds}"
    yield f"the base in {r.has('base', 'bare_word')} %"
    yield f"{chances(r.ps('context', 'base', 'bare_word'))}"
    yield f"{r.has('base', SPELLING)} %: the student went {whole(way)} % of the way"
    yield f"{r.has('context', SPELLING)} % right"
    yield f"{chances(r.ps('context', 'base', SPELLING))}"
    yield f"Sorting loses {r.gained('base', 'context', SORTING)}"
    yield f"the spirals {r.gained('base', 'context', SPIRALS)}"


def of_opd(r: Recipe) -> Iterator[str]:
    unseen = [r.ps("discounted", "one-answer", SORTING)]
    yield f"the base has {r.has('base', SORTING)} % and the teacher {r.has('sorter', SORTING)} %"
    yield f"{r.seeds}"
    yield f"One answer per prompt gains {r.gained('one-answer', 'base', SORTING)}"
    yield f"the discount {r.gained('discounted', 'base', SORTING)}"
    yield f"four answers to a quarter of the prompts {r.gained('four-answers', 'base', SORTING)}"
    yield f"below one by {r.gained('one-answer', 'four-answers', SORTING)}"
    yield f"{least(*unseen)}"
    yield f"the spirals by {r.moved('one-answer', 'base', SPIRALS)}"
    yield f"spelling by {r.moved('one-answer', 'base', SPELLING)}"


def of_opsd(r: Recipe) -> Iterator[str]:
    sorter = Recipe("black-box").has("sorter", SORTING)
    yield f"sorting falls by {r.gained('base', 'reader', 'sorting')}"
    yield f"{r.seeds}"
    yield f"{r.has('self-taught', 'sorting')} %, above the base by {r.gained('self-taught', 'base', 'sorting')}"
    yield f"{r.has('self-taught', SORTING)} %, the quickstart's sorter {sorter} %"
    yield f"{r.gained('reader', 'self-taught', 'hinted')} of the hinted prompts"
    yield f"{r.gained('base', 'self-taught', SPELLING)} of spelling"
    yield f"{r.gained('base', 'self-taught', SPIRALS)} of the spirals"


def of_qwen3(r: Recipe) -> Iterator[str]:
    yield f"{r.has('weak', *ALL)} % right"
    yield f"{r.seeds}"
    yield f"The cold start on the teachers' answers brings it to {r.has('off-policy', *ALL)} %"
    yield f"on-policy learning without it to {r.has('on-policy-only', *ALL)} %"
    yield f"{r.note('on-policy-only', 'weak', *ALL)}"
    yield f"On-policy learning after the cold start reaches {r.has('on-policy', *ALL)} %"
    yield f"by {r.gained('on-policy', 'on-policy-only', *ALL)}"


def of_topk(r: Recipe) -> Iterator[str]:
    ends = {
        form: r.training(f"topk-{form}", "overlap_mass") for form in ("truncated", "corrected", "tail", "renormalised")
    }
    assert all(last < first for first, *_, last in ends.pop("corrected"))
    assert all(last > first for form in ends.values() for first, *_, last in form)
    yield f"{r.seeds}"
    yield f"{r.moved('topk-truncated', 'base', *ALL)}"
    yield f"the bases have {r.has('base', SPIRALS)} %"
    yield f"truncated {r.has('topk-truncated', SPIRALS)} %"
    yield f"the tail {r.has('topk-tail', SPIRALS)} %"
    yield f"renormalised {r.has('topk-renormalised', SPIRALS)} %"
    yield f"{r.moved('topk-tail', 'base', *ALL)}"
    yield f"{r.moved('topk-renormalised', 'base', *ALL)}"
    yield f"truncated is above the tail by {r.gained('topk-truncated', 'topk-tail', *ALL)}"
    yield f"above renormalised by {r.gained('topk-truncated', 'topk-renormalised', *ALL)}"
    yield f"{least(r.ps('topk-tail', 'topk-renormalised', *ALL))}"
    yield f"{r.moved('topk-corrected', 'base', *ALL)}"


TEXTS: dict[str, Callable[[Recipe], Iterator[str]]] = {
    "async": of_async,
    "black-box": of_black_box,
    "coevolve": of_coevolve,
    "deepseek-v4": of_deepseek_v4,
    "exopd": of_exopd,
    "glm-5": of_glm_5,
    "grpo": of_grpo,
    "mimo-v2-flash": of_mimo_v2_flash,
    "minillm-gkd": of_minillm_gkd,
    "nemotron-cascade-2": of_nemotron_cascade_2,
    "opcd": of_opcd,
    "opd": of_opd,
    "opsd": of_opsd,
    "qwen3": of_qwen3,
    "topk": of_topk,
}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
OWN = re.compile(r"A seed takes [\d, to]+ s of processor time|[Ss]eeds? \d(?:, \d)*(?: and \d)?|`[^`]*`|\]\([^)]*\)")
"""What has digits and is no figure of a result: processor times, numbers of seeds, names, addresses."""


def measured(name: str) -> str:
    """What a recipe's README says came out."""
    text = (ROOT / "jobs" / name / "README.md").read_text()
    return " ".join(text.partition("## What was measured\n")[2].split())


def test_every_recipe_of_the_page_has_sentences() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert set(re.findall(r"^## (\S+)$", page, re.MULTILINE)) == set(TEXTS)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_says_what_the_answers_say(name: str) -> None:
    left = text = measured(name)
    for sentence in sorted(TEXTS[name](Recipe(name)), key=len, reverse=True):
        assert sentence in text
        left = left.replace(sentence, "")
    settings = set(NUMBER.findall((ROOT / "jobs" / name / "job.toml").read_text()))
    assert {number for number in NUMBER.findall(OWN.sub("", left)) if number.replace(",", "") not in settings} == set()


def quoted() -> Iterator[str]:
    """What docs/evidence.md says of recipes."""
    if short := [name for name in sorted(TEXTS) if len(Recipe(name).results) < 3]:
        yield f"Seeds 1 or 2 of the recipes {listed(short)}"
    grown = Recipe("coevolve")
    yield f"gains {grown.gained('sorter-2', 'student-1', SORTING)} of sorting"
    topk = Recipe("topk")
    falls = [topk.mean(stage, SORTING) for stage in ("base", "topk-corrected")]
    yield f"whose sorting falls from {falls[0]:.1f} to {falls[1]:.1f} % in the mean of three seeds"


@pytest.mark.parametrize("sentence", [*quoted()])
def test_evidence_says_of_recipes_what_their_answers_say(sentence: str) -> None:
    assert sentence in " ".join((ROOT / "docs" / "evidence.md").read_text().split())
