"""Tables and the picture of jobs/smollm2-mopd, and the table of jobs/smollm2-kept, from their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from comparisons import COMPARISONS, FACTORS
from evidence_figure import accuracy, learns_all
from evidence_tables import along, cost, ends_after, ends_of, of_arms
from numpy.typing import NDArray
from pictures import Curve, Panel, panels_picture
from results import Result, Right, line, mean, over_seeds, paired, recovery, results, tried
from skill_tables import DATES

from mopd_dataplane.prompts import load_prompts

JOB = "smollm2-mopd"
_MOST = 3072
"""Answers after which arms of one stage are compared."""
_OF_STAGES = 1536
"""Answers after which they are compared with arms of several stages."""
_WITH_THE_BASE = 768
"""Answers to specialists' prompts, about, of the arms of jobs/smollm2-kept."""
_FROM_THE_BASE = tuple(name for name, arm in COMPARISONS[JOB].arms.items() if not arm.start)
"""Arms that start from the specialists' own base."""


def smollm2() -> str:
    """Every arm: accuracy in the specialists' domains and in nobody's, beside exact MOPD."""
    comparison = COMPARISONS[JOB]
    by_arm = of_arms(JOB, _FROM_THE_BASE)
    routing = comparison.job.routing
    taught, ends = sorted(routing), {name: _compared(runs, _MOST) for name, runs in by_arm.items()}
    own = {name: _in_domains(by_seed, taught) for name, by_seed in ends.items()}
    head = ("arm", "what it does", "answers", *taught, "mean of these", "− mopd-exact, points", "recovered",
            "capital (nobody's)", "seeds")  # fmt: skip
    lines = [line(*head), line(*["---"] * len(head))]
    for name, runs in by_arm.items():
        description = comparison.arms[name].description
        if not runs:
            lines.append(line(name, description, *["not run"] * (len(head) - 2)))
            continue
        joins = name not in ("base", *comparison.specialists)
        answers = runs[0]["curve"][-1]["answers"]
        rival = _compared(by_arm["mopd-exact"], _nearest("mopd-exact", answers) if joins and answers else _MOST)
        cells = [f"{answers:,}", *(over_seeds([{d: end[d]} for end in ends[name].values()]) for d in taught)]
        cells += [over_seeds(list(own[name].values()))]
        cells += [paired(own[name], _in_domains(rival, taught)) if name != "mopd-exact" else ""]
        cells += [_recovered_in_all(own, routing, name) if joins else ""]
        cells += [over_seeds([{"capital": end["capital"]} for end in ends[name].values()])]
        lines.append(line(name, description, *cells, ", ".join(map(str, sorted(ends[name])))))
    apart: dict[str, float] = next(
        (r["teacher_distance"] for name in ("mopd-exact", "mopd-sampled") for r in by_arm[name]), {}
    )
    if apart:
        distances = ", ".join(f"{domain} {nat:.2f}" for domain, nat in apart.items())
        lines += [
            "",
            f"Exact reverse KL from the base to each teacher, nat per token of the base's answers: {distances}.",
        ]
    return "\n".join(lines) + "\n"


def smollm2_curves() -> str:
    """The arms that learn all skills at once, by the answers learnt from: mean accuracy, and each skill's."""
    comparison = COMPARISONS[JOB]
    taught = sorted(comparison.job.routing)
    by_arm = of_arms(JOB, [name for name, arm in comparison.arms.items() if len(arm.stages) == 1])
    answers = comparison.answers_by_point("mopd-exact")
    head = ("arm", *(f"{count:,} answers" for count in answers))
    lines = [line(*head), line(*["---"] * len(head))]
    for name, runs in by_arm.items():
        if learns_all(comparison, comparison.arms[name]):
            means, each = along(runs, answers, taught), _each_along(runs, answers, taught)
            lines.append(line(name, *(f"{whole}{parts}" for whole, parts in zip(means, each, strict=True))))
    return "\n".join(lines) + "\n"


def smollm2_json() -> str:
    """JSON by what its last word must be: lines about people of age that are right, and about the others."""
    comparison = COMPARISONS[JOB]
    prompts = [p for p in load_prompts("json", comparison.job.domains["json"]) if p.split == "eval"]
    of_age = np.array(['"adult": true' in prompt.answer for prompt in prompts])
    by_arm = of_arms(JOB, _FROM_THE_BASE)
    answers = comparison.answers_by_point("mopd-exact")
    head = ("arm", *(f"{count:,} answers" for count in answers), "at its end")
    lines = [line(*head), line(*["---"] * len(head))]
    for name, runs in by_arm.items():
        arm = comparison.arms[name]
        if len(arm.stages) == 1 and learns_all(comparison, arm):
            cells = [*(_of_both(ends_after(runs, count), of_age) for count in answers), ""]
        else:
            cells = [*[""] * len(answers), _of_both(ends_of(runs), of_age)]
        lines.append(line(name, *cells))
    return "\n".join(lines) + "\n"


