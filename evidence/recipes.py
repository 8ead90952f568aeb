"""Every recipe over several seeds, and one page that shows them: docs/recipes.md.

    python evidence/recipes.py [--recipes opd grpo …] [--seeds 0 1 2] [--processes 2] [--page-only]

Stores go to runs/recipes/<recipe>-<seed>; a finished one is not run again, an interrupted one continues. Recipes that
start from the quickstart's base and specialists get a copy of a store in which those have run, so that each seed trains
them once. Teachers of another tokenizer are jobs of their own in a recipe's folder, and are trained before it. A run
that ends writes jobs/<recipe>/results/<seed>.json: what every stage made of every held-out prompt, and what its steps
and samples were like. The page shows what is there: tables by recipe_tables.py, and the text of each recipe's README.
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

from pictures import stages_picture
from recipe_tables import BySeed, accuracies, tables
from results import JOBS, results

from mopd_dataplane import Store, open_store
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import load_job
from mopd_dataplane.query.answers import held_out
from mopd_dataplane.run.provenance import provenance

STORES = Path("runs/recipes")
PAGE = JOBS.parent / "docs" / "recipes.md"
PICTURES = PAGE.parent / "images" / "recipes"
TIME = re.compile(
    r"A seed takes ([\d,]+(?: to [\d,]+)? s) of processor time( beyond (?:the base|base and specialists))?"
)
"""How the texts of the recipes say what a run took."""
SHARED = ("base", "speller", "sorter", "walker")
"""Stages of the quickstart that recipes start from and are taught by."""
TEACHER = "expert"
"""Stage of a job in a recipe's folder whose policy teaches in the recipe."""
OWN_FIGURES = (
    "quickstart", "alternatives", "smollm2-mopd", "smollm2-kept", "smollm2-sums", "near", "teacher-count", "selection",
)  # fmt: skip
"""Jobs whose results evidence/figures.py shows."""
HEAD = """
Find a published method here, see what it reached at a small size, and run it. Each recipe is a commented job that you
can copy and change:

```sh run
mopd init opd mine
```

```sh job
mopd run mine
```

The models and tasks are small, so the figures show directions and not records. Settings were chosen while looking at
these prompts, so the figures are optimistic.

- **Accuracy** is the share of held-out answers that are entirely right, from `jobs/<recipe>/results/<seed>.json`: of
  several seeds the mean and, in brackets, the lowest and the highest; of one seed its 95 % interval over prompts.
- **Differences** are in points of accuracy, paired by prompt, with their 95 % interval over prompts and McNemar's p. Of
  comparisons in which nothing differs, one in twenty has a p below 0.05.
- **A seed** is another run from the beginning, base and specialists included. It answers the same prompts.
- **Mean reward**, where it stands beside accuracy, pays partial credit: letters in the right place.
- **Processor times** are of commit 1a01221, 2026-11-21 and 22, on 2 cores that other work used at the same time.
"""
TRAINED = """
    select stage, count(*) as steps, sum(staleness_mean * samples) / sum(samples) as staleness,
           max(staleness_max) as oldest, sum((extra->>'$.dropped')::double * loss_tokens) / sum(loss_tokens) as dropped,
           sum((extra->>'$.logprob_gap')::double * loss_tokens) / sum(loss_tokens) as logprob_gap
    from steps group by stage"""
SAMPLED = """
    select stage, count(*) as samples, sum((policy_version_first <> policy_version_last)::int)::bigint as mixed
    from samples where policy <> 'reference' group by stage"""
OVERLAP = """
    select stage, avg((extra->>'$.overlap_mass')::double) as overlap_mass
    from steps group by stage, "window" having count(extra->>'$.overlap_mass') > 0 order by stage, "window"
"""
REWARDS = """
    select stage, avg(reward)::double as rewards from samples join rewards using (uid)
    where verifier <> 'discriminator' and policy <> 'reference' group by stage, iteration order by stage, iteration"""
DISCRIMINATOR = """
    select stage, value as discriminator from events
    where kind = 'discriminator' and detail->>'$.measure' = 'accuracy' order by stage, iteration"""
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
    """Run a recipe to its end and write its result, unless that is there."""
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
    teachers = {file.parent.name: train_teacher(file, seed) for file in sorted((JOBS / recipe).glob("*/job.toml"))}
    sources = [f'teachers.{name}.source="{folder}"' for name, folder in teachers.items()]
    overrides = [part for source in sources for part in ("--set", source)]
    mopd("run", str(JOBS / recipe), "--seed", str(seed), "--store", str(store), *overrides)
    out.parent.mkdir(exist_ok=True)
    publish_file(out, (json.dumps(figures(recipe, seed, store), indent=1) + "\n").encode())


