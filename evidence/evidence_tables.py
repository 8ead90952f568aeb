"""Tables of docs/evidence.md and of the jobs that compare arms, from their results."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import numpy as np
from comparisons import COMPARISONS, NEAR_RATES, TEACHER_COUNTS, TEACHER_ORDER
from quickstart_tables import quickstart_ends
from results import JOBS, Result, Right, line, mean, over_seeds, paired, results, right

from mopd_dataplane.job.load import load_job

EVIDENCE_ARMS = (
    "base", "joint-sft", "teacher-sft", "teacher-forward", "gkd", "grpo", "task-arithmetic", "ties", "mopd-sampled",
    "mopd-baseline", "mopd-exact", "mopd-outcome",
)  # fmt: skip
"""Rows of the table of docs/evidence.md."""
_ANSWERS = (192, 1536, 3072)
"""Answers after which its arms of the pretrained model are shown."""
QUICKSTART_OBJECTIVES = {"mopd-exact": "full-vocab", "mopd-sampled": "no-baseline", "mopd-baseline": "sampled"}
"""Arm -> the quickstart's objective that learns from six times as many answers."""


def evidence() -> str:
    """Accuracy of the arms on the pretrained model and in the toy world, after few answers and after many."""
    smol, toy = (COMPARISONS[job] for job in ("smollm2-mopd", "alternatives"))
    taught = sorted(smol.job.routing)
    head = ("arm", "what it does", *(f"SmolLM2-135M, {answers:,} answers" for answers in _ANSWERS),
            "toy, 4,096 answers", "toy, 24,576 answers", "all tokens, toy, 4,096 answers")  # fmt: skip
    lines = [line(*head), line(*["---"] * len(head))]
    smol_runs, toy_runs = (of_arms(job, EVIDENCE_ARMS) for job in ("smollm2-mopd", "alternatives"))
    for name in EVIDENCE_ARMS:
        learns = bool(smol.arms[name].stages)
        after = [
            [{domain: at[domain] for domain in taught} for at in ends_after(smol_runs[name], answers).values()]
            for answers in (_ANSWERS if learns else (0,))
        ]
        ends = [*after, list(ends_of(toy_runs[name]).values()), quickstart_ends(QUICKSTART_OBJECTIVES.get(name, ""))]
        cells = [over_seeds(each) if each else "not run" for each in ends]
        if not learns:
            cells = ["–", "–", *cells[:-1], "–"]
        cells.append(cost(toy_runs[name])[1])
        lines.append(line(name, toy.arms[name].description, *cells))
    return "\n".join(lines) + "\n"


def alternatives() -> str:
    """Every arm at equal cost: accuracy over seeds, paired with exact MOPD, and what it cost."""
    arms = COMPARISONS["alternatives"].arms
    by_arm = of_arms("alternatives", [name for name, arm in arms.items() if not arm.like])
    rival = ends_of(by_arm["mopd-exact"])
    domains = ("number_sorting", "spell_backward", "spiral_matrix")
    head = ("arm", "what it does", *domains, "mean", "− mopd-exact, points", "student tokens", "all tokens", "seeds")
    lines = [line(*head), line(*["---"] * len(head))]
    for name, runs in by_arm.items():
        description = arms[name].description
        if not runs:
            lines.append(line(name, description, *["not run"] * (len(head) - 2)))
            continue
        ends = ends_of(runs)
        cells = [over_seeds([{d: end[d]} for end in ends.values()]) for d in domains]
        cells += [over_seeds(list(ends.values())), paired(ends, rival) if name != "mopd-exact" else ""]
        lines.append(line(name, description, *cells, *cost(runs), ", ".join(map(str, sorted(ends)))))
    return "\n".join(lines) + "\n"


def claims() -> str:
    """Arms that change one thing in exact MOPD, or in its start: accuracy over seeds, and paired with it."""
    arms = COMPARISONS["alternatives"].arms
    names = ["base", "mopd-exact", *(name for name, arm in arms.items() if arm.like)]
    by_arm = of_arms("alternatives", names)
    ends = {name: ends_of(by_arm[name]) for name in names}
    domains = ("number_sorting", "spell_backward", "spiral_matrix")
    head = ("arm", "what it changes", *domains, "mean", "− mopd-exact, points", "student tokens", "seeds")
    lines = [line(*head), line(*["---"] * len(head))]
    for name in names:
        if not by_arm[name]:
            lines.append(line(name, arms[name].description, *["not run"] * (len(head) - 2)))
            continue
        cells = [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in domains]
        cells += [over_seeds(list(ends[name].values()))]
        cells += [paired(ends[name], ends["mopd-exact"]) if name != "mopd-exact" else ""]
        cells += [f"{np.mean([r['tokens']['student'] for r in by_arm[name]]):,.0f}"]
        lines.append(line(name, arms[name].description, *cells, ", ".join(map(str, sorted(ends[name])))))
    return "\n".join(lines) + "\n"


