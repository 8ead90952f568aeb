"""One arm of the comparison at one seed: train, choose the rate on the tuning split, measure on the evaluation split.

    python jobs/alternatives/run.py ARM SEED [--results DIR] [--stores DIR]
    python jobs/alternatives/run.py --list

Writes results/ARM-SEED.json and does nothing where that exists; killed at any moment, the same line goes on. Seed 0
tries three settings of every arm that has one and keeps what is best on the tuning prompts; other seeds take that one,
and so do arms that change one thing in another arm. The file holds what became of every evaluation prompt, so that
intervals and paired tests need nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.job import Stage, load_job
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.provenance import provenance
from mopd_dataplane.run.steps.evaluate import answer
from mopd_dataplane.run.steps.reward import verify

sys.path.insert(0, str(Path(__file__).parent))
import merging

JOB = Path(__file__).parent
SPECIALISTS = ("speller", "sorter", "walker")
SHARED = ("base", *SPECIALISTS)
FACTORS = (0.5, 1.0, 2.0)
"""Of the learning rate that job.toml gives; the same search for every arm that trains."""
POINTS = 4
"""Versions of an arm that are measured, evenly spread, the last among them."""
Merge = Callable[[Path, Sequence[Path], float, Path], None]


@dataclass(frozen=True)
class Arm:
    """One way to use the specialists, or to do without."""

    says: str
    stages: tuple[str, ...] = ()
    """Run one after another; the last one's policy is the arm's. None: a policy of SHARED, `start`'s, or a merge."""
    settings: tuple[float, ...] = (1.0,)
    merge: Merge | None = None
    teachers: bool = True
    """Whether specialists have a part in it."""
    like: str = ""
    """The arm in which it changes one thing: its setting is taken, and nothing is tried."""
    start: str = ""
    """Stage that makes another start than `base`, at a rate of its own and at nobody's cost."""

    @property
    def run(self) -> tuple[str, ...]:
        """Everything that is trained beside SHARED."""
        return (self.start, *self.stages) if self.start else self.stages


ARMS: dict[str, Arm] = {
    "base": Arm("the start of all others", teachers=False),
    **{name: Arm(f"specialist of one domain: {name}") for name in SPECIALISTS},
    "joint-sft": Arm("SFT on all domains' reference answers", ("joint-sft",), FACTORS, teachers=False),
    "grpo": Arm("GRPO on the mixture", ("grpo",), FACTORS, teachers=False),
    "cascade": Arm("GRPO one domain after another", ("cascade-spelling", "cascade-sorting", "cascade"), FACTORS,
                   teachers=False),
    "average": Arm("mean of the specialists' weights", merge=merging.average),
    "task-arithmetic": Arm("base + scale x sum of weight changes", (), (0.3, 0.5, 1.0), merging.task_arithmetic),
    "ties": Arm("trimmed, signs elected, merged", (), (0.5, 1.0, 1.5), merging.ties),
    "teacher-sft": Arm("SFT on the teachers' answers", ("teacher-sft",), FACTORS),
    "teacher-forward": Arm("forward KL on the teachers' answers", ("teacher-forward",), FACTORS),
    "gkd": Arm("GKD: half the teachers' answers, half its own, JSD", ("gkd",), FACTORS),
    "mopd-sampled": Arm("MOPD, sampled tokens", ("mopd-sampled",), FACTORS),
    "mopd-baseline": Arm("MOPD, sampled tokens, less their mean", ("mopd-baseline",), FACTORS),
    "mopd-exact": Arm("MOPD, full vocabulary", ("mopd-exact",), FACTORS),
    "mopd-outcome": Arm("MOPD, sampled, with the outcome's advantage", ("mopd-outcome",), FACTORS),
    "one-teacher": Arm("one teacher, spelling", ("one-teacher",), like="mopd-exact"),
    "two-teachers": Arm("two teachers, spelling and sorting", ("two-teachers",), like="mopd-exact"),
    "group-4": Arm("four answers to each of a quarter of the prompts", ("group-4",), like="mopd-exact"),
    "wrong-teacher": Arm("the sorter judges spelling too", ("wrong-teacher",), like="mopd-exact"),
    "weak": Arm("a weaker start: a fifth of the base's examples", like="mopd-exact", start="weak", teachers=False),
    "weak-on-policy": Arm("MOPD from the weaker start", ("weak-on-policy",), like="mopd-exact", start="weak"),
    "weak-imitation-first": Arm("the same after forward KL on the teachers' answers, half of all",
                                ("weak-imitation", "weak-imitation-first"), like="mopd-exact", start="weak"),
}  # fmt: skip


