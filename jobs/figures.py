"""Tables of the pages, from the committed results: `<!-- figures: NAME -->` … `<!-- end of figures -->` in Markdown.

    python jobs/figures.py            rewrite every such block
    python jobs/figures.py --check    say which block, or which result, is stale; exit 1

A result is stale when the job's settings or the sampler are no longer those it was measured with. Arms without a result
stand in their table as `not run`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from pictures import curves_picture

from mopd_dataplane.job.job import load_job
from mopd_dataplane.query.statistics import Difference, Estimate, compare, mean_share, recover, share
from mopd_dataplane.rollout.engines.sampling import FIRST_SAMPLER, SAMPLER
from mopd_dataplane.run.provenance import settings_digest

JOBS = Path(__file__).parent
ROOT = JOBS.parent
PAGES = ("README.md", "docs/benchmarks/quickstart.md", "docs/evidence.md", "docs/objectives.md")
COMPARISONS = {"alternatives": "run.py", "smollm2-mopd": "run_arm.py", "near": "run_near.py",
               "conflict": "run_conflict.py", "teacher-count": "run_count.py"}  # fmt: skip
"""Jobs that compare arms, and the script beside each that says which."""
BLOCK = re.compile(r"<!-- figures: ([a-z0-9-]+) -->\n(.*?)<!-- end of figures -->", re.DOTALL)
Result = dict[str, Any]
Right = dict[str, np.ndarray]
"""Domain -> 1 or 0 for every prompt."""


def results(job: str) -> list[Result]:
    """Committed results of a job, by file name."""
    return [json.loads(file.read_text()) for file in sorted((JOBS / job / "results").glob("*.json"))]


def right(domains: dict[str, dict[str, Any]]) -> Right:
    """What was right, from the strings of a result; domains whose reward does not say so are left out."""
    said = {domain: answers["correct"] for domain, answers in domains.items()}
    return {domain: np.array([int(digit) for digit in digits]) for domain, digits in said.items() if digits}


def quickstart(objective: str = "full-vocab", seed: int = 0) -> str:
    """Accuracy of every policy of one quickstart, what the student recovered, and the mean rewards."""
    found = next((r for r in results("quickstart") if (r["objective"], r["seed"]) == (objective, seed)), None)
    if found is None:
        return "not run\n"
    policies = {name: right(policy["domains"]) for name, policy in found["policies"].items()}
    domains = sorted(next(iter(policies.values())))
    head = [f"{name} v{policy['version']}" for name, policy in found["policies"].items()]
    lines = [_row("entirely right", *head), _row(*["---"] * (1 + len(head)))]
    for domain in domains:
        cells = [_percent(share(policies[name][domain])) for name in policies]
        lines.append(_row(domain, *(_marked(found, name, domain, c) for name, c in zip(policies, cells, strict=True))))
    lines.append(_row("mean", *(_percent(mean_share(policies[name])) for name in policies)))
    for student, taught in found["taught"].items():
        lines.append(_row(f"recovered by {student}", *_recovered(policies, student, taught, list(policies))))
    lines += ["", _row("mean reward, partial credit included", *head), _row(*["---"] * (1 + len(head)))]
    for domain in domains:
        rewards = [f"{policy['domains'][domain]['reward']:.3f}" for policy in found["policies"].values()]
        lines.append(_row(domain, *rewards))
    prompts = {len(values) for values in next(iter(policies.values())).values()}
    said = f"Seed {seed}, {'/'.join(map(str, sorted(prompts)))} held-out prompts a domain ({found['split']} split), "
    lines += ["", *textwrap.wrap(f"{said}95 % intervals. {source(found)}", 120, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def quickstart_seeds(objective: str = "full-vocab") -> str:
    """Accuracy of base, specialist and student of every seed, domain by domain, and what the student recovered."""
    by_seed = {r["seed"]: r for r in results("quickstart") if r["objective"] == objective}
    lines = [_row("seed", "domain", "base", "its specialist", "student", "recovered"), _row(*["---"] * 6)]
    for seed in (0, 1, 2):
        if seed not in by_seed:
            lines.append(_row(str(seed), *["not run"] * 5))
            continue
        policies = {name: right(policy["domains"]) for name, policy in by_seed[seed]["policies"].items()}
        ((student, taught),) = by_seed[seed]["taught"].items()
        for domain, teacher in taught["teachers"].items():
            parts = [{domain: policies[name][domain]} for name in (taught["base"], teacher, student)]
            cells = [_percent(share(part[domain])) for part in parts]
            lines.append(_row(str(seed), domain, *cells, _recovery(*parts)))
        base, end = (_percent(mean_share(policies[name])) for name in (taught["base"], student))
        lines.append(_row(str(seed), "mean", base, "", end, _recovered(policies, student, taught, [student])[0]))
    said = ["200 held-out prompts a domain (eval split), 95 % intervals over prompts."]
    said += [f"Seed {seed}: {source(result)}" for seed, result in sorted(by_seed.items())]
    return "\n".join([*lines, "", *textwrap.wrap(" ".join(said), 120, break_on_hyphens=False)]) + "\n"


def quickstart_sampled() -> str:
    """The student taught by every token's whole distribution, and by one draw with and without a baseline, by seed."""
    forms = ("full-vocab", "no-baseline", "sampled")
    found = {(r["objective"], r["seed"]): r for r in results("quickstart")}
    head = ("seed", "domain", "base", "exact", "sampled, no baseline", "sampled, baseline")
    lines = [_row(*head, "baseline − none, points", "p"), _row(*["---"] * (len(head) + 2))]
    for seed in (0, 1, 2):
        runs = [found[form, seed] for form in forms if (form, seed) in found]
        if len(runs) < len(forms):
            lines.append(_row(str(seed), *["not run"] * (len(head) + 1)))
            continue
        ends = [right(runs[0]["policies"]["base"]["domains"])]
        ends += [right(r["policies"]["student"]["domains"]) for r in runs]
        for domain in (*sorted(ends[0]), "mean"):
            parts = ends if domain == "mean" else [{domain: end[domain]} for end in ends]
            apart = compare(*parts[-2:], binary=True)
            cells = [_percent(mean_share(part) if domain == "mean" else share(part[domain])) for part in parts]
            cells += [points(apart), f"{apart.p:.2g}"]
            lines.append(_row(str(seed), domain, *cells))
    said = [f"Seed {seed}, {form}: {source(r)}" for (form, seed), r in sorted(found.items()) if form in forms[1:]]
    return "\n".join([*lines, "", *textwrap.wrap(" ".join(said), 120, break_on_hyphens=False)]) + "\n"


