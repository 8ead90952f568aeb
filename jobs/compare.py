"""Every recipe over several seeds, and one page that shows them: docs/recipes.md.

    python jobs/compare.py [--recipes opd grpo …] [--seeds 0 1 2] [--processes 2] [--page-only]

Stores go to runs/recipes/<recipe>-<seed>; a finished one is not run again, an interrupted one continues. Recipes that
start from the quickstart's base and specialists get a copy of a store in which those have run, so that each seed trains
them once. A run that ends writes jobs/<recipe>/results/<seed>.json: what every stage made of every held-out prompt. The
page shows what is there: accuracy from those files, and for recipes without one the mean rewards of mean_rewards.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from pictures import stages_picture

from mopd_dataplane import open_store
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.job import Job, load_job
from mopd_dataplane.query.answers import held_out
from mopd_dataplane.query.statistics import Estimate, mean_share, over_runs, share
from mopd_dataplane.run.provenance import provenance

JOBS = Path(__file__).parent
STORES = Path("runs/recipes")
PAGE = JOBS.parent / "docs" / "recipes.md"
PICTURES = PAGE.parent / "images" / "recipes"
TIME = re.compile(
    r"([\d,]+(?: to [\d,]+)?) s\s+of\s+processor\s+time(?:\s+each)?(\s+beyond\s+base\s+and\s+specialists)?"
)
"""How the texts of the recipes say what a run took."""
SHARED = ("base", "speller", "sorter", "walker")
"""Stages of the quickstart that recipes start from and are taught by."""
OWN_FIGURES = ("quickstart", "alternatives", "smollm2-mopd", "near")
"""Jobs whose results jobs/figures.py shows."""
MOST_COLUMNS = 5
"""Of more domains only the mean is shown."""
HEAD = """
Accuracy is the share of held-out answers that are entirely right, from `jobs/<recipe>/results/<seed>.json`: of one seed
with its 95 % interval over prompts, of several with Student's over seeds. Where no such file is there it says `not
run`, and the table holds **mean rewards** (`jobs/mean_rewards.json`: {where}; mean ± half of Student's 95 % interval
over seeds, then every seed). A mean reward is not accuracy: reasoning-gym pays partial credit for spelling (a mean of
0.74 can be a third of the words right) and full reward for sorted numbers that are off by one, so that a difference
here may have the other sign in accuracy. Below the tables the paragraph that begins with accuracy is of accuracy; all
else is mean rewards, in per cent of the full reward. Prompts for the figures are those on which settings were looked
at; small models and tasks: directions, not records."""
Result = dict[str, Any]


def recipes() -> list[str]:
    """Names of the job folders that follow a published recipe and have no page of figures of their own."""
    named = sorted(file.parent.name for file in JOBS.glob("*/job.toml") if load_job(file).source)
    return [name for name in named if name not in OWN_FIGURES]


def mopd(*arguments: str) -> None:
    """Run the command line; its progress is kept beside the store it works on."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "mopd_dataplane", *arguments], check=True, env=environment)


def shared_store(seed: int) -> Path:
    """A store in which the quickstart's base and specialists have run."""
    store = STORES / f"shared-{seed}"
    for stage in SHARED:
        mopd("run", str(JOBS / "quickstart"), "--stage", stage, "--seed", str(seed), "--store", str(store))
    return store


def run(recipe: str, seed: int) -> None:
    """Run a recipe to its end and write its figures, unless they are there."""
    out = JOBS / recipe / "results" / f"{seed}.json"
    if out.exists():
        return
    store = STORES / f"{recipe}-{seed}"
    starts_shared = any(stage.name in SHARED for stage in load_job(JOBS / recipe).stages)
    if starts_shared and not store.exists():
        staging = store.with_name(f".{store.name}.tmp")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(STORES / f"shared-{seed}", staging, symlinks=True)
        staging.rename(store)
    mopd("run", str(JOBS / recipe), "--seed", str(seed), "--store", str(store))
    out.parent.mkdir(exist_ok=True)
    publish_file(out, (json.dumps(figures(recipe, seed, store), indent=1) + "\n").encode())


def figures(recipe: str, seed: int, store: Path) -> Result:
    """What every stage of a finished run made of every held-out prompt at its end."""
    job = load_job(JOBS / recipe)
    found = held_out(open_store(str(store)))
    stages = {}
    for stage in job.stages:
        answers = found.newest(stage.name)
        if answers is not None:
            stages[stage.name] = {
                domain: {
                    "correct": "".join(str(int(value)) for value in answers.correct.get(domain, ())),
                    "reward": round(float(answers.reward[domain].mean()), 4),
                }
                for domain in answers.prompts
                if domain in answers.reward
            }
    return {"job": recipe, "seed": seed, "split": found.split, "stages": stages, **provenance(job)}


def results(recipe: str) -> dict[int, Result]:
    """Committed results by seed."""
    return {int(file.stem): json.loads(file.read_text()) for file in sorted((JOBS / recipe).glob("results/*.json"))}


def accuracy_table(by_seed: dict[int, Result]) -> Iterable[str]:
    """Markdown rows: share that is entirely right at the end of every stage, with its interval."""
    stages = list(dict.fromkeys(stage for result in by_seed.values() for stage in result["stages"]))
    every = {domain for r in by_seed.values() for said in r["stages"].values() for domain in _right(said)}
    columns = [*sorted(every), "mean"] if 1 < len(every) <= MOST_COLUMNS else ["mean"]
    yield f"| entirely right | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for stage in stages:
        ends = [_right(result["stages"][stage]) for result in by_seed.values() if stage in result["stages"]]
        parts = {c: [end if c == "mean" else {c: end[c]} for end in ends if c == "mean" or c in end] for c in columns}
        cells = [_cell(parts[column]) for column in columns]
        yield f"| {stage} | {' | '.join(cells)} |"


def _right(domains: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    return {d: np.array([int(one) for one in said["correct"]]) for d, said in domains.items() if said["correct"]}


def _cell(ends: list[dict[str, np.ndarray]]) -> str:
    """Of one seed the interval is over prompts, of several over seeds."""
    if not ends or not all(ends):
        return "–"
    if len(ends) > 1:
        return _percent(over_runs([float(np.mean([v.mean() for v in end.values()])) for end in ends]))
    return _percent(mean_share(ends[0]) if len(ends[0]) > 1 else share(next(iter(ends[0].values()))))


def reward_table(stages: dict[str, dict[str, list[float]]]) -> Iterable[str]:
    """Markdown rows: mean reward at the end of every stage, mean over seeds with its interval, and every seed."""
    columns = list(next(iter(stages.values())))
    yield f"| mean reward | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for stage, rewards in stages.items():
        cells = []
        for column in columns:
            found = over_runs(rewards[column])
            each = " / ".join(f"{value:.3f}" for value in rewards[column])
            cells.append(f"{found.value:.3f} ± {found.half:.3f} ({each})")
        yield f"| {stage} | {' | '.join(cells)} |"


def measured(recipe: str) -> str:
    """What the recipe's own text says came out."""
    readme = JOBS / recipe / "README.md"
    return readme.read_text().partition("## What was measured\n")[2].strip() if readme.is_file() else ""


def gallery(names: Iterable[str]) -> Iterable[str]:
    """Markdown rows: each recipe, what it shows, and the processor time that its text says a seed took."""
    yield "| recipe | what it shows | processor time of a seed |"
    yield "|---|---|---|"
    for name in names:
        took = TIME.search(measured(name))
        cost = "not measured" if took is None else f"{took[1]} s{took[2] or ''}"
        yield f"| [{name}](#{name}) | {load_job(JOBS / name).shows} | {' '.join(cost.split())} |"


def picture(recipe: str) -> str:
    """SVG of a recipe: accuracy where it was measured, else mean reward."""
    by_seed, old = results(recipe), json.loads((JOBS / "mean_rewards.json").read_text())["recipes"].get(recipe, {})
    ends: dict[str, list[float]] = {}
    for result in by_seed.values():
        for stage, said in result["stages"].items():
            if right := _right(said):
                ends.setdefault(stage, []).append(float(np.mean([v.mean() for v in right.values()])))
    if not ends:
        ends = {stage: np.mean(list(rewards.values()), axis=0).tolist() for stage, rewards in old.items()}
    return stages_picture(recipe, ends, "accuracy" if by_seed else "mean reward")


def shown() -> list[str]:
    """Recipes of which there is something to show."""
    old = json.loads((JOBS / "mean_rewards.json").read_text())["recipes"]
    return [name for name in recipes() if results(name) or name in old]


def section(recipe: str, job: Job, by_seed: dict[int, Result], rewards: dict[str, dict[str, list[float]]]) -> str:
    """One recipe of the page."""
    finding = measured(recipe)
    said = f"{job.shows[0].upper()}{job.shows[1:]}. Follows {job.source}."
    lines = [f"## {recipe}", "", *textwrap.wrap(said, 120, break_on_hyphens=False), ""]
    lines += [f"![{recipe}: what every stage ended with](images/recipes/{recipe}.svg)", ""]
    lines += [*accuracy_table(by_seed), ""] if by_seed else ["Accuracy: not run.", ""]
    lines += [*reward_table(rewards), ""] if rewards and not by_seed else []
    return "\n".join([*lines, *([finding, ""] if finding else [])])


def page() -> str:
    """The whole page."""
    old = json.loads((JOBS / "mean_rewards.json").read_text())
    parts = [section(name, load_job(JOBS / name), results(name), old["recipes"].get(name, {})) for name in shown()]
    seeds = ", ".join(map(str, old["seeds"]))
    where = f"commit {old['commit']}, {old['date']}, seeds {seeds}, {old['host']['cores']} cores, no GPU"
    head = " ".join(HEAD.format(where=where).split())
    return f"# Recipes\n\n{textwrap.fill(head, 120, break_on_hyphens=False)}\n\n" + "\n".join(
        [*gallery(shown()), "", *parts]
    )


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=recipes(), choices=recipes(), metavar="NAME", help="to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="to run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page-only", action="store_true", help="run nothing; show the results that are there")
    options = parser.parse_args()
    if not options.page_only:
        run_all(options.recipes, options.seeds, options.processes)
    PAGE.write_text(page())
    PICTURES.mkdir(exist_ok=True)
    for name in shown():
        (PICTURES / f"{name}.svg").write_text(picture(name))


def run_all(recipes: list[str], seeds: list[int], processes: int) -> None:
    """Run what is missing; a run that was interrupted continues."""
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(shared_store, seeds))
        list(pool.map(lambda work: run(*work), [(recipe, seed) for recipe in recipes for seed in seeds]))


def _percent(found: Estimate) -> str:
    return f"{100 * found.value:.1f} % ({100 * found.low:.0f}–{100 * found.high:.0f})"


if __name__ == "__main__":
    main()