def main() -> None:
    """Run one arm at one seed unless its result is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", nargs="?", choices=ARMS, metavar="ARM")
    parser.add_argument("seed", nargs="?", type=int, default=0, metavar="SEED")
    parser.add_argument("--list", action="store_true", help="print the arms")
    parser.add_argument("--results", type=Path, default=JOB / "results")
    parser.add_argument("--stores", type=Path, default=Path("runs/alternatives"))
    options = parser.parse_args()
    if options.list or options.arm is None:
        print("\n".join(f"{name:<16} {arm.says}" for name, arm in ARMS.items()))
        return
    out = options.results / f"{options.arm}-{options.seed}.json"
    if out.exists():
        print(f"{out} is there")
        return
    print(f"writes {out}", flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    result = measure_arm(options.arm, options.seed, options.stores, options.results)
    publish_file(out, (json.dumps(result, indent=1) + "\n").encode())


def measure_arm(name: str, seed: int, stores: Path, results: Path) -> dict[str, Any]:
    """The content of an arm's file."""
    arm, began = ARMS[name], time.time()
    shared = shared_store(seed, stores)
    settings = arm.settings if seed == 0 and not arm.like else (chosen(results, arm.like or name),)
    tried = {}
    for setting in settings:
        with arm_run(name, arm, seed, setting, train(name, arm, seed, setting, stores, shared)) as (run, stage):
            tried[setting] = 0.0
            if len(settings) > 1:
                tried[setting] = mean_right(judge(run, stage, policy(run, name, arm, setting), "tune"))
    best = max(tried, key=lambda setting: tried[setting])
    with arm_run(name, arm, seed, best, train(name, arm, seed, best, stores, shared)) as (run, stage):
        curve = [
            {"tokens": tokens, "right": judge(run, stage, folder, "eval")}
            for tokens, folder in points(run, name, arm, best)
        ]
        search = [{"setting": setting, "accuracy": value} for setting, value in tried.items()]
        return {
            "arm": name, "says": arm.says, "seed": seed, "split": "eval", "setting": best, "chosen_on": "tune",
            "tried": search if len(settings) > 1 else [], "tokens": costs(run, name, arm), "curve": curve,
            "seconds": round(time.time() - began), **provenance(run.job, stages=(*SHARED, *arm.run)),
        }  # fmt: skip


def chosen(results: Path, name: str) -> float:
    """The setting that an arm's search kept."""
    file = results / f"{name}-0.json"
    if not file.exists():
        raise SystemExit(f"{file} is missing: seed 0 of {name} chooses the setting; run that first")
    return float(json.loads(file.read_text())["setting"])


def rates(arm: Arm, setting: float) -> list[str]:
    """Overrides that put the rates of an arm's stages to a setting."""
    job = load_job(JOB)
    found = {stage: job.stage(stage).train.learning_rate * setting for stage in arm.stages}
    return [f"stages.{stage}.train.learning_rate={rate!r}" for stage, rate in found.items()]


@contextmanager
def arm_run(name: str, arm: Arm, seed: int, setting: float, store: Path) -> Iterator[tuple[Run, Stage]]:
    """An open run, and the stage whose rollout settings evaluation takes."""
    job = load_job(JOB, overrides=[f"seed={seed}", f'store="{store}"', *rates(arm, setting)])
    run = open_run(job, Progress(None))
    with closing(run.engines):
        yield run, job.stage(arm.run[-1] if arm.run else "base")


def shared_store(seed: int, stores: Path) -> Path:
    """A store in which base and specialists have run."""
    store = stores / f"shared-{seed}"
    for stage in SHARED:
        if not (store / "policies" / stage / "v1").exists():
            mopd("run", str(JOB), "--stage", stage, "--seed", str(seed), "--store", str(store))
    return store


def train(name: str, arm: Arm, seed: int, setting: float, stores: Path, shared: Path) -> Path:
    """The store in which the arm has run at a setting; the shared one for arms without training."""
    if not arm.run:
        return shared
    store = stores / f"{name}-{seed}-{setting:g}"
    if not store.exists():
        staging = store.with_name(f".{store.name}.tmp")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(shared, staging, symlinks=True)
        staging.rename(store)
    overrides = [part for rate in rates(arm, setting) for part in ("--set", rate)]
    for stage in arm.run:
        mopd("run", str(JOB), "--stage", stage, "--seed", str(seed), "--store", str(store), *overrides)
    return store


