"""Run one arm of a comparison at one seed: train, choose the rate on the tuning split, measure on the evaluation split.

    python evidence/run_arm.py JOB ARM SEED [--results DIR] [--stores DIR]
    python evidence/run_arm.py JOB                print the arms of a job

Writes jobs/JOB/results/ARM-SEED.json, or does nothing if that file is complete; after a kill, the same command
continues. Where the job now has more iterations of an arm, or more of its versions are to be measured, it trains on and
measures what the file lacks. Seed 0 tries every setting of an arm and uses the best on the tuning prompts; until then
results/tried/ holds what was tried. Other seeds use that setting, and so do arms that change one thing in another arm.
The file holds every evaluation answer as right or wrong, which is all that intervals and paired tests need.
comparisons.py defines the arms.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparisons import COMPARISONS, Arm, Comparison
from grading import grade, in_order, mean_right
from torch import Tensor
from transformers import PreTrainedModel

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.job import Stage
from mopd_dataplane.job.load import load_job
from mopd_dataplane.job.sweep import SweepRun
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.prompts import render
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.provenance import provenance, settings_digest
from mopd_dataplane.run.steps.evaluate import answer
from mopd_dataplane.run.sweep import run_sweep

DISTANCE_PROMPTS = 100
"""Training prompts of a domain over whose answers a teacher's distance from the base is averaged."""
_BATCH = 16
"""Sequences that are compared at once."""
MOVED_PROMPTS = 50
"""Training prompts of a domain over whose answers an arm's distance from its start is averaged."""


def main() -> None:
    """Run one arm at one seed, or list the arms of a job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=COMPARISONS, metavar="JOB", help=f"one of {', '.join(COMPARISONS)}")
    parser.add_argument("arm", nargs="?", metavar="ARM", help="default: print the arms of the job")
    parser.add_argument("seed", nargs="?", type=int, default=0, metavar="SEED")
    parser.add_argument("--results", type=Path, help="folder of the results; default: jobs/JOB/results")
    parser.add_argument("--stores", type=Path, help="folder of the stores; default: runs/JOB")
    options = parser.parse_args()
    if options.arm is None:
        arms = COMPARISONS[options.job].arms
        print("\n".join(f"{name:<22} {arm.description}" for name, arm in arms.items()))
        return
    run_arm(experiment_of(parser, options))


def experiment_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Experiment:
    """The experiment that a command line names. Exits with the parser's error when the job has no such arm."""
    comparison = COMPARISONS[options.job]
    if options.arm not in comparison.arms:
        parser.error(f"job {options.job} has no arm {options.arm!r}; its arms: {', '.join(comparison.arms)}")
    results = options.results or comparison.folder / "results"
    stores = options.stores or Path("runs") / comparison.folder.name
    return Experiment(comparison, options.arm, options.seed, stores, results)


def run_arm(experiment: Experiment) -> None:
    """Run one arm at one seed unless its result is complete, with the search of its setting where it has one."""
    out = experiment.file
    measured = json.loads(out.read_text()) if out.exists() else None
    is_whole = measured is not None and experiment.is_whole(measured)
    if measured is not None and is_whole and (measured["tried"] or not experiment.searches):
        print(f"{out} exists; nothing to run")
        return
    print(f"writes {out}", flush=True)
    os.environ["OMP_NUM_THREADS"] = str(experiment.comparison.threads)  # of the training commands
    out.parent.mkdir(parents=True, exist_ok=True)
    tried = measured["tried"] if measured is not None and measured["tried"] else experiment.search()
    if measured is not None and tried and measured["setting"] != best_of(tried):
        measured = None
    if measured is not None and is_whole:
        result = measured | {"tried": tried}
    else:
        result = experiment.measure(tried, measured)
    publish_file(out, (json.dumps(result, indent=1) + "\n").encode())
    for file in experiment.tried_files().values():
        file.unlink(missing_ok=True)


Tried = list[dict[str, float]]
"""Settings of a search and the share of tuning prompts answered right with each: {"setting", "accuracy"}."""


def best_of(tried: Tried) -> float:
    """The setting with which most tuning prompts are answered right."""
    return max(tried, key=lambda one: one["accuracy"])["setting"]