def train_teacher(file: Path, seed: int) -> Path:
    """Run a job in a recipe's folder to its end. Returns the folder of its teacher."""
    store = STORES / f"{load_job(file).name}-{seed}"
    mopd("run", str(file), "--seed", str(seed), "--store", str(store))
    return store / "policies" / TEACHER / "v1"


def figures(recipe: str, seed: int, store: Path) -> Result:
    """What every stage of a finished run, and of the jobs of its teachers, answered to each held-out prompt."""
    job = load_job(JOBS / recipe)
    opened = open_store(str(store))
    stages = last_answers(job, opened)
    for file in sorted((JOBS / recipe).glob("*/job.toml")):
        teacher = load_job(file)
        answers = last_answers(teacher, open_store(str(STORES / f"{teacher.name}-{seed}")))
        stages[file.parent.name] = answers.pop(TEACHER)
        stages |= {f"{file.parent.name}-{stage}": answered for stage, answered in answers.items()}
    split = held_out(opened).split
    result = {"job": recipe, "seed": seed, "split": split, "stages": stages, "training": training(opened)}
    return {**result, **provenance(job)}


def last_answers(job: Job, store: Store) -> dict[str, dict[str, Any]]:
    """Stage -> domain -> which held-out prompts its last policy answered entirely right, and the mean reward."""
    answered = held_out(store)
    stages = {}
    for stage in job.stages:
        answers = answered.newest(stage.name)
        if answers is not None:
            stages[stage.name] = {
                domain: {
                    "correct": "".join(str(int(value)) for value in answers.correct.get(domain, ())),
                    "reward": round(float(answers.reward[domain].mean()), 4),
                }
                for domain in answers.prompts
                if domain in answers.reward
            }
    return stages


def training(store: Store) -> dict[str, Any]:
    """Stage -> what its steps and samples were like; lists have a value for every window or iteration.

    Of the recipe's own stages: the quickstart's are the same in every recipe.
    """
    by_stage: dict[str, Any] = {}
    for query in (TRAINED, SAMPLED):
        for row in store.sql(query).to_pylist():
            numbers = {k: round(v, 4) for k, v in row.items() if k != "stage" and v is not None}
            by_stage.setdefault(row["stage"], {}).update(numbers)
    for query in (OVERLAP, REWARDS, DISCRIMINATOR):
        for row in store.sql(query).to_pylist():
            ((name, value),) = ((k, v) for k, v in row.items() if k != "stage")
            by_stage[row["stage"]].setdefault(name, []).append(round(value, 4))
    return {stage: figures for stage, figures in by_stage.items() if stage not in SHARED}


def by_seed(recipe: str) -> BySeed:
    """Committed results."""
    return {result["seed"]: result for result in results(recipe)}


def measured(recipe: str) -> str:
    """What the recipe's own text says came out; its links are those of a page in docs/."""
    readme = JOBS / recipe / "README.md"
    text = readme.read_text().partition("## What was measured\n")[2].strip() if readme.is_file() else ""
    return text.replace("](../", "](../jobs/")


def gallery(names: Iterable[str]) -> Iterable[str]:
    """Markdown rows: each recipe, what it shows, and the processor time that its text says a seed took."""
    yield "| recipe | what it shows | processor time of a seed |"
    yield "|---|---|---|"
    for name in names:
        took = TIME.search(measured(name))
        cost = "not measured" if took is None else took[1] + (took[2] or "")
        yield f"| [{name}](#{name}) | {load_job(JOBS / name).shows} | {cost} |"


def picture(recipe: str) -> str:
    """SVG of a recipe."""
    return stages_picture(recipe, accuracies(by_seed(recipe)), "accuracy")


def shown() -> list[str]:
    """Recipes of which there is something to show."""
    return [name for name in recipes() if results(name)]


def section(recipe: str) -> str:
    """One recipe of the page."""
    job = load_job(JOBS / recipe)
    summary = f"{job.shows[0].upper()}{job.shows[1:]}. Follows {job.source}."
    lines = [f"## {recipe}", "", *textwrap.wrap(summary, 120, break_on_hyphens=False), "", measured(recipe), ""]
    lines += [f"![{recipe}: what every stage ended with](images/recipes/{recipe}.svg)", ""]
    return "\n".join([*lines, *tables(recipe, by_seed(recipe)), ""])


def page() -> str:
    """The whole page."""
    return f"# Recipes\n{HEAD}\n" + "\n".join([*gallery(shown()), "", *map(section, shown())])


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


if __name__ == "__main__":
    main()