def near() -> str:
    """Every form of the objective: both rates on tuning prompts, the better one on held-out ones and beside base."""
    arms = COMPARISONS["near"].arms
    by_arm = of_arms("near", arms)
    ends = {name: ends_of(runs) for name, runs in by_arm.items()}
    rate = load_job(JOBS / "near").stage("exact").train.learning_rate
    tries = [f"tuning split, {rate * setting:g}" for setting in NEAR_RATES]
    rest = ("spell_backward", "spiral_matrix")
    head = ("arm", "what it does", *tries, "rate chosen", "number_sorting", "− base, points", *rest, "seeds")
    lines = [line(*head), line(*["---"] * len(head))]
    for name, runs in by_arm.items():
        description = arms[name].description
        if not runs:
            lines.append(line(name, description, *["not run"] * (len(head) - 2)))
            continue
        searched = next((r for r in runs if r["tried"]), None)
        tried = {t["setting"]: t["accuracy"] for t in searched["tried"]} if searched else {}
        cells = [f"{100 * tried[setting]:.1f} %" if tried else "" for setting in NEAR_RATES]
        cells += [f"{rate * searched['setting']:g}" if searched else ""]
        sorting, base = ({s: {"number_sorting": end["number_sorting"]} for s, end in ends[n].items()}
                         for n in (name, "base"))  # fmt: skip
        cells += [over_seeds(list(sorting.values())), paired(sorting, base) if name != "base" else ""]
        cells += [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in rest]
        lines.append(line(name, description, *cells, ", ".join(map(str, sorted(ends[name])))))
    return "\n".join(lines) + "\n"


def conflict() -> str:
    """Every arm of two skills in conflict: accuracy in both and in nobody's, how far it moved, its entropy and cost.

    Both domains ask about the same pairs of numbers in the same order, so that a pair may have both answers right.
    """
    comparison = COMPARISONS["conflict"]
    arms = comparison.arms
    by_arm = of_arms("conflict", arms)
    head = ("arm", "what it does", *comparison.specialists, "both of a pair", "neither", "capital (nobody's)",
            "KL to its start", "entropy", "student tokens", "all tokens", "seeds")  # fmt: skip
    lines = [line(*head), line(*["---"] * len(head))]
    for name, runs in by_arm.items():
        description = arms[name].description
        if not runs:
            lines.append(line(name, description, *["not run"] * (len(head) - 2)))
            continue
        ends = ends_of(runs)
        cells = [over_seeds([{d: end[d]} for end in ends.values()]) for d in comparison.specialists]
        several = [np.sum([end[d] for d in comparison.specialists], axis=0) for end in ends.values()]
        cells += [over_seeds([{"pair": (count == correct).astype(int)} for count in several]) for correct in (2, 0)]
        cells += [over_seeds([{"capital": end["capital"]} for end in ends.values()])]
        cells += [_in_both(runs, "kl"), _in_both(runs, "entropy"), *cost(runs)]
        lines.append(line(name, description, *cells, ", ".join(map(str, sorted(ends)))))
    apart = {r["seed"]: r["teacher_distance"] for r in by_arm["mopd-exact"]}
    if apart:
        text = "; ".join(
            f"{', '.join(f'{domain} {nat:.2f}' for domain, nat in distances.items())} at seed {seed}"
            for seed, distances in sorted(apart.items())
        )
        lines += ["", *textwrap.wrap(f"Exact reverse KL from the base to each teacher, nat per token: {text}.", 120)]
    return "\n".join(lines) + "\n"


