"""The measures of a sweep: curves of every arm, and arms paired on the same held-out prompts.

An arm has one store a seed. Accuracy is the mean over domains; where a reward does not say what is right, the mean
reward is measured instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.query.answers import Answers, Values
from mopd_dataplane.query.compare import EvaluatedStage, read_stage
from mopd_dataplane.query.job import remembered_job, stage_starts
from mopd_dataplane.query.measures import KL_BY_TEACHER
from mopd_dataplane.query.spent import Spent, cost_of
from mopd_dataplane.query.statistics import Difference, Estimate, compare, mean_share
from mopd_dataplane.store.dataset import Store

Score = Literal["accuracy", "mean reward"]
ByDomain = dict[str, Values]
"""Domain -> score of each prompt that all runs answered."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A policy version of one run."""

    version: int
    spent: Spent
    score: float | None
    """Mean over domains; None where the version was not evaluated."""
    reverse_kl: float | None
    """Nat per token of the answers that this version wrote; None where no teacher scored any."""


@dataclass(frozen=True, kw_only=True)
class ArmMeasures:
    """One arm of a sweep."""

    name: str
    curves: dict[int, list[Point]]
    """Seed -> versions, rising."""
    score: Estimate | None = None
    """Score of the newest policies, the mean over seeds. None for an arm without a finished run."""
    by_seed: dict[int, float] = field(default_factory=dict)
    """Seed -> score of its newest policy."""
    difference: Difference | None = None
    """This arm minus the first, over the seeds of both: prompts are drawn, and keep their answers of all seeds."""
    differences: dict[int, Difference] = field(default_factory=dict)
    """Seed -> this arm minus the first."""


@dataclass(frozen=True, kw_only=True)
class SweepMeasures:
    """The measures of a sweep."""

    name: str
    stage: str
    split: str
    score: Score
    prompts: int
    """Held-out prompts that all runs answered."""
    arms: list[ArmMeasures]


@dataclass(frozen=True)
class _RunData:
    evaluated: EvaluatedStage
    start: Answers | None
    """Answers of the policy that the stage starts from."""
    kl_by_version: dict[int, float]

    @property
    def newest(self) -> Answers:
        """Answers of the newest version."""
        return self.evaluated.held_out.policies[self.evaluated.stage, self.evaluated.versions[-1]]


def measure_sweep(name: str, arms: Mapping[str, Mapping[int, Path]], stage: str) -> SweepMeasures:
    """Measure a stage in every finished store of a sweep.

    arms: name -> seed -> store; differences are to the first arm. Raises UnknownNameError where no store has an
    evaluated policy of the stage, MismatchError where the stores have no held-out prompt in common.
    """
    data = {arm: _read_arm(stores, stage) for arm, stores in arms.items()}
    runs = [run for by_seed in data.values() for run in by_seed.values()]
    if not runs:
        raise UnknownNameError(
            f"sweep {name}: no run has evaluated stage {stage!r} yet; run the sweep without --report first"
        )
    splits = sorted({run.evaluated.held_out.split for run in runs})
    if len(splits) > 1:
        raise MismatchError(f"sweep {name}: runs answered prompts of the splits {splits}; sweep one eval.split")
    prompts = _common_prompts(runs)
    if not prompts:
        raise MismatchError(
            f"sweep {name}: the runs have no held-out prompt in common; sweep settings that leave the domains alone"
        )
    score: Score = "accuracy" if _scores(runs[0].newest, prompts, "accuracy", runs) else "mean reward"
    scored = {
        arm: {seed: _scores(run.newest, prompts, score, runs) for seed, run in by_seed.items()}
        for arm, by_seed in data.items()
    }
    first = next(iter(arms))
    curves = {arm: _curves(data[arm], prompts, score, runs) for arm in arms}
    measures = [_measure_arm(arm, scored[arm], None if arm == first else scored[first], curves[arm]) for arm in arms]
    count = sum(map(len, _scores(runs[0].newest, prompts, score, runs).values()))
    return SweepMeasures(name=name, stage=stage, split=splits[0], score=score, prompts=count, arms=measures)


