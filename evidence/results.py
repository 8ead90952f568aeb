"""Committed results of the jobs, jobs/<job>/results/*.json, and the cells of tables that are made of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mopd_dataplane.query.statistics import Difference, Estimate, compare, mean_share, recover, share
from mopd_dataplane.rollout.engines.sampling import SAMPLER

JOBS = Path(__file__).parents[1] / "jobs"
Result = dict[str, Any]
Right = dict[str, np.ndarray]
"""Domain -> 1 or 0 for every prompt."""


def results(job: str, folder: str = ".") -> list[Result]:
    """Committed results of a job, by file name.

    folder: `tried` for searches that are not over, `begun` for what begun_answers.py measures.
    """
    return [json.loads(file.read_text()) for file in sorted((JOBS / job / "results" / folder).glob("*.json"))]


def tried(job: str, arm: str) -> dict[float, float]:
    """Settings that an arm's search has tried, and the share of tuning prompts answered right with each."""
    entries = [one for one in results(job, "tried") if one["arm"] == arm]
    entries += [one for result in results(job) if result.get("arm") == arm for one in result["tried"]]
    return {one["setting"]: one["accuracy"] for one in entries}


def right(domains: dict[str, dict[str, Any]]) -> Right:
    """What was right, from the strings of a result; domains whose reward does not say so are left out."""
    digits_by_domain = {domain: answers["correct"] for domain, answers in domains.items()}
    return {domain: np.array([int(digit) for digit in digits]) for domain, digits in digits_by_domain.items() if digits}


def source(result: Result) -> str:
    """Where a result comes from: commit, settings, sampler, date and machine."""
    host = result["host"]
    drawn = result["sampler"] + ("" if result["sampler"] == SAMPLER else f" (new samples: {SAMPLER})")
    return (
        f"Commit {result['commit']}, settings {result['settings']}, sampler {drawn}, {result['date']}, "
        f"{host['cores']} cores ({host['processor']}), no GPU."
    )


def module(file: Path) -> ModuleType:
    """A script of a job as a module."""
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def over_seeds(ends: list[Right]) -> str:
    """One seed: the share with its interval over prompts. Several: the mean, and the lowest and highest seed."""
    if len(ends) == 1:
        return percent(mean_share(ends[0]) if len(ends[0]) > 1 else share(next(iter(ends[0].values()))))
    means = [100 * float(np.mean([values.mean() for values in end.values()])) for end in ends]
    return f"{np.mean(means):.1f} % ({min(means):.0f} … {max(means):.0f})"


def points(apart: Difference) -> str:
    """Points of accuracy that one policy is above another, with the 95 % interval."""
    return f"{100 * apart.value:+.1f} ({100 * apart.low:+.1f} to {100 * apart.high:+.1f})"


def paired(ends: dict[int, Right], rival: dict[int, Right]) -> str:
    """Points of accuracy over a rival, paired by prompt, seed by seed."""
    shared = sorted(ends.keys() & rival.keys())
    if not shared:
        return "not run"
    pairs = [compare(rival[seed], ends[seed], binary=True) for seed in shared]
    return "; ".join(map(points, pairs))


def recovery(base: Right, teacher: Right, student: Right) -> str:
    recovered = recover(base, teacher, student)
    if recovered.value is None or recovered.low is None or recovered.high is None:
        return "– (no lead)"
    return f"{100 * recovered.value:.0f} % ({100 * recovered.low:.0f} to {100 * recovered.high:.0f})"


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} % ({100 * estimate.low:.0f}–{100 * estimate.high:.0f})"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