def _recovered(policies: dict[str, Right], student: str, taught: dict[str, Any], columns: list[str]) -> list[str]:
    """One cell a policy: under each teacher its domain's recovery, under the student that of the mean."""
    cells = dict.fromkeys(columns, "")
    every: list[Right] = [{}, {}, {}]
    for domain, teacher in taught["teachers"].items():
        parts = [{domain: policies[name][domain]} for name in (taught["base"], teacher, student)]
        cells[teacher] = _recovery(*parts)
        for whole, part in zip(every, parts, strict=True):
            whole.update(part)
    cells[student] = _recovery(*every)
    return [cells[name] for name in columns]


def _recovery(base: Right, teacher: Right, student: Right) -> str:
    found = recover(base, teacher, student)
    if found.value is None or found.low is None or found.high is None:
        return "– (no lead)"
    return f"{100 * found.value:.0f} % ({100 * found.low:.0f} to {100 * found.high:.0f})"


def _marked(found: Result, name: str, domain: str, text: str) -> str:
    """Bold for the domain's teacher."""
    return f"**{text}**" if any(t["teachers"].get(domain) == name for t in found["taught"].values()) else text


def alternatives() -> str:
    """Every arm at equal cost: accuracy over seeds, paired with exact MOPD, and what it cost."""
    run = _module(JOBS / "alternatives" / "run.py")
    by_arm = _by_arm("alternatives", [name for name, arm in run.ARMS.items() if not arm.like])
    rival = _ends(by_arm["mopd-exact"])
    domains = ("number_sorting", "spell_backward", "spiral_matrix")
    head = ("arm", "what it does", *domains, "mean", "− mopd-exact, points", "student tokens", "all tokens", "seeds")
    lines = [_row(*head), _row(*["---"] * len(head))]
    for name, found in by_arm.items():
        says = run.ARMS[name].says
        if not found:
            lines.append(_row(name, says, *["not run"] * (len(head) - 2)))
            continue
        ends = _ends(found)
        cells = [over_seeds([{d: end[d]} for end in ends.values()]) for d in domains]
        cells += [over_seeds(list(ends.values())), _apart(ends, rival) if name != "mopd-exact" else ""]
        lines.append(_row(name, says, *cells, *_cost(found), ", ".join(map(str, sorted(ends)))))
    return "\n".join(lines) + "\n"