@dataclass(frozen=True)
class Experiment:
    """One arm at one seed."""

    comparison: Comparison
    name: str
    seed: int
    stores: Path
    """Folder of the stores that it makes."""
    results: Path
    """Folder of the results of seed 0, which say what setting to take."""

    @property
    def arm(self) -> Arm:
        """What is run."""
        return self.comparison.arms[self.name]

    @property
    def result(self) -> dict[str, Any]:
        """The content of its file. Raises SystemExit where it has not run."""
        if not self.file.exists():
            raise SystemExit(f"{self.file} is missing; first run: python evidence/run_arm.py "
                             f"{self.comparison.folder.name} {self.name} {self.seed}")  # fmt: skip
        return dict(json.loads(self.file.read_text()))

    @property
    def file(self) -> Path:
        """Its result."""
        return self.results / f"{self.name}-{self.seed}.json"

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages on which its result depends."""
        return (*self.comparison.shared, *self.arm.trained_stages)

    @property
    def searches(self) -> bool:
        """Check if this arm chooses among several settings at this seed."""
        return self.seed == 0 and not self.arm.like and len(self.arm.settings) > 1

    def search(self) -> Tried:
        """Try every setting of the arm, and keep what was tried in files of its own; empty where nothing is chosen."""
        if not self.searches:
            return []
        files = self.tried_files()
        untried = [setting for setting, file in files.items() if not file.exists()]
        self._train(untried, self.comparison.searched_version)
        for setting in untried:
            files[setting].parent.mkdir(exist_ok=True)
            publish_file(files[setting], (json.dumps(self._try(setting), indent=1) + "\n").encode())
        return [{"setting": setting, "accuracy": json.loads(file.read_text())["accuracy"]}
                for setting, file in files.items()]  # fmt: skip

    def tried_files(self) -> dict[float, Path]:
        """Setting -> file of what it gave, which is there while the search goes on."""
        return {setting: self.results / "tried" / f"{self.name}-{setting:g}.json" for setting in self.arm.settings}

    def _try(self, setting: float) -> dict[str, Any]:
        """Accuracy on the tuning prompts of the specialists' domains, at the comparison's version for searches."""
        version = self.comparison.searched_version if self.arm.stages else 0
        with self._run(setting) as (run, stage):
            folder = run.policies.folder(stage, version) if version else self._policy(run, setting)
            right = grade(run, stage, folder, "tune")
            taught = {domain: right[domain] for domain in by_domain(run.job.routing)}
            return {
                "arm": self.name, "setting": setting, "accuracy": mean_right(taught), "right": right,
                "version": version, **provenance(run.job, stages=self.stages),
            }  # fmt: skip

    def is_whole(self, measured: dict[str, Any]) -> bool:
        """Check if the arm's file has every point of its curve."""
        return {(point["stage"], point["version"]) for point in measured["curve"]} >= {*self._places()}

    def measure(self, tried: Tried, measured: dict[str, Any] | None = None) -> dict[str, Any]:
        """The content of the arm's file.

        tried: what its search found; empty for an arm whose setting is known. measured: the file so far, whose points
        are kept. Raises SystemExit when they are of other settings.
        """
        began = time.time()
        best = best_of(tried) if tried else self._known_setting()
        kept_points = self._kept(measured, best) if measured is not None else {}
        self._train([best])
        distance, moved = self._distance(best), self._moved(best)
        with self._run(best) as (run, stage):
            curve = [
                kept_points.get((point.stage, point.version))
                or {**point.said(), "right": grade(run, stage, point.folder, "eval")}
                for point in self._points(run, best)
            ]
            return {
                "arm": self.name, "says": self.arm.description, "seed": self.seed, "split": "eval", "setting": best,
                "chosen_on": "tune", "tried": tried, "tokens": self._costs(run), "work": self._work(run),
                "teacher_distance": distance, "moved": moved, "curve": curve, "seconds": round(time.time() - began),
                **provenance(run.job, stages=self.stages),
            }  # fmt: skip

    def _kept(self, measured: dict[str, Any], setting: float) -> dict[tuple[str, int], dict[str, Any]]:
        """Points of the arm's file so far, by stage and version. The last stage may have had fewer iterations."""
        points = {(point["stage"], point["version"]): point for point in measured["curve"]}
        overrides = self.comparison.rates(self.arm, setting)
        last, version = [*points][-1]
        if last in self.arm.stages and self.comparison.job.stage(last).iterations > version:
            overrides += [f"stages.{last}.iterations={version}"]
        job = load_job(self.comparison.folder, overrides=overrides)
        now = settings_digest(job, self.stages)
        if measured["settings"] != now:
            raise SystemExit(
                f"the result of {self.name} at seed {self.seed} has settings {measured['settings']}, the job now "
                f"{now}; remove its file to measure it again"
            )
        return points

    def _known_setting(self) -> float:
        """The only setting of the arm, or the one that seed 0 or the arm that it is like has chosen."""
        searched = self.arm.like or self.name
        return self._chosen(searched) if self.seed or self.arm.like else self.arm.settings[0]

    def _chosen(self, name: str) -> float:
        """The setting that an arm's search chose."""
        if len(self.comparison.arms[name].settings) == 1:
            return self.comparison.arms[name].settings[0]
        file = self.results / f"{name}-0.json"
        if not file.exists():
            raise SystemExit(f"{file} is missing: seed 0 of {name} chooses the setting; run that first")
        return float(json.loads(file.read_text())["setting"])

    @contextmanager
    def measured_policy(self) -> Iterator[tuple[Run, Stage, Path]]:
        """The run of an arm whose result is there, the stage whose rollout settings it takes, and its policy."""
        setting = self.result["setting"]
        with self._run(setting) as (run, stage):
            yield run, stage, self._policy(run, setting)

    @contextmanager
    def _run(self, setting: float, *more: str) -> Iterator[tuple[Run, Stage]]:
        """An open run, and the stage whose rollout settings evaluation takes. more: overrides."""
        store = self._sweep_run(setting).store
        overrides = [f"seed={self.seed}", f'store="{store}"', *self.comparison.rates(self.arm, setting), *more]
        job = load_job(self.comparison.folder, overrides=overrides)
        run = open_run(job, Progress(None))
        with closing(run.engines):
            yield run, job.stage(self.arm.trained_stages[-1] if self.arm.trained_stages else self.comparison.shared[0])

    def _train(self, settings: Sequence[float], version: int = 0) -> None:
        """Have the arm run at these settings, to its end or at least to a version of its only stage, as a sweep.

        An arm without training shares one store with all others: base and specialists.
        """
        runs = {run.store: run for run in (self._sweep_run(setting, version) for setting in settings)}.values()
        shared = self.stores / "shared" if self.arm.trained_stages else None
        new = [run for run in runs if not (version and self._has(run, version))]
        if new:
            run_sweep(str(self.comparison.folder), new, shared=shared, processes=1, say=print)

    def _sweep_run(self, setting: float, version: int = 0) -> SweepRun:
        """The arm at one setting as a run of a sweep. version: of its only stage, at which it ends; 0: the last."""
        prerequisites, trained = self.comparison.prerequisites(self.name), self.arm.trained_stages
        if not trained:
            store = self.stores / "shared" / f"seed-{self.seed}"
            return SweepRun(arm="shared", seed=self.seed, overrides=(), store=store, stages=prerequisites)
        ends = [f"stages.{trained[-1]}.iterations={version}"] if version else []
        return SweepRun(
            arm=f"{self.name} x {setting:g}",
            seed=self.seed,
            overrides=(*self.comparison.rates(self.arm, setting), *ends),
            store=self.stores / f"{self.name}-{self.seed}-{setting:g}",
            stages=(*prerequisites, *trained),
        )

    def _has(self, run: SweepRun, version: int) -> bool:
        """Check if a run has trained a version of the arm's last stage."""
        return (run.store / "policies" / self.arm.trained_stages[-1] / f"v{version}").exists()

    def _policy(self, run: Run, setting: float) -> Path:
        """Folder of the arm's policy."""
        if self.arm.merge is not None:
            folder = run.root / "merged" / f"{self.name}-{setting:g}"
            if not folder.exists():
                specialists = [self._last(run, name) for name in self.comparison.specialists]
                self.arm.merge(self._last(run, self.comparison.base), specialists, setting, folder)
            return folder
        if self.arm.trained_stages:
            return self._last(run, self.arm.trained_stages[-1])
        return self._last(run, self.name)

    def _last(self, run: Run, stage: str) -> Path:
        """Folder of a stage's newest policy."""
        return run.policies.latest_folder(run.job.stage(stage))

    @property
    def _drawn(self) -> Arm:
        """The arm with the stages of its curve: those that it trains, or a specialist's own."""
        return replace(self.arm, stages=(self.name,)) if self.name in self.comparison.specialists else self.arm

    def _places(self) -> list[tuple[str, int]]:
        """(stage, version) of every point of the arm's curve, its policy last; ("", 0) where nothing is trained."""
        return [(stage.name, version) for stage, version in self.comparison.measured_versions(self._drawn)] or [("", 0)]

    def _points(self, run: Run, setting: float) -> list[Point]:
        """The versions that are measured, the arm's policy last."""
        points, arm = [], self._drawn
        for stage, version in self._places():
            if not stage:
                points.append(Point(stage, version, 0, 0, self._policy(run, setting)))
                continue
            answers = self.comparison.answers_until(arm, run.job.stage(stage), version)
            tokens = sum(sum(trained_tokens(run, name).values()) for name in arm.stages[: arm.stages.index(stage)])
            tokens += sum(count for window, count in trained_tokens(run, stage).items() if window < version)
            points.append(Point(stage, version, answers, tokens, run.policies.folder(run.job.stage(stage), version)))
        return points

    def _specialist_stages(self, run: Run) -> set[str]:
        """Stages that this arm needs beside its own and the base's."""
        base, specialists = self.comparison.lineage(self.comparison.base), self.comparison.specialists
        routes = [by_domain(run.job.stage(stage).routing or run.job.routing) for stage in self.arm.stages]
        used = {teacher for stage, route in zip(self.arm.stages, routes, strict=True)
                for domain, teacher in route.items() if domain in run.job.domains_of(run.job.stage(stage))}  # fmt: skip
        trained = (self.name,) if self.name in specialists else sorted(used) or specialists
        trained = trained if self.arm.uses_teachers else ()
        starts = {stage for name in self.arm.trained_stages for stage in self.comparison.lineage(name)}
        starts -= {*self.arm.trained_stages}
        own = {stage for name in trained for stage in self.comparison.lineage(name)} | starts
        return own.difference(base)

    def _costs(self, run: Run) -> dict[str, int]:
        """Answer tokens: that the student learnt from, that specialists learnt from, and that they read or wrote."""
        student = sum(sum(trained_tokens(run, stage).values()) for stage in self.arm.stages)
        specialists, teachers = self.comparison.specialists, 0
        for stage in self.arm.stages:
            scored = run.store.sql(
                'select coalesce(sum(n), 0)::bigint as n from (select uid, max("rows") as n from scores '
                f"join samples using (uid) where samples.stage = '{stage}' group by uid)"
            )
            wrote = run.store.sql(
                f"select coalesce(sum(response_len), 0)::bigint as n from samples where stage = '{stage}' and policy "
                f"in ({', '.join(repr(s) for s in specialists)})"
            )
            teachers += scored["n"][0].as_py() + wrote["n"][0].as_py()
        spent = sum(sum(trained_tokens(run, stage).values()) for stage in self._specialist_stages(run))
        return {"student": student, "specialists": spent, "teachers": teachers}

    def _work(self, run: Run) -> dict[str, int]:
        """Seconds, on `threads` cores, of all steps of the arm's stages, and of the specialists that it needs."""
        return {
            "student": round(sum(spent_seconds(run, stage) for stage in self.arm.stages)),
            "specialists": round(sum(spent_seconds(run, stage) for stage in self._specialist_stages(run))),
        }

    def _distance(self, setting: float) -> dict[str, float]:
        """Domain -> exact reverse KL of the base to its teacher, nat per token of the base's sampled answers."""
        if not self.arm.stages or not self.arm.uses_teachers:
            return {}
        measured = self.stores / f"teacher-distance-{self.seed}.json"  # the same for every arm
        if measured.exists():
            distances: dict[str, float] = json.loads(measured.read_text())
            return distances
        with self._run(setting, "eval.temperature=1.0") as (run, stage):
            folder = self._last(run, self.comparison.base)
            distances = {
                domain: apart(run, stage, folder, self._last(run, teacher), domain).kl
                for domain, teacher in sorted(by_domain(run.job.routing).items())
            }
        publish_file(measured, json.dumps(distances).encode())
        return distances

    def _moved(self, setting: float) -> dict[str, dict[str, float]]:
        """Domain -> how far the arm's policy is from the trained one that its stages start from, and its entropy."""
        stages = (self.name,) if self.name in self.comparison.specialists else self.arm.trained_stages
        origins = [self.comparison.job.stage(name).start for name in stages]
        trained = [name for name in origins if name != "init"]
        if not trained:
            return {}
        with self._run(setting, "eval.temperature=1.0") as (run, stage):
            folder, start = self._policy(run, setting), self._last(run, trained[0])
            return {
                domain: apart(run, stage, folder, start, domain, prompts=MOVED_PROMPTS)._asdict()
                for domain in sorted(by_domain(run.job.routing))
            }