def smollm2_search() -> str:
    """Learning rates that were tried: accuracy on the tuning prompts, after as many answers for every arm."""
    comparison = COMPARISONS[JOB]
    rate = comparison.job.stage("mopd-exact").train.learning_rate
    head = ("arm", *(f"{rate * factor:g}" for factor in FACTORS), "rate in the other tables")
    lines = [line(*head), line(*["---"] * len(head))]
    for name, arm in comparison.arms.items():
        if arm.stages and len(arm.settings) > 1:
            accuracies = tried(JOB, name)
            cells = [f"{100 * accuracies[one]:.1f} %" if one in accuracies else "not run" for one in arm.settings]
            cells += [f"{rate * run['setting']:g}" for run in of_arms(JOB, (name,))[name][:1]]
            lines.append(line(name, *cells))
    return "\n".join(lines) + "\n"


def smollm2_other_base() -> str:
    """The skill distilled from its specialist into the specialist's own base, and into another: accuracy in it."""
    comparison = COMPARISONS[JOB]
    answers = [0, *comparison.answers_by_point("mopd-date")]
    head = ("student", *(f"{count:,} answers" for count in answers), "capital (nobody's)")
    lines = [line(*head), line(*["---"] * len(head))]
    rows = (("the specialist's own base, on-policy", "base", "mopd-date"),
            ("another base, on-policy", "weak", "weak-date"),
            ("another base, the first half of the answers the specialist's", "weak", "weak-imitation-first"),
            )  # fmt: skip
    for says, start, name in rows:
        by_arm = of_arms(JOB, (start, name))
        if not all(by_arm.values()):
            lines.append(line(says, *["not run"] * (len(head) - 1)))
            continue
        cells = [over_seeds([{DATES.name: end[DATES.name]} for end in ends_of(by_arm[start]).values()])]
        cells += along(by_arm[name], answers[1:], [DATES.name], otherwise="")
        capital = over_seeds([{"capital": end["capital"]} for end in ends_of(by_arm[name]).values()])
        lines.append(line(says, *cells, capital))
    return "\n".join(lines) + "\n"


def smollm2_kept() -> str:
    """What is kept of each skill when rewards teach one after another, beside what joins all: a matrix."""
    comparison = COMPARISONS[JOB]
    skills = [comparison.job.stage(stage).domains[0] for stage in comparison.arms["cascade"].stages]
    head = ("policy", *skills, "capital (nobody's)")
    lines = [line(*head), line(*["---"] * len(head))]
    by_arm = of_arms(JOB, ("base", "cascade", "cascade-mopd", "turns-mopd", "grpo", "mopd-exact"))
    turns = [f"in turns, after the rewards of {skills[0]}: distilled, 160 answers"]
    for skill in skills[1:]:
        turns += [f"in turns: then rewards of {skill}", "in turns: then distilled, 160 answers"]
    rows = [("base", "base", -1), *((f"then rewards of {skill}", "cascade", n) for n, skill in enumerate(skills)),
            ("then distilled from all specialists, 480 answers", "cascade-mopd", -1),
            *((turn, "turns-mopd", n) for n, turn in enumerate(turns, start=1)),
            ("rewards of all at once", "grpo", -1), ("distilled from all specialists", "mopd-exact", -1)]  # fmt: skip
    for says, arm, point in rows:
        if not by_arm[arm]:
            lines.append(line(says, *["not run"] * (len(head) - 1)))
            continue
        ends = list((_compared(by_arm[arm], _OF_STAGES) if point < 0 else ends_of(by_arm[arm], point=point)).values())
        lines.append(line(says, *(over_seeds([{d: end[d]} for end in ends]) for d in (*skills, "capital"))))
    return "\n".join(lines) + "\n"


