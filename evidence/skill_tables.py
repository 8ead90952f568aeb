"""Tables and the picture of one skill that rewards taught, and of distilling it from the specialist that they made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
from comparisons import COMPARISONS
from evidence_tables import along, ends_of, of_arms
from pictures import Curve, Panel, panels_picture
from reached import Climb, ratio, reached
from results import Result, line, mean, over_seeds, right

_UNITS = ("answers", "tokens", "seconds")


@dataclass(frozen=True)
class Skill:
    """A skill, and the arms of a job that learn it."""

    job: str
    name: str
    """Its domain, and the arm of its specialist, which rewards trained."""
    distilled: str
    """Arm that learns it from the specialist."""
    levels: tuple[float, ...]
    """Shares of the prompts by which the two are compared: below what both end with."""

    @property
    def runs(self) -> tuple[list[Result], list[Result], list[Result]]:
        """Results of the base, of the specialist and of the arm that is distilled from it."""
        base, rewarded, distilled = of_arms(self.job, (COMPARISONS[self.job].base, self.name, self.distilled)).values()
        return base, rewarded, distilled


DATES = Skill("smollm2-mopd", "date", "mopd-date", (0.5, 0.8))
SUMS = Skill("smollm2-sums", "sum", "mopd-sum", (0.4, 0.5))


def skill_curves(skill: Skill) -> str:
    """Accuracy in the skill by the answers learnt from, and what they cost."""
    base, rewarded, distilled = skill.runs
    answers = sorted({point["answers"] for run in (*rewarded, *distilled) for point in run["curve"]})
    head = ("how", "0 answers", *(f"{count:,} answers" for count in answers), "tokens learnt from", "all tokens",
            "seconds")  # fmt: skip
    lines = [line(*head), line(*["---"] * len(head))]
    for says, runs in (("GRPO, the specialist itself", rewarded), ("MOPD of that specialist, exact", distilled)):
        if not runs:
            lines.append(line(says, *["not run"] * (len(head) - 1)))
            continue
        learnt = mean(run["curve"][-1]["tokens"] for run in runs)
        spent = mean(sum(run["tokens"].values()) for run in runs)
        cells = [over_seeds([{skill.name: end[skill.name]} for end in ends_of(base).values()])]
        cells += along(runs, answers, [skill.name], otherwise="")
        cells += [f"{value:,.0f}" for value in (learnt, spent, _pace(runs) * learnt)]
        lines.append(line(says, *cells))
    return "\n".join(lines) + "\n"


def skill_ratio(skill: Skill) -> str:
    """What rewards cost over what distillation costs, to the same accuracy: answers, tokens, seconds."""
    head = ("right", "seed", "rewards, answers", "distilled, answers", *(f"ratio of {unit}" for unit in _UNITS))
    lines = [line(*head), line(*["---"] * len(head))]
    base, rewarded, distilled = ({run["seed"]: run for run in runs} for runs in skill.runs)
    seeds = sorted(base.keys() & rewarded.keys() & distilled.keys())
    groups = [*([seed] for seed in seeds), *([seeds] if len(seeds) > 1 else [])]
    for level, group in product(skill.levels, groups):
        climbs = {
            unit: [
                [_climb(skill.name, base[seed], runs[seed], unit, _pace(runs.values())) for seed in group]
                for runs in (rewarded, distilled)
            ]
            for unit in _UNITS
        }
        means = [f"{mean(reached(climb, level) for climb in arm):,.0f}" for arm in climbs["answers"]]
        ratios = [ratio(costly, cheap, level) for costly, cheap in climbs.values()]
        cells = [f"{one.value:.1f} ({one.low:.1f} to {one.high:.1f})".replace("inf", "∞") for one in ratios]
        lines.append(line(f"{100 * level:.0f} %", "all" if len(group) > 1 else str(group[0]), *means, *cells))
    return "\n".join(lines) + "\n"


def skill_picture() -> str:
    """An SVG: accuracy in each of the skills by answers, a curve a seed, rewards beside distillation."""
    panels = []
    for title, skill in (("dates", DATES), ("sums of two numbers of three digits", SUMS)):
        _, rewarded, distilled = skill.runs
        curves: dict[str, Curve] = {
            f"{how}, seed {run['seed']}": [
                (point["answers"], float(right(point["right"])[skill.name].mean())) for point in run["curve"]
            ]
            for how, runs in (("rewards", rewarded), ("distilled", distilled))
            for run in runs
        }
        ticks = sorted({point["answers"] for run in (*rewarded, *distilled) for point in run["curve"]})
        panels.append(Panel(title=title, curves=curves, levels={}, ticks=ticks, logarithmic=True, width=580))
    return panels_picture(
        "One skill by rewards, and distilled from the specialist that they made", panels,
        across="answers learnt from", upward="entirely right; the specialist's own answers are not among the distilled",
    )  # fmt: skip


def _climb(domain: str, base: Result, run: Result, unit: str, seconds_a_token: float) -> Climb:
    """An arm's way up in a domain from the base. unit: answers, tokens learnt from, or seconds of its steps."""
    points = run["curve"]
    rows = [right(point["right"])[domain] for point in (base["curve"][-1], *points)]
    spent = [seconds_a_token * p["tokens"] if unit == "seconds" else float(p[unit]) for p in points]
    return Climb(np.array(rows), np.array([0.0, *spent]))


def _pace(runs: Iterable[Result]) -> float:
    """Seconds of steps a token of an arm's fastest run: the one that other work on the machine disturbed least."""
    seconds = ((run, float(run["work"]["student"] or run["work"]["specialists"])) for run in runs)
    return min(whole / float(run["curve"][-1]["tokens"]) for run, whole in seconds)