class Point(NamedTuple):
    """A version of an arm's policy that is measured."""

    stage: str
    """Empty for a policy that no stage of the arm trains: the base, and merged weights."""
    version: int
    answers: int
    """Answers that the arm learnt from until then."""
    tokens: int
    """Tokens of these answers."""
    folder: Path

    def said(self) -> dict[str, Any]:
        """What the arm's file says of it beside what it got right."""
        return {key: value for key, value in self._asdict().items() if key != "folder"}


def by_domain(routing: dict[str, str]) -> dict[str, str]:
    """Domain -> teacher, of a job with one teacher a domain, whatever effort mode its key names."""
    return {domain.partition("/")[0]: teacher for domain, teacher in routing.items()}


class Apart(NamedTuple):
    """What a policy's own answers say of it, mean over their tokens, in nat."""

    kl: float
    """Exact reverse KL to another policy."""
    entropy: float


def apart(run: Run, stage: Stage, folder: Path, other: Path, domain: str, *, prompts: int = DISTANCE_PROMPTS) -> Apart:
    """A policy beside another, on its answers to a domain's first training prompts."""
    questions = sorted(run.store.prompts(split="train", domains=[domain]), key=in_order)[:prompts]
    pairs = []
    for prompt, response in zip(questions, answer(run, stage, folder, 1, questions), strict=True):
        prompt_ids = render(prompt.asked, run.tokenizer, template=run.job.student.prompt_template)
        is_sampled = [False] * (len(prompt_ids) - 1) + [bool(sampled) for sampled in response.mask] + [False]
        pairs.append(([*prompt_ids, *response.ids], is_sampled))
    pairs.sort(key=lambda pair: len(pair[0]))
    policy, rival = (load_model(path, dtype=run.job.student.dtype) for path in (folder, other))
    values = [_compared(policy, rival, pairs[start : start + _BATCH]) for start in range(0, len(pairs), _BATCH)]
    kl, entropy = torch.cat(values, 1).mean(1).tolist()
    return Apart(round(kl, 4), round(entropy, 4))