def mopd(*arguments: str) -> None:
    """Run the command line."""
    subprocess.run(
        [sys.executable, "-m", "mopd_dataplane", *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def policy(run: Run, name: str, arm: Arm, setting: float) -> Path:
    """Folder of the arm's policy."""
    if arm.merge is not None:
        folder = run.root / "merged" / f"{name}-{setting:g}"
        if not folder.exists():
            arm.merge(folder_of(run, "base"), [folder_of(run, s) for s in SPECIALISTS], setting, folder)
        return folder
    return folder_of(run, arm.stages[-1] if arm.stages else name)


def folder_of(run: Run, stage: str) -> Path:
    """Folder of a stage's newest policy."""
    return run.policies.last(run.job.stage(stage))


def points(run: Run, name: str, arm: Arm, setting: float) -> list[tuple[int, Path]]:
    """(tokens learnt from until then, folder) of the versions that are measured, the arm's policy last."""
    if not arm.stages:
        return [(0, policy(run, name, arm, setting))]
    found, before = [], 0
    for stage in map(run.job.stage, arm.stages):
        spent = trained_tokens(run, stage.name)
        versions = {max(1, round(stage.iterations * (i + 1) / POINTS)) for i in range(POINTS)}
        for version in sorted(versions) if len(arm.stages) == 1 else [stage.iterations]:
            tokens = before + sum(count for window, count in spent.items() if window < version)
            found.append((tokens, run.policies.folder(stage, version)))
        before += sum(spent.values())
    return found


def trained_tokens(run: Run, stage: str) -> dict[int, int]:
    """Window -> answer tokens that its steps learnt from."""
    rows = run.store.sql(
        f"select \"window\", sum(loss_tokens)::bigint as n from steps where stage = '{stage}' group by 1"
    )
    return {row["window"]: row["n"] for row in rows.to_pylist()}


def costs(run: Run, name: str, arm: Arm) -> dict[str, int]:
    """Answer tokens: that the student learnt from, that specialists learnt from, and that they read or wrote for it."""
    student = sum(sum(trained_tokens(run, stage).values()) for stage in arm.stages)
    if not arm.teachers:
        return {"student": student, "specialists": 0, "teachers": 0}
    routes = [run.job.stage(stage).routing or run.job.routing for stage in arm.stages]
    used = {teacher for stage, route in zip(arm.stages, routes, strict=True)
            for domain, teacher in route.items() if domain in run.job.domains_of(run.job.stage(stage))}  # fmt: skip
    trained = (name,) if name in SPECIALISTS else sorted(used) or SPECIALISTS
    specialists = sum(sum(trained_tokens(run, stage).values()) for stage in trained)
    teachers = 0
    for stage in arm.stages:
        judged = run.store.sql(
            'select coalesce(sum(n), 0)::bigint as n from (select uid, max("rows") as n from scores '
            f"join samples using (uid) where samples.stage = '{stage}' group by uid)"
        )
        wrote = run.store.sql(
            f"select coalesce(sum(response_len), 0)::bigint as n from samples where stage = '{stage}' and policy in "
            f"({', '.join(repr(s) for s in SPECIALISTS)})"
        )
        teachers += judged["n"][0].as_py() + wrote["n"][0].as_py()
    return {"student": student, "specialists": specialists, "teachers": teachers}


def judge(run: Run, stage: Stage, folder: Path, split: str) -> dict[str, dict[str, Any]]:
    """Domain -> a 0 or 1 for every prompt of the split in order, and the mean reward."""
    prompts = sorted(run.store.prompts(split=split, domains=list(run.job.domains)), key=_order)
    found: dict[str, list[tuple[float, bool | None]]] = {}
    for prompt, given in zip(prompts, answer(run, stage, folder, 1, prompts), strict=True):
        outcome = verify(run, prompt, given.ids, given.mask)
        found.setdefault(prompt.domain, []).append((outcome.reward, outcome.correct))
    return {
        domain: {
            "correct": "".join(str(int(bool(correct))) for _, correct in outcomes),
            "reward": round(float(np.mean([reward for reward, _ in outcomes])), 4),
        }
        for domain, outcomes in found.items()
    }


def mean_right(domains: dict[str, dict[str, Any]]) -> float:
    """Mean over domains of the share that is entirely right; 0 of none."""
    return float(np.mean([d["correct"].count("1") / len(d["correct"]) for d in domains.values()])) if domains else 0.0


def _order(prompt: Prompt) -> tuple[str, int]:
    return prompt.domain, int(prompt.prompt_id.rpartition("-")[2])


if __name__ == "__main__":
    main()