def smollm2_base_teaches() -> str:
    """The student of all specialists without and with the base as one more teacher: jobs/smollm2-kept."""
    runs_with = of_arms("smollm2-kept", (DATES.name, "kept-general", "kept-countries"))
    every_seed = of_arms(JOB, ("base", DATES.name, "mopd-exact"))
    taught, exact = sorted(COMPARISONS[JOB].job.routing), ends_after(every_seed["mopd-exact"], _WITH_THE_BASE)
    head = ("policy", *taught, "capital (nobody's)", "capital, points over the student without", "tokens learnt from",
            "seeds")  # fmt: skip
    lines = [line(*head), line(*["---"] * len(head))]
    rows = (("base", every_seed["base"]), ("specialist of dates, of smollm2-mopd", every_seed[DATES.name]),
            ("specialist of dates, of this job", runs_with[DATES.name]),
            ("distilled from the specialists", every_seed["mopd-exact"]),
            ("and from the base, questions about things", runs_with["kept-general"]),
            ("and from the base, questions about countries", runs_with["kept-countries"]))  # fmt: skip
    for says, runs in rows:
        if not runs:
            lines.append(line(says, *["not run"] * (len(head) - 1)))
            continue
        is_without = runs is every_seed["mopd-exact"]
        ends = exact if is_without else ends_of(runs)
        cells = [over_seeds([{d: end[d]} for end in ends.values()]) for d in (*taught, "capital")]
        capital = ({seed: {"capital": end["capital"]} for seed, end in which.items()} for which in (ends, exact))
        cells += ["" if is_without else paired(*capital)]
        tokens = (_tokens_after(run, _WITH_THE_BASE) if is_without else run["curve"][-1]["tokens"] for run in runs)
        cells += [f"{mean(tokens):,.0f}"]
        lines.append(line(says, *cells, ", ".join(map(str, sorted(ends)))))
    return "\n".join(lines) + "\n"


def smollm2_begun() -> str:
    """Capitals that nobody is trained on: asked for, and with the answer begun, as evidence/begun_answers.py has it."""
    measured = results(JOB, "begun")
    head = ("arm", "right", "begins so", "right when begun so", "points over the base", "seeds")
    lines = [line(*head), line(*["---"] * len(head))]
    base = _capitals([run for run in measured if run["arm"] == "base"], "begun")
    for name in _FROM_THE_BASE:
        runs = [run for run in measured if run["arm"] == name]
        if not runs:
            continue
        cells = [over_seeds([*_capitals(runs, of).values()]) for of in ("asked", "begins", "begun")]
        cells += ["" if name == "base" else paired(_capitals(runs, "begun"), base)]
        cells += [", ".join(str(run["seed"]) for run in runs)]
        lines.append(line(name, *cells))
    return "\n".join(lines) + "\n"


def smollm2_costs() -> str:
    """What every arm cost: answer tokens, and seconds of its fastest seed, its own and with its specialists' ones."""
    comparison = COMPARISONS[JOB]
    by_arm = of_arms(JOB, [name for name, arm in comparison.arms.items() if arm.stages])
    head = ("arm", "answers", "student tokens", "all tokens", "seconds", "seconds with specialists")
    lines = [line(*head), line(*["---"] * len(head))]
    for name, runs in by_arm.items():
        if not runs:
            lines.append(line(name, *["not run"] * (len(head) - 1)))
            continue
        own, specialists = _seconds(runs, by_arm["mopd-exact"])
        every = own + specialists
        answers = f"{runs[0]['curve'][-1]['answers']:,}"
        lines.append(line(name, answers, *cost(runs), f"{own:,.0f}", f"{every:,.0f}"))
    return "\n".join(lines) + "\n"


def smollm2_picture() -> str:
    """An SVG: accuracy by all tokens, and by seconds of work, specialists included."""
    comparison = COMPARISONS[JOB]
    taught = sorted(comparison.job.routing)
    tokens: dict[str, Curve] = {}
    seconds: dict[str, Curve] = {}
    levels: dict[str, float] = {}
    by_arm = of_arms(JOB, comparison.arms)
    for name, runs in by_arm.items():
        arm = comparison.arms[name]
        if not runs:
            continue
        if name == comparison.base or arm.merge:
            levels[name] = mean(accuracy(end, taught) for end in ends_of(runs).values())
        if len(arm.stages) != 1 or not learns_all(comparison, arm):
            continue
        counts = [count for count in comparison.answers_by_point(name) if len(ends_after(runs, count)) == len(runs)]
        shares = [mean(accuracy(end, taught) for end in ends_after(runs, count).values()) for count in counts]
        done = [mean(_tokens_after(run, count) / run["curve"][-1]["tokens"] for run in runs) for count in counts]
        specialists = mean(run["tokens"]["specialists"] for run in runs)
        of_tokens = mean(sum(run["tokens"].values()) for run in runs) - specialists, specialists
        for curves, (own, before) in ((tokens, of_tokens), (seconds, _seconds(runs, by_arm["mopd-exact"]))):
            curves[name] = [(before + own * share, height) for share, height in zip(done, shares, strict=True)]
    panels = tuple(
        Panel(title=title, curves=curves, levels=levels, ticks=_ticks(curves), width=580)
        for title, curves in (("by all answer tokens", tokens), ("by seconds of one core", seconds))
    )
    return panels_picture(
        "Accuracy against cost, by arm", panels, across="cost, specialists' training included",
        upward="entirely right, mean over three domains; dashed: learns from no answers",
    )  # fmt: skip


