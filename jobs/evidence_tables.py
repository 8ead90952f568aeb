"""Tables and the picture of docs/evidence.md, from the results of the jobs that compare arms."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
from pictures import curves_picture
from results import JOBS, Result, Right, line, mean, module, over_seeds, paired, recovery, results, right

from mopd_dataplane.job.load import load_job


def alternatives() -> str:
    """Every arm at equal cost: accuracy over seeds, paired with exact MOPD, and what it cost."""
    run = module(JOBS / "alternatives" / "run.py")
    by_arm = _of_arms("alternatives", [name for name, arm in run.ARMS.items() if not arm.like])
    rival = _ends(by_arm["mopd-exact"])
    domains = ("number_sorting", "spell_backward", "spiral_matrix")
    head = ("arm", "what it does", *domains, "mean", "− mopd-exact, points", "student tokens", "all tokens", "seeds")
    lines = [line(*head), line(*["---"] * len(head))]
    for name, found in by_arm.items():
        says = run.ARMS[name].says
        if not found:
            lines.append(line(name, says, *["not run"] * (len(head) - 2)))
            continue
        ends = _ends(found)
        cells = [over_seeds([{d: end[d]} for end in ends.values()]) for d in domains]
        cells += [over_seeds(list(ends.values())), paired(ends, rival) if name != "mopd-exact" else ""]
        lines.append(line(name, says, *cells, *_cost(found), ", ".join(map(str, sorted(ends)))))
    return "\n".join(lines) + "\n"


def claims() -> str:
    """Arms that change one thing in exact MOPD, or in its start: accuracy over seeds, and paired with it."""
    run = module(JOBS / "alternatives" / "run.py")
    names = ["base", "mopd-exact", *(name for name, arm in run.ARMS.items() if arm.like)]
    found = _of_arms("alternatives", names)
    ends = {name: _ends(found[name]) for name in names}
    domains = ("number_sorting", "spell_backward", "spiral_matrix")
    head = ("arm", "what it changes", *domains, "mean", "− mopd-exact, points", "student tokens", "seeds")
    lines = [line(*head), line(*["---"] * len(head))]
    for name in names:
        if not found[name]:
            lines.append(line(name, run.ARMS[name].says, *["not run"] * (len(head) - 2)))
            continue
        cells = [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in domains]
        cells += [over_seeds(list(ends[name].values()))]
        cells += [paired(ends[name], ends["mopd-exact"]) if name != "mopd-exact" else ""]
        cells += [f"{np.mean([r['tokens']['student'] for r in found[name]]):,.0f}"]
        lines.append(line(name, run.ARMS[name].says, *cells, ", ".join(map(str, sorted(ends[name])))))
    return "\n".join(lines) + "\n"


def smollm2_mopd() -> str:
    """Every arm of the pretrained model: accuracy in the specialists' domains and in nobody's, and what it cost."""
    run = module(JOBS / "smollm2-mopd" / "run_arm.py")
    by_arm = _of_arms("smollm2-mopd", run.ARMS)
    routing = load_job(JOBS / "smollm2-mopd").routing
    taught, ends = sorted(routing), {name: _ends(found) for name, found in by_arm.items()}
    own = {name: {s: {d: end[d] for d in taught} for s, end in seeds.items()} for name, seeds in ends.items()}
    head = ("arm", "what it does", *taught, "mean of these", "− mopd-exact, points", "recovered", "capital (nobody's)",
            "student tokens", "all tokens", "minutes", "seeds")  # fmt: skip
    lines = [line(*head), line(*["---"] * len(head))]
    for name, found in by_arm.items():
        says = run.ARMS[name].says
        if not found:
            lines.append(line(name, says, *["not run"] * (len(head) - 2)))
            continue
        cells = [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in taught]
        cells += [over_seeds(list(own[name].values())), paired(own[name], own["mopd-exact"])]
        cells[-1] = "" if name == "mopd-exact" else cells[-1]
        cells += ["" if name in ("base", *run.SPECIALISTS) else _recovered_in_all(own, routing, name)]
        cells += [over_seeds([{"capital": end["capital"]} for end in ends[name].values()]), *_cost(found)]
        minutes = f"{mean(r['seconds'] for r in found) / 60:.0f}"
        lines.append(line(name, says, *cells, minutes, ", ".join(map(str, sorted(ends[name])))))
    apart: dict[str, float] = next(
        (r["teacher_distance"] for name in ("mopd-exact", "mopd-sampled") for r in by_arm[name]), {}
    )
    if apart:
        said = ", ".join(f"{domain} {nat:.2f}" for domain, nat in apart.items())
        lines += ["", f"Exact reverse KL from the base to each teacher, nat per token of the base's answers: {said}."]
    return "\n".join(lines) + "\n"


def near() -> str:
    """Every form of the objective: both rates on tuning prompts, the better one on held-out ones and beside base."""
    run = module(JOBS / "near" / "run_near.py")
    by_arm = _of_arms("near", run.ARMS)
    ends = {name: _ends(found) for name, found in by_arm.items()}
    rate = load_job(JOBS / "near").stage("exact").train.learning_rate
    tries = [f"tuning split, {rate * setting:g}" for setting in run.RATES]
    rest = ("spell_backward", "spiral_matrix")
    head = ("arm", "what it does", *tries, "rate kept", "number_sorting", "− base, points", *rest, "seeds")
    lines = [line(*head), line(*["---"] * len(head))]
    for name, found in by_arm.items():
        says = run.ARMS[name].says
        if not found:
            lines.append(line(name, says, *["not run"] * (len(head) - 2)))
            continue
        searched = next((r for r in found if r["tried"]), None)
        tried = {t["setting"]: t["accuracy"] for t in searched["tried"]} if searched else {}
        cells = [f"{100 * tried[setting]:.1f} %" if tried else "" for setting in run.RATES]
        cells += [f"{rate * searched['setting']:g}" if searched else ""]
        sorting, base = ({s: {"number_sorting": end["number_sorting"]} for s, end in ends[n].items()}
                         for n in (name, "base"))  # fmt: skip
        cells += [over_seeds(list(sorting.values())), paired(sorting, base) if name != "base" else ""]
        cells += [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in rest]
        lines.append(line(name, says, *cells, ", ".join(map(str, sorted(ends[name])))))
    return "\n".join(lines) + "\n"


def conflict() -> str:
    """Every arm of two skills in conflict: accuracy in both and in nobody's, how far it moved, its entropy and cost.

    Both domains ask about the same pairs of numbers in the same order, so that a pair may have both answers right.
    """
    run = module(JOBS / "conflict" / "run_conflict.py")
    by_arm = _of_arms("conflict", run.ARMS)
    head = ("arm", "what it does", *run.SPECIALISTS, "both of a pair", "neither", "capital (nobody's)",
            "KL to its start", "entropy", "student tokens", "all tokens", "seeds")  # fmt: skip
    lines = [line(*head), line(*["---"] * len(head))]
    for name, found in by_arm.items():
        says = run.ARMS[name].says
        if not found:
            lines.append(line(name, says, *["not run"] * (len(head) - 2)))
            continue
        ends = _ends(found)
        cells = [over_seeds([{d: end[d]} for end in ends.values()]) for d in run.SPECIALISTS]
        several = [np.sum([end[d] for d in run.SPECIALISTS], axis=0) for end in ends.values()]
        cells += [over_seeds([{"pair": (count == wanted).astype(int)} for count in several]) for wanted in (2, 0)]
        cells += [over_seeds([{"capital": end["capital"]} for end in ends.values()])]
        cells += [_in_both(found, "kl"), _in_both(found, "entropy"), *_cost(found)]
        lines.append(line(name, says, *cells, ", ".join(map(str, sorted(ends)))))
    apart = {r["seed"]: r["teacher_distance"] for r in by_arm["mopd-exact"]}
    if apart:
        said = "; ".join(
            f"{', '.join(f'{domain} {nat:.2f}' for domain, nat in found.items())} at seed {seed}"
            for seed, found in sorted(apart.items())
        )
        lines += ["", *textwrap.wrap(f"Exact reverse KL from the base to each teacher, nat per token: {said}.", 120)]
    return "\n".join(lines) + "\n"


def teacher_count() -> str:
    """Students of one to ten teachers, in the order in which teachers are added, each beside the student before it."""
    run = module(JOBS / "teacher-count" / "run_count.py")
    by_arm = _of_arms("teacher-count", run.ARMS)
    ends = {name: _ends(found) for name, found in by_arm.items()}
    head = ("arm", "teachers that it adds", "mean of ten domains", "− the arm before, points", "in the domains added",
            "− generalist where nobody teaches", "student tokens", "all tokens", "seeds")  # fmt: skip
    lines, before, taught = [line(*head), line(*["---"] * len(head))], "generalist", 0
    for name, found in by_arm.items():
        count = run.COUNTS.get(name, 0)
        added, untaught = run.ORDER[taught:count], run.ORDER[count:]
        if not found:
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
        lines.append(line(name, ", ".join(added), *cells, *_cost(found), ", ".join(map(str, sorted(ends[name])))))
        before, taught = name, count
    return "\n".join(lines) + "\n"


def bought() -> str:
    """An SVG: accuracy against the tokens the student learnt from, mean over the seeds that all arms have."""
    run = module(JOBS / "alternatives" / "run.py")
    wanted = [name for name, arm in run.ARMS.items() if not arm.like and name not in run.SPECIALISTS]
    found = {name: {r["seed"]: r["curve"] for r in results("alternatives") if r["arm"] == name} for name in wanted}
    found = {name: seeds for name, seeds in found.items() if seeds}
    shared = set.intersection(*(set(seeds) for seeds in found.values()))
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, seeds in found.items():
        points = list(zip(*(seeds[seed] for seed in sorted(shared)), strict=True))
        curves[name] = [(mean(p["tokens"] for p in several), mean(map(_accuracy, several))) for several in points]
    base = curves["base"][0]
    trained = {name: [base, *curve] if len(curve) > 1 else curve for name, curve in curves.items()}
    return curves_picture(
        "What 4,096 answers buy, by arm", trained, across="tokens the student learnt from",
        upward=f"entirely right, mean over three domains; seeds {', '.join(map(str, sorted(shared)))}",
    )  # fmt: skip


def _of_arms(job: str, names: Iterable[str]) -> dict[str, list[Result]]:
    """A job's results by arm, in the order of the names; of other arms none."""
    return {name: [result for result in results(job) if result["arm"] == name] for name in names}