def smollm2_mopd() -> str:
    """Every arm of the pretrained model: accuracy in the specialists' domains and in nobody's, and what it cost."""
    run = _module(JOBS / "smollm2-mopd" / "run_arm.py")
    by_arm = _by_arm("smollm2-mopd", run.ARMS)
    routing = load_job(JOBS / "smollm2-mopd").routing
    taught, ends = sorted(routing), {name: _ends(found) for name, found in by_arm.items()}
    own = {name: {s: {d: end[d] for d in taught} for s, end in seeds.items()} for name, seeds in ends.items()}
    head = ("arm", "what it does", *taught, "mean of these", "− mopd-exact, points", "recovered", "capital (nobody's)",
            "student tokens", "all tokens", "minutes", "seeds")  # fmt: skip
    lines = [_row(*head), _row(*["---"] * len(head))]
    for name, found in by_arm.items():
        says = run.ARMS[name].says
        if not found:
            lines.append(_row(name, says, *["not run"] * (len(head) - 2)))
            continue
        cells = [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in taught]
        cells += [over_seeds(list(own[name].values())), _apart(own[name], own["mopd-exact"])]
        cells[-1] = "" if name == "mopd-exact" else cells[-1]
        cells += ["" if name in ("base", *run.SPECIALISTS) else _recovered_in_all(own, routing, name)]
        cells += [over_seeds([{"capital": end["capital"]} for end in ends[name].values()]), *_cost(found)]
        minutes = f"{_mean(r['seconds'] for r in found) / 60:.0f}"
        lines.append(_row(name, says, *cells, minutes, ", ".join(map(str, sorted(ends[name])))))
    apart: dict[str, float] = next(
        (r["teacher_distance"] for name in ("mopd-exact", "mopd-sampled") for r in by_arm[name]), {}
    )
    if apart:
        said = ", ".join(f"{domain} {nat:.2f}" for domain, nat in apart.items())
        lines += ["", f"Exact reverse KL from the base to each teacher, nat per token of the base's answers: {said}."]
    return "\n".join(lines) + "\n"


def _recovered_in_all(own: dict[str, dict[int, Right]], routing: dict[str, str], student: str) -> str:
    """Seed by seed, how much of the specialists' lead in their own domains an arm has."""
    needed = ("base", student, *routing.values())
    seeds = sorted(set.intersection(*(set(own[name]) for name in needed)))
    cells = [
        _recovery(own["base"][s], {d: own[teacher][s][d] for d, teacher in routing.items()}, own[student][s])
        for s in seeds
    ]
    return "; ".join(cells) or "not run"


def _by_arm(job: str, names: Iterable[str]) -> dict[str, list[Result]]:
    """A job's results by arm, in the order of the names; of other arms none."""
    return {name: [result for result in results(job) if result["arm"] == name] for name in names}


def _ends(found: list[Result]) -> dict[int, Right]:
    """What an arm's last policy got right, by seed."""
    return {result["seed"]: right(result["curve"][-1]["right"]) for result in found}