@torch.inference_mode()
def _compared(policy: PreTrainedModel, rival: PreTrainedModel, pairs: list[tuple[list[int], list[bool]]]) -> Tensor:
    """KL to the rival and entropy, [2, sampled tokens], of some sequences and the positions before sampled tokens.

    Padding is on the right, where causal attention hides it from every real token.
    """
    width = max(len(ids) for ids, _ in pairs)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in pairs])
    before_sampled = torch.tensor([row + [False] * (width - len(row)) for _, row in pairs])
    own, theirs = (model(ids).logits[before_sampled].double().log_softmax(-1) for model in (policy, rival))
    return torch.stack([(own.exp() * (own - theirs)).sum(-1), -(own.exp() * own).sum(-1)])


def trained_tokens(run: Run, stage: str) -> dict[int, int]:
    """Window -> answer tokens that its steps learnt from."""
    rows = run.store.sql(
        f"select \"window\", sum(loss_tokens)::bigint as n from steps where stage = '{stage}' group by 1"
    )
    return {row["window"]: row["n"] for row in rows.to_pylist()}


def spent_seconds(run: Run, stage: str) -> float:
    """Seconds that the steps of a stage took, but for evaluation."""
    rows = run.store.sql(
        "select coalesce(sum(value), 0.0) as seconds from events "
        f"where stage = '{stage}' and kind = 'stage_time' and detail not like '%evaluate%'"
    )
    return float(rows["seconds"][0].as_py())


if __name__ == "__main__":
    main()