def teacher_count() -> str:
    """Students of one to ten teachers, in the order in which teachers are added, each beside the student before it."""
    arms = COMPARISONS["teacher-count"].arms
    by_arm = of_arms("teacher-count", arms)
    ends = {name: ends_of(runs) for name, runs in by_arm.items()}
    head = ("arm", "teachers that it adds", "mean of ten domains", "− the arm before, points", "in the domains added",
            "− generalist where nobody teaches", "student tokens", "all tokens", "seeds")  # fmt: skip
    lines, before, taught = [line(*head), line(*["---"] * len(head))], "generalist", 0
    for name, runs in by_arm.items():
        count = TEACHER_COUNTS.get(name, 0)
        added, untaught = TEACHER_ORDER[taught:count], TEACHER_ORDER[count:]
        if not runs:
            lines.append(line(name, ", ".join(added), *["not run"] * (len(head) - 2)))
            continue
        cells = [over_seeds(list(ends[name].values())), "", "", ""]
        if count:
            cells[1:3] = [
                paired(ends[name], ends[before]),
                paired(_within(ends[name], added), _within(ends[before], added)),
            ]
        if count and untaught:
            cells[3] = paired(_within(ends[name], untaught), _within(ends["generalist"], untaught))
        lines.append(line(name, ", ".join(added), *cells, *cost(runs), ", ".join(map(str, sorted(ends[name])))))
        before, taught = name, count
    return "\n".join(lines) + "\n"


def selection() -> str:
    """Students of one store of answers, each by another question, beside half of the answers by chance."""
    arms = COMPARISONS["selection"].arms
    by_arm = of_arms("selection", arms)
    ends = {name: ends_of(runs) for name, runs in by_arm.items()}
    domains = ("number_sorting", "spell_backward", "spiral_matrix")
    head = ("arm", "what it learns from", *domains, "mean", "− half, points by seed", "student tokens", "seeds")
    lines = [line(*head), line(*["---"] * len(head))]
    for name, runs in by_arm.items():
        if not runs:
            lines.append(line(name, arms[name].description, *["not run"] * (len(head) - 2)))
            continue
        cells = [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in domains]
        cells += [over_seeds(list(ends[name].values()))]
        cells += [paired(ends[name], ends["half"]) if name != "half" else "", cost(runs)[0]]
        lines.append(line(name, arms[name].description, *cells, ", ".join(map(str, sorted(ends[name])))))
    return "\n".join(lines) + "\n"


def of_arms(job: str, names: Iterable[str]) -> dict[str, list[Result]]:
    """A job's results by arm, in the order of the names; of other arms none."""
    return {name: [result for result in results(job) if result["arm"] == name] for name in names}


def ends_of(runs: list[Result], *, point: int = -1) -> dict[int, Right]:
    """What an arm's policy got right at a point of its curve, by seed; default: the last."""
    return {result["seed"]: right(result["curve"][point]["right"]) for result in runs}


def ends_after(runs: list[Result], answers: int) -> dict[int, Right]:
    """What an arm's policy got right once it had learnt from so many answers, by seed; seeds without that are left out.

    answers: 0 for the policy of an arm that learns from none.
    """
    return {run["seed"]: right(point["right"]) for run in runs for point in run["curve"] if point["answers"] == answers}


def along(
    runs: list[Result], answers: Iterable[int], domains: Iterable[str], *, otherwise: str = "not run"
) -> list[str]:
    """Accuracy in domains after each number of answers. otherwise: the cell of a number that no run has measured."""
    at = [ends_after(runs, count).values() for count in answers]
    return [over_seeds([{d: end[d] for d in domains} for end in ends]) if ends else otherwise for ends in at]


def cost(runs: list[Result]) -> tuple[str, str]:
    """The student's tokens, and all; means over seeds."""
    student, every = (mean(costs) for costs in zip(*((r["tokens"]["student"], sum(r["tokens"].values()))
                                                      for r in runs), strict=True))  # fmt: skip
    return f"{student:,.0f}", f"{every:,.0f}"


def _within(ends: dict[int, Right], domains: Iterable[str]) -> dict[int, Right]:
    """Of some domains alone, by seed."""
    return {seed: {domain: end[domain] for domain in domains} for seed, end in ends.items()}


def _in_both(runs: list[Result], what: str) -> str:
    """Nat per token of an arm's own answers, a mean over domains; over seeds the mean, lowest and highest."""
    values = [mean(domain[what] for domain in result["moved"].values()) for result in runs if result["moved"]]
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{mean(values):.2f} ({min(values):.2f} … {max(values):.2f})"