def _cost(found: list[Result]) -> tuple[str, str]:
    """The student's tokens, and all; means over seeds."""
    student, every = (_mean(costs) for costs in zip(*((r["tokens"]["student"], sum(r["tokens"].values()))
                                                      for r in found), strict=True))  # fmt: skip
    return f"{student:,.0f}", f"{every:,.0f}"


def over_seeds(ends: list[Right]) -> str:
    """One seed: the share with its interval over prompts. Several: the mean, and the lowest and highest seed."""
    if len(ends) == 1:
        return _percent(mean_share(ends[0]) if len(ends[0]) > 1 else share(next(iter(ends[0].values()))))
    means = [100 * float(np.mean([values.mean() for values in end.values()])) for end in ends]
    return f"{np.mean(means):.1f} % ({min(means):.0f} … {max(means):.0f})"


def _apart(ends: dict[int, Right], rival: dict[int, Right]) -> str:
    """Difference to exact MOPD, paired by prompt, seed by seed."""
    shared = sorted(ends.keys() & rival.keys())
    if not shared:
        return "not run"
    pairs = [compare(rival[seed], ends[seed], binary=True) for seed in shared]
    return "; ".join(map(points, pairs))


def points(apart: Difference) -> str:
    """Points of accuracy that one policy is above another, with the 95 % interval."""
    return f"{100 * apart.value:+.1f} ({100 * apart.low:+.1f} to {100 * apart.high:+.1f})"


def claims() -> str:
    """Arms that change one thing in exact MOPD, or in its start: accuracy over seeds, and paired with it."""
    run = _module(JOBS / "alternatives" / "run.py")
    names = ["base", "mopd-exact", *(name for name, arm in run.ARMS.items() if arm.like)]
    found = _by_arm("alternatives", names)
    ends = {name: _ends(found[name]) for name in names}
    domains = ("number_sorting", "spell_backward", "spiral_matrix")
    head = ("arm", "what it changes", *domains, "mean", "− mopd-exact, points", "student tokens", "seeds")
    lines = [_row(*head), _row(*["---"] * len(head))]
    for name in names:
        if not found[name]:
            lines.append(_row(name, run.ARMS[name].says, *["not run"] * (len(head) - 2)))
            continue
        cells = [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in domains]
        cells += [over_seeds(list(ends[name].values()))]
        cells += [_apart(ends[name], ends["mopd-exact"]) if name != "mopd-exact" else ""]
        cells += [f"{np.mean([r['tokens']['student'] for r in found[name]]):,.0f}"]
        lines.append(_row(name, run.ARMS[name].says, *cells, ", ".join(map(str, sorted(ends[name])))))
    return "\n".join(lines) + "\n"


def near() -> str:
    """Every form of the objective: both rates on tuning prompts, the better one on held-out ones and beside base."""
    run = _module(JOBS / "near" / "run_near.py")
    by_arm = _by_arm("near", run.ARMS)
    ends = {name: _ends(found) for name, found in by_arm.items()}
    rate = load_job(JOBS / "near").stage("exact").train.learning_rate
    tries = [f"tuning split, {rate * setting:g}" for setting in run.RATES]
    rest = ("spell_backward", "spiral_matrix")
    head = ("arm", "what it does", *tries, "rate kept", "number_sorting", "− base, points", *rest, "seeds")
    lines = [_row(*head), _row(*["---"] * len(head))]
    for name, found in by_arm.items():
        says = run.ARMS[name].says
        if not found:
            lines.append(_row(name, says, *["not run"] * (len(head) - 2)))
            continue
        searched = next((r for r in found if r["tried"]), None)
        tried = {t["setting"]: t["accuracy"] for t in searched["tried"]} if searched else {}
        cells = [f"{100 * tried[setting]:.1f} %" if tried else "" for setting in run.RATES]
        cells += [f"{rate * searched['setting']:g}" if searched else ""]
        sorting, base = ({s: {"number_sorting": end["number_sorting"]} for s, end in ends[n].items()}
                         for n in (name, "base"))  # fmt: skip
        cells += [over_seeds(list(sorting.values())), _apart(sorting, base) if name != "base" else ""]
        cells += [over_seeds([{d: end[d]} for end in ends[name].values()]) for d in rest]
        lines.append(_row(name, says, *cells, ", ".join(map(str, sorted(ends[name])))))
    return "\n".join(lines) + "\n"