def _ticks(curves: dict[str, Curve]) -> tuple[int, ...]:
    """Five round numbers from 0 to past the longest curve."""
    longest = max((point[0] for curve in curves.values() for point in curve), default=1)
    step = next(n * 10**power for power in range(9) for n in (10, 20, 25, 50) if 4 * n * 10**power >= longest)
    return tuple(step * n for n in range(5))


def _seconds(runs: list[Result], taught: list[Result]) -> tuple[float, float]:
    """Seconds of an arm's own steps and of its specialists', at the seeds that other work disturbed least.

    taught: runs of an arm that needs all specialists; they are the same for every such arm of a seed.
    """
    by_seed = {run["seed"]: run["work"]["specialists"] for run in taught}
    needs_all = all(run["work"]["specialists"] == by_seed.get(run["seed"]) for run in runs)
    specialists = by_seed.values() if needs_all else [run["work"]["specialists"] for run in runs]
    return min(run["work"]["student"] for run in runs), min(specialists)


def _in_domains(ends: dict[int, Right], domains: Iterable[str]) -> dict[int, Right]:
    """What was right in some domains alone, by seed."""
    return {seed: {domain: end[domain] for domain in domains} for seed, end in ends.items()}


def _capitals(runs: list[Result], of: str) -> dict[int, Right]:
    """What evidence/begun_answers.py has measured of every capital, by seed. of: `asked`, `begins` or `begun`."""
    return {run["seed"]: {"capital": np.array([int(digit) for digit in run[of]])} for run in runs}


def _nearest(name: str, answers: int) -> int:
    """The most answers, up to some, after which an arm is measured."""
    return max(count for count in COMPARISONS[JOB].answers_by_point(name) if count <= answers)


def _compared(runs: list[Result], answers: int) -> dict[int, Right]:
    """What an arm's policy got right after so many answers; at its end where it has several stages or no such point."""
    has_curve = all(len({point["stage"] for point in run["curve"]}) == 1 for run in runs)
    return (ends_after(runs, answers) if has_curve else {}) or ends_of(runs)


def _tokens_after(run: Result, answers: int) -> int:
    """Tokens that an arm had learnt from after so many answers, or at its end where it has no such point."""
    tokens = {point["answers"]: point["tokens"] for point in run["curve"]}
    return int(tokens.get(answers, run["curve"][-1]["tokens"]))


def _each_along(runs: list[Result], answers: Sequence[int], domains: Sequence[str]) -> list[str]:
    """Accuracy in each domain after each number of answers, mean over seeds, in whole per cent, behind a colon."""
    at = [ends_after(runs, count).values() for count in answers]
    return [
        ": " + " / ".join(f"{100 * mean(end[d].mean() for end in ends):.0f}" for d in domains) if ends else ""
        for ends in at
    ]


def _of_both(ends: dict[int, Right], of_age: NDArray[np.bool_]) -> str:
    """Per cent of right lines of JSON about people of age, and about the others, seed by seed."""
    by_seed = (ends[seed]["json"] for seed in sorted(ends))
    pairs = (" / ".join(f"{100 * of_json[some].mean():.0f}" for some in (of_age, ~of_age)) for of_json in by_seed)
    return "; ".join(pairs) or "not run"


def _recovered_in_all(own: dict[str, dict[int, Right]], routing: dict[str, str], student: str) -> str:
    """Seed by seed, how much of the specialists' lead in their own domains an arm has."""
    needed = ("base", student, *routing.values())
    seeds = sorted(set.intersection(*(set(own[name]) for name in needed)))
    cells = [
        recovery(own["base"][s], {d: own[teacher][s][d] for d, teacher in routing.items()}, own[student][s])
        for s in seeds
    ]
    return "; ".join(cells) or "not run"
