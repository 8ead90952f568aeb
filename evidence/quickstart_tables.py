"""Tables of the quickstart, from jobs/quickstart/results/*.json."""

from __future__ import annotations

import textwrap
from typing import Any

from results import Result, Right, line, percent, points, recovery, results, right, source

from mopd_dataplane.query.statistics import compare, mean_share, share


def quickstart(objective: str = "full-vocab", seed: int = 0) -> str:
    """Accuracy of every policy of one quickstart, what the student recovered, and the mean rewards."""
    result = next((r for r in results("quickstart") if (r["objective"], r["seed"]) == (objective, seed)), None)
    if result is None:
        return "not run\n"
    policies = {name: right(policy["domains"]) for name, policy in result["policies"].items()}
    domains = sorted(next(iter(policies.values())))
    head = [f"{name} v{policy['version']}" for name, policy in result["policies"].items()]
    lines = [line("entirely right", *head), line(*["---"] * (1 + len(head)))]
    for domain in domains:
        cells = [percent(share(policies[name][domain])) for name in policies]
        lines.append(line(domain, *(_marked(result, name, domain, c) for name, c in zip(policies, cells, strict=True))))
    lines.append(line("mean", *(percent(mean_share(policies[name])) for name in policies)))
    for student, taught in result["taught"].items():
        lines.append(line(f"recovered by {student}", *_recovered(policies, student, taught, list(policies))))
    lines += ["", line("mean reward, partial credit included", *head), line(*["---"] * (1 + len(head)))]
    for domain in domains:
        rewards = [f"{policy['domains'][domain]['reward']:.3f}" for policy in result["policies"].values()]
        lines.append(line(domain, *rewards))
    prompts = {len(values) for values in next(iter(policies.values())).values()}
    counts = "/".join(map(str, sorted(prompts)))
    note = f"Seed {seed}, {counts} held-out prompts a domain ({result['split']} split), "
    lines += ["", *textwrap.wrap(f"{note}95 % intervals. {source(result)}", 120, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def quickstart_seeds(objective: str = "full-vocab") -> str:
    """Accuracy of base, specialist and student of every seed, domain by domain, and what the student recovered."""
    by_seed = {r["seed"]: r for r in results("quickstart") if r["objective"] == objective}
    lines = [line("seed", "domain", "base", "its specialist", "student", "recovered"), line(*["---"] * 6)]
    for seed in (0, 1, 2):
        if seed not in by_seed:
            lines.append(line(str(seed), *["not run"] * 5))
            continue
        policies = {name: right(policy["domains"]) for name, policy in by_seed[seed]["policies"].items()}
        ((student, taught),) = by_seed[seed]["taught"].items()
        for domain, teacher in taught["teachers"].items():
            parts = [{domain: policies[name][domain]} for name in (taught["base"], teacher, student)]
            cells = [percent(share(part[domain])) for part in parts]
            lines.append(line(str(seed), domain, *cells, recovery(*parts)))
        base, end = (percent(mean_share(policies[name])) for name in (taught["base"], student))
        lines.append(line(str(seed), "mean", base, "", end, _recovered(policies, student, taught, [student])[0]))
    sources = ["200 held-out prompts a domain (eval split), 95 % intervals over prompts."]
    sources += [f"Seed {seed}: {source(result)}" for seed, result in sorted(by_seed.items())]
    return "\n".join([*lines, "", *textwrap.wrap(" ".join(sources), 120, break_on_hyphens=False)]) + "\n"


def quickstart_sampled() -> str:
    """The student taught by every token's whole distribution, and by one draw with and without a baseline, by seed."""
    forms = ("full-vocab", "no-baseline", "sampled")
    by_form = {(r["objective"], r["seed"]): r for r in results("quickstart")}
    head = ("seed", "domain", "base", "exact", "sampled, no baseline", "sampled, baseline")
    lines = [line(*head, "baseline − none, points", "p"), line(*["---"] * (len(head) + 2))]
    for seed in (0, 1, 2):
        runs = [by_form[form, seed] for form in forms if (form, seed) in by_form]
        if len(runs) < len(forms):
            lines.append(line(str(seed), *["not run"] * (len(head) + 1)))
            continue
        ends = [right(runs[0]["policies"]["base"]["domains"])]
        ends += [right(r["policies"]["student"]["domains"]) for r in runs]
        for domain in (*sorted(ends[0]), "mean"):
            parts = ends if domain == "mean" else [{domain: end[domain]} for end in ends]
            apart = compare(*parts[-2:], binary=True)
            cells = [percent(mean_share(part) if domain == "mean" else share(part[domain])) for part in parts]
            cells += [points(apart), f"{apart.p:.2g}"]
            lines.append(line(str(seed), domain, *cells))
    sources = [f"Seed {seed}, {form}: {source(r)}" for (form, seed), r in sorted(by_form.items()) if form in forms[1:]]
    return "\n".join([*lines, "", *textwrap.wrap(" ".join(sources), 120, break_on_hyphens=False)]) + "\n"


def quickstart_ends(objective: str) -> list[Right]:
    """What the students of an objective got right, by seed."""
    runs = [result for result in results("quickstart") if result["objective"] == objective]
    return [right(result["policies"]["student"]["domains"]) for result in runs]


def _recovered(policies: dict[str, Right], student: str, taught: dict[str, Any], columns: list[str]) -> list[str]:
    """One cell a policy: under each teacher its domain's recovery, under the student that of the mean."""
    cells = dict.fromkeys(columns, "")
    every: list[Right] = [{}, {}, {}]
    for domain, teacher in taught["teachers"].items():
        parts = [{domain: policies[name][domain]} for name in (taught["base"], teacher, student)]
        cells[teacher] = recovery(*parts)
        for whole, part in zip(every, parts, strict=True):
            whole.update(part)
    cells[student] = recovery(*every)
    return [cells[name] for name in columns]


def _marked(result: Result, name: str, domain: str, text: str) -> str:
    """Bold for the domain's teacher."""
    return f"**{text}**" if any(t["teachers"].get(domain) == name for t in result["taught"].values()) else text