def conflict() -> str:
    """Every arm of two skills in conflict: accuracy in both and in nobody's, how far it moved, its entropy and cost.

    Both domains ask about the same pairs of numbers in the same order, so that a pair may have both answers right.
    """
    run = _module(JOBS / "conflict" / "run_conflict.py")
    by_arm = _by_arm("conflict", run.ARMS)
    head = ("arm", "what it does", *run.SPECIALISTS, "both of a pair", "neither", "capital (nobody's)",
            "KL to its start", "entropy", "student tokens", "all tokens", "seeds")  # fmt: skip
    lines = [_row(*head), _row(*["---"] * len(head))]
    for name, found in by_arm.items():
        says = run.ARMS[name].says
        if not found:
            lines.append(_row(name, says, *["not run"] * (len(head) - 2)))
            continue
        ends = _ends(found)
        cells = [over_seeds([{d: end[d]} for end in ends.values()]) for d in run.SPECIALISTS]
        several = [np.sum([end[d] for d in run.SPECIALISTS], axis=0) for end in ends.values()]
        cells += [over_seeds([{"pair": (count == wanted).astype(int)} for count in several]) for wanted in (2, 0)]
        cells += [over_seeds([{"capital": end["capital"]} for end in ends.values()])]
        cells += [_in_both(found, "kl"), _in_both(found, "entropy"), *_cost(found)]
        lines.append(_row(name, says, *cells, ", ".join(map(str, sorted(ends)))))
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
    run = _module(JOBS / "teacher-count" / "run_count.py")
    by_arm = _by_arm("teacher-count", run.ARMS)
    ends = {name: _ends(found) for name, found in by_arm.items()}
    head = ("arm", "teachers that it adds", "mean of ten domains", "− the arm before, points", "in the domains added",
            "− generalist where nobody teaches", "student tokens", "all tokens", "seeds")  # fmt: skip
    lines, before, taught = [_row(*head), _row(*["---"] * len(head))], "generalist", 0
    for name, found in by_arm.items():
        count = run.COUNTS.get(name, 0)
        added, untaught = run.ORDER[taught:count], run.ORDER[count:]
        if not found:
            lines.append(_row(name, ", ".join(added), *["not run"] * (len(head) - 2)))
            continue
        cells = [over_seeds(list(ends[name].values())), "", "", ""]
        if count:
            cells[1:3] = [
                _apart(ends[name], ends[before]),
                _apart(_within(ends[name], added), _within(ends[before], added)),
            ]
        if count and untaught:
            cells[3] = _apart(_within(ends[name], untaught), _within(ends["generalist"], untaught))
        lines.append(_row(name, ", ".join(added), *cells, *_cost(found), ", ".join(map(str, sorted(ends[name])))))
        before, taught = name, count
    return "\n".join(lines) + "\n"


def _within(ends: dict[int, Right], domains: Iterable[str]) -> dict[int, Right]:
    """Of some domains alone, by seed."""
    return {seed: {domain: end[domain] for domain in domains} for seed, end in ends.items()}


def _in_both(found: list[Result], what: str) -> str:
    """Nat per token of an arm's own answers, a mean over domains; over seeds the mean, lowest and highest."""
    values = [_mean(domain[what] for domain in result["moved"].values()) for result in found if result["moved"]]
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{_mean(values):.2f} ({min(values):.2f} … {max(values):.2f})"


def gradients(forms: str) -> list[Result]:
    """What jobs/quickstart/signals.py measured of some forms, by file name."""
    files = sorted((JOBS / "quickstart" / "gradients").glob("*.json"))
    return [found for found in (json.loads(file.read_text()) for file in files) if found["forms"] == forms]