def _ends(found: list[Result]) -> dict[int, Right]:
    """What an arm's last policy got right, by seed."""
    return {result["seed"]: right(result["curve"][-1]["right"]) for result in found}


def _cost(found: list[Result]) -> tuple[str, str]:
    """The student's tokens, and all; means over seeds."""
    student, every = (mean(costs) for costs in zip(*((r["tokens"]["student"], sum(r["tokens"].values()))
                                                      for r in found), strict=True))  # fmt: skip
    return f"{student:,.0f}", f"{every:,.0f}"


def _recovered_in_all(own: dict[str, dict[int, Right]], routing: dict[str, str], student: str) -> str:
    """Seed by seed, how much of the specialists' lead in their own domains an arm has."""
    needed = ("base", student, *routing.values())
    seeds = sorted(set.intersection(*(set(own[name]) for name in needed)))
    cells = [
        recovery(own["base"][s], {d: own[teacher][s][d] for d, teacher in routing.items()}, own[student][s])
        for s in seeds
    ]
    return "; ".join(cells) or "not run"


def _within(ends: dict[int, Right], domains: Iterable[str]) -> dict[int, Right]:
    """Of some domains alone, by seed."""
    return {seed: {domain: end[domain] for domain in domains} for seed, end in ends.items()}


def _in_both(found: list[Result], what: str) -> str:
    """Nat per token of an arm's own answers, a mean over domains; over seeds the mean, lowest and highest."""
    values = [mean(domain[what] for domain in result["moved"].values()) for result in found if result["moved"]]
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{mean(values):.2f} ({min(values):.2f} … {max(values):.2f})"


def _accuracy(point: dict[str, Any]) -> float:
    return mean(float(values.mean()) for values in right(point["right"]).values())
