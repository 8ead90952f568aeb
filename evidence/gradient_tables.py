"""Tables of what jobs/quickstart/signals.py measured: jobs/quickstart/gradients/*.json."""

from __future__ import annotations

import json
import textwrap

from results import JOBS, Result, line, source


def gradients(forms: str) -> list[Result]:
    """What jobs/quickstart/signals.py measured of some forms, by file name."""
    files = sorted((JOBS / "quickstart" / "gradients").glob("*.json"))
    return [result for result in (json.loads(file.read_text()) for file in files) if result["forms"] == forms]


def noise() -> str:
    """Ways to use a sampled token: the noise of their gradients, and where their mean leads."""
    (result,) = (r for r in gradients("baselines") if not r["mixed"])
    head = ("advantage of a sampled token", "noise", "noise that exact does not have", "cosine of the mean with exact")
    lines = [line(*head, "bias", "by chance"), line(*["---"] * 6)]
    for row in result["rows"]:
        cells = [f"{row['apart']:.1f}" if row["apart"] else "–", f"{row['cosine']:.2f}"]
        cells += [f"{row['bias']:.2f}", f"{row['chance']:.2f}"]
        lines.append(line(row["signal"], f"{row['noise']:.1f}", *cells))
    source_line = f"{result['batches']} batches of {result['answers']} answers. {source(result)}"
    return "\n".join([*lines, "", *textwrap.wrap(source_line, 120, break_on_hyphens=False)]) + "\n"


def noise_mixed() -> str:
    """Noise of exact and sampled gradients by the domains, and so the teachers, of a batch."""
    every = sorted((r for r in gradients("baselines") if r["mixed"]), key=lambda r: (len(r["mixed"]), r["mixed"]))
    lines = [line("domains in a batch", "batches", "exact", "log-ratio", "ratio"), line(*["---"] * 5)]
    for result in every:
        exact, drawn = (row["noise"] for row in result["rows"][:2])
        cells = (f"{exact:.1f}", f"{drawn:.1f}", f"{drawn / exact:.1f}")
        lines.append(line(", ".join(result["mixed"]), str(result["batches"]), *cells))
    return "\n".join([*lines, "", *textwrap.wrap(source(every[0]), 120, break_on_hyphens=False)]) + "\n"


def signals() -> str:
    """Every form of the signal: bytes a token, and its gradient beside the exact one's."""
    (result,) = gradients("signals")
    columns = {"bytes": "d", "bias": ".3f", "chance": ".3f", "noise": ".2f", "cosine": ".3f", "time": ".2f"}
    head = ("signal", "bytes/token", "bias", "standard error", "noise", "cosine", "time, full = 1")
    lines = [line(*head), line(*["---"] * len(head))]
    for row in result["rows"]:
        lines.append(line(row["signal"], *(format(row[name], form) for name, form in columns.items())))
    return "\n".join([*lines, "", *textwrap.wrap(source(result), 120, break_on_hyphens=False)]) + "\n"