def noise() -> str:
    """Ways to use a sampled token: the noise of their gradients, and where their mean leads."""
    (found,) = (r for r in gradients("baselines") if not r["mixed"])
    head = ("advantage of a sampled token", "noise", "noise that exact does not have", "cosine of the mean with exact")
    lines = [_row(*head, "bias", "by chance"), _row(*["---"] * 6)]
    for row in found["rows"]:
        cells = [f"{row['apart']:.1f}" if row["apart"] else "–", f"{row['cosine']:.2f}"]
        cells += [f"{row['bias']:.2f}", f"{row['chance']:.2f}"]
        lines.append(_row(row["signal"], f"{row['noise']:.1f}", *cells))
    said = f"{found['batches']} batches of {found['answers']} answers. {source(found)}"
    return "\n".join([*lines, "", *textwrap.wrap(said, 120, break_on_hyphens=False)]) + "\n"


def noise_mixed() -> str:
    """Noise of exact and sampled gradients by the domains, and so the teachers, of a batch."""
    every = sorted((r for r in gradients("baselines") if r["mixed"]), key=lambda r: (len(r["mixed"]), r["mixed"]))
    lines = [_row("domains in a batch", "batches", "exact", "log-ratio", "ratio"), _row(*["---"] * 5)]
    for found in every:
        exact, drawn = (row["noise"] for row in found["rows"][:2])
        cells = (f"{exact:.1f}", f"{drawn:.1f}", f"{drawn / exact:.1f}")
        lines.append(_row(", ".join(found["mixed"]), str(found["batches"]), *cells))
    return "\n".join([*lines, "", *textwrap.wrap(source(every[0]), 120, break_on_hyphens=False)]) + "\n"


def signals() -> str:
    """Every form of the signal: bytes a token, and its gradient beside the exact one's."""
    (found,) = gradients("signals")
    columns = {"bytes": "d", "bias": ".3f", "chance": ".3f", "noise": ".2f", "cosine": ".3f", "time": ".2f"}
    head = ("signal", "bytes/token", "bias", "by chance", "noise", "cosine", "time, full = 1")
    lines = [_row(*head), _row(*["---"] * len(head))]
    for row in found["rows"]:
        lines.append(_row(row["signal"], *(format(row[name], form) for name, form in columns.items())))
    return "\n".join([*lines, "", *textwrap.wrap(source(found), 120, break_on_hyphens=False)]) + "\n"


def bought() -> str:
    """An SVG: accuracy against the tokens the student learnt from, mean over the seeds that all arms have."""
    run = _module(JOBS / "alternatives" / "run.py")
    wanted = [name for name, arm in run.ARMS.items() if not arm.like and name not in run.SPECIALISTS]
    found = {name: {r["seed"]: r["curve"] for r in results("alternatives") if r["arm"] == name} for name in wanted}
    found = {name: seeds for name, seeds in found.items() if seeds}
    shared = set.intersection(*(set(seeds) for seeds in found.values()))
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, seeds in found.items():
        points = list(zip(*(seeds[seed] for seed in sorted(shared)), strict=True))
        curves[name] = [(_mean(p["tokens"] for p in several), _mean(map(_accuracy, several))) for several in points]
    base = curves["base"][0]
    trained = {name: [base, *curve] if len(curve) > 1 else curve for name, curve in curves.items()}
    return curves_picture(
        "What 4,096 answers buy, by arm", trained, across="tokens the student learnt from",
        upward=f"entirely right, mean over three domains; seeds {', '.join(map(str, sorted(shared)))}",
    )  # fmt: skip


def _accuracy(point: dict[str, Any]) -> float:
    return _mean(float(values.mean()) for values in right(point["right"]).values())


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


PICTURE = ROOT / "docs" / "images" / "alternatives.svg"
FIGURES: dict[str, Callable[[], str]] = {
    "quickstart": quickstart, "quickstart-seeds": quickstart_seeds,
    "quickstart-sampled": quickstart_sampled, "alternatives": alternatives, "claims": claims,
    "near": near, "smollm2-mopd": smollm2_mopd, "conflict": conflict, "teacher-count": teacher_count,
    "noise": noise, "noise-mixed": noise_mixed, "signals": signals,
}  # fmt: skip