def _read_arm(stores: Mapping[int, Path], stage: str) -> dict[int, _RunData]:
    """Seed -> data of the runs that have evaluated the stage."""
    data = {}
    for seed, store in stores.items():
        try:
            evaluated = read_stage(f"{store}#{stage}")
        except UnknownNameError:
            continue
        opened = Store.open(str(store))
        start = stage_starts(remembered_job(opened)).get(stage, "")
        rows = opened.sql(f"""
            select iteration, (sum(mean_reverse_kl * loss_tokens) / sum(loss_tokens))::double as reverse_kl
            from samples join ({KL_BY_TEACHER}) using (uid)
            where loss_tokens > 0 and policy <> 'reference' and stage = {literal(stage)} group by iteration""")
        kl_by_version = {row["iteration"]: row["reverse_kl"] for row in rows.to_pylist()}
        data[seed] = _RunData(evaluated, evaluated.held_out.newest(start), kl_by_version)
    return data


def _common_prompts(runs: Sequence[_RunData]) -> dict[str, list[str]]:
    """Domain -> prompts that the newest policy of every run answered, with one text in all stores."""
    first = runs[0]
    prompts = {}
    for domain, names in first.newest.prompts.items():
        shared = [
            name
            for name in names
            if all(
                name in run.newest.prompts.get(domain, ())
                and run.evaluated.texts.get(name) == first.evaluated.texts.get(name)
                for run in runs
            )
        ]
        if shared:
            prompts[domain] = shared
    return prompts


def _scores(answers: Answers, prompts: Mapping[str, list[str]], score: Score, runs: Sequence[_RunData]) -> ByDomain:
    """Scores of a policy on the given prompts, of the domains in which every run has such a score."""
    scores = {}
    for domain, names in prompts.items():
        if not all(domain in _values(run.newest, score) for run in runs) or domain not in _values(answers, score):
            continue
        positions = {name: position for position, name in enumerate(answers.prompts[domain])}
        if all(name in positions for name in names):
            scores[domain] = _values(answers, score)[domain][[positions[name] for name in names]]
    return scores


def _values(answers: Answers, score: Score) -> dict[str, Values]:
    return answers.correct if score == "accuracy" else answers.reward


def _measure_arm(
    name: str, own: Mapping[int, ByDomain], first: Mapping[int, ByDomain] | None, curves: dict[int, list[Point]]
) -> ArmMeasures:
    """Scores of an arm, and its differences to the first; first: None for the first arm itself."""
    if not own:
        return ArmMeasures(name=name, curves=curves)
    shared = sorted(own.keys() & first.keys()) if first else []
    binary = all(set(np.unique(values)) <= {0.0, 1.0} for scores in own.values() for values in scores.values())
    return ArmMeasures(
        name=name,
        curves=curves,
        score=mean_share(_over_seeds(own, sorted(own))),
        by_seed={seed: _mean(scores) for seed, scores in own.items()},
        difference=_difference(first, own, shared),
        differences={seed: compare(first[seed], own[seed], binary=binary) for seed in shared} if first else {},
    )


def _difference(
    first: Mapping[int, ByDomain] | None, own: Mapping[int, ByDomain], seeds: Sequence[int]
) -> Difference | None:
    """Paired difference over seeds; None without a first arm, or without a seed that both have run."""
    if first is None or not seeds:
        return None
    return compare(_over_seeds(first, seeds), _over_seeds(own, seeds), binary=False)


def _over_seeds(scores: Mapping[int, ByDomain], seeds: Sequence[int]) -> ByDomain:
    """Domain -> mean over seeds of each prompt's score."""
    return {domain: np.mean([scores[seed][domain] for seed in seeds], axis=0) for domain in scores[seeds[0]]}


def _mean(scores: ByDomain) -> float:
    return float(np.mean([values.mean() for values in scores.values()]))


def _curves(
    data: Mapping[int, _RunData], prompts: Mapping[str, list[str]], score: Score, runs: Sequence[_RunData]
) -> dict[int, list[Point]]:
    """Seed -> a point for every version that was evaluated or whose answers a teacher scored."""
    curves = {}
    for seed, run in data.items():
        policies = run.evaluated.held_out.policies
        answers = {version: policies[run.evaluated.stage, version] for version in run.evaluated.versions}
        if run.start is not None:
            answers.setdefault(0, run.start)
        points = []
        for version in sorted(answers.keys() | run.kl_by_version.keys()):
            scores = _scores(answers[version], prompts, score, runs) if version in answers else {}
            points.append(
                Point(
                    version=version,
                    spent=cost_of(run.evaluated.spent, version),
                    score=_mean(scores) if scores else None,
                    reverse_kl=run.kl_by_version.get(version),
                )
            )
        curves[seed] = points
    return curves