def stale() -> Iterator[str]:
    """What is not as it was measured: blocks unlike the results, results of other settings or another sampler."""
    for page in PAGES:
        file = ROOT / page
        text = file.read_text() if file.exists() else ""
        for name, body in BLOCK.findall(text):
            if body != FIGURES[name]():
                yield f"{page}: block {name!r} differs from the results; run: python jobs/figures.py"
    if not PICTURE.exists() or PICTURE.read_text() != bought():
        yield f"{PICTURE.relative_to(ROOT)} differs from the results; run: python jobs/figures.py"
    for folder in sorted(JOBS.glob("*/results")):
        for result in results(folder.parent.name):
            yield from _stale_result(folder.parent.name, result)
    stages = _module(JOBS / "quickstart" / "signals.py").STAGES
    now = settings_digest(load_job(JOBS / "quickstart"), stages)
    for result in (*gradients("signals"), *gradients("baselines")):
        if (result["settings"], result["sampler"]) != (now, SAMPLER):
            yield "jobs/quickstart/gradients: job or sampler have changed; run jobs/quickstart/signals.py again"


def _stale_result(job: str, result: Result) -> Iterator[str]:
    where = f"jobs/{job}: result of commit {result['commit']}"
    if result["sampler"] not in (SAMPLER, FIRST_SAMPLER):
        yield f"{where}: sampler {result['sampler']!r}, which drew its samples, is no longer here; run it again"
    said = {"arm": result.get("arm", ""), "setting": result.get("setting", 1.0)}
    said |= {"objective": result.get("objective", ""), "stages": tuple(result.get("stages", ()))}
    now = _settings_now(JOBS / job, **said)
    if result["settings"] != now:
        yield f"{where}: the job's settings have changed ({result['settings']} then, {now} now); run it again"


@cache
def _settings_now(folder: Path, arm: str, setting: float, objective: str, stages: tuple[str, ...]) -> str:
    """Digest of what a job's file says today: of an arm at a setting, of an objective's quickstart, or of a recipe.

    stages: those that a recipe's result has; one that was added since changes nothing that was measured.
    """
    if folder.name in COMPARISONS:
        comparison = _module(folder / COMPARISONS[folder.name]).COMPARISON
        made = load_job(folder, overrides=comparison.rates(comparison.arms[arm], setting))
        return settings_digest(made, (*comparison.shared, *comparison.arms[arm].run))
    if objective:
        made = _module(folder / "seeds.py").job_of(objective, 0)
        return settings_digest(made, [stage.name for stage in made.stages])
    made = load_job(folder)
    return settings_digest(
        made.model_copy(update={"stages": tuple(stage for stage in made.stages if stage.name in stages)})
    )


def main() -> None:
    """Rewrite the blocks, or say what is stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        problems = list(stale())
        print("\n".join(problems))
        sys.exit(bool(problems))
    PICTURE.write_text(bought())
    for page in PAGES:
        file = ROOT / page
        before = file.read_text()
        after = BLOCK.sub(lambda m: f"<!-- figures: {m[1]} -->\n{FIGURES[m[1]]()}<!-- end of figures -->", before)
        if after != before:
            file.write_text(after)
            print(f"wrote {page}")


def _percent(found: Estimate) -> str:
    return f"{100 * found.value:.1f} % ({100 * found.low:.0f}–{100 * found.high:.0f})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def source(found: Result) -> str:
    """Where a result comes from: commit, settings, sampler, date and machine."""
    host = found["host"]
    drawn = found["sampler"] + ("" if found["sampler"] == SAMPLER else f" (new samples: {SAMPLER})")
    return (
        f"Commit {found['commit']}, settings {found['settings']}, sampler {drawn}, {found['date']}, "
        f"{host['cores']} cores ({host['processor']}), no GPU."
    )


def _module(file: Path) -> ModuleType:
    """A script of a job as a module."""
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
