"""Every recipe over several seeds, and one page that shows them: docs/recipes.md with a plot for each.

    python jobs/compare.py [--recipes opd grpo …] [--seeds 0 1 2] [--processes 2] [--page-only]

Stores go to runs/recipes/<recipe>-<seed>; a finished one is not run again, an interrupted one continues. Recipes that
start from the quickstart's base and specialists get a copy of a store in which those have run, so that each seed trains
them once. The page shows every run that has finished, of earlier commands too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mopd_dataplane import open_store
from mopd_dataplane.job.job import Job, load_job

JOBS = Path(__file__).parent
STORES = Path("runs/recipes")
PAGE = JOBS.parent / "docs" / "recipes.md"
PLOTS = JOBS.parent / "docs" / "images" / "recipes"
SHARED = ("base", "speller", "sorter", "walker")
"""Stages of the quickstart that recipes start from and are taught by."""
Curves = dict[str, list[tuple[int, dict[str, float]]]]
"""Stage -> (policy version, held-out accuracy of each domain), version 0 being where the stage starts."""


def recipes() -> list[str]:
    """Names of the job folders that follow a published recipe."""
    return sorted(file.parent.name for file in JOBS.glob("*/job.toml") if load_job(file).source)


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
    """Run a recipe to its end."""
    store = STORES / f"{recipe}-{seed}"
    starts_shared = any(stage.name in SHARED for stage in load_job(JOBS / recipe).stages)
    if starts_shared and not store.exists():
        staging = store.with_name(f".{store.name}.tmp")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(STORES / f"shared-{seed}", staging, symlinks=True)
        staging.rename(store)
    mopd("run", str(JOBS / recipe), "--seed", str(seed), "--store", str(store))


def finished(recipe: str) -> list[int]:
    """Seeds whose run of every stage has come to its end."""
    stages = {stage.name for stage in load_job(JOBS / recipe).stages}
    seeds = []
    for store in STORES.glob(f"{recipe}-*"):
        seed = store.name.removeprefix(f"{recipe}-")
        if not seed.isdecimal():  # of another recipe, whose name is longer
            continue
        ended = open_store(str(store)).sql("select distinct stage from events where kind = 'stage_done'")
        if stages <= set(ended["stage"].to_pylist()):
            seeds.append(int(seed))
    return sorted(seeds)


def curves(recipe: str, seed: int) -> Curves:
    """What a finished run's evaluations say of every stage of the recipe."""
    job = load_job(JOBS / recipe)
    rows = open_store(str(STORES / f"{recipe}-{seed}")).sql(
        "select policy, policy_version as version, domain, avg(reward) as accuracy from evals group by all order by all"
    )
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows.to_pylist():
        versions = found.setdefault(row["policy"], {})
        versions.setdefault(row["version"], {})[row["domain"]] = row["accuracy"]
    drawn: Curves = {}
    for stage in job.stages:
        if stage.name in found:
            start = found.get(stage.start, {})
            first = {0: start[max(start)]} if start else {}
            drawn[stage.name] = sorted((first | found[stage.name]).items())
    return drawn


def stages(by_seed: dict[int, Curves]) -> list[str]:
    """Stages that some seed has, in the job's order."""
    return list(dict.fromkeys(stage for found in by_seed.values() for stage in found))


def columns(by_seed: dict[int, Curves]) -> list[str]:
    """The domains and `mean`; of more than five domains, `mean` alone."""
    domains = sorted({d for found in by_seed.values() for points in found.values() for _, a in points for d in a})
    return [*domains, "mean"] if 1 < len(domains) <= 5 else ["mean"]


def value(accuracy: dict[str, float], column: str) -> float:
    """Accuracy of a domain (nan where it was not evaluated), or the mean of all."""
    return statistics.mean(accuracy.values()) if column == "mean" else accuracy.get(column, math.nan)


def plot(recipe: str, by_seed: dict[int, Curves]) -> None:
    """Accuracy over policy versions, a panel per domain and one for their mean; one line per own stage and seed."""
    panels = columns(by_seed)
    figure, axes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.0), sharey=True, squeeze=False)
    own = [stage for stage in stages(by_seed) if stage not in SHARED]
    colours = matplotlib.color_sequences["tab10" if len(own) <= 10 else "tab20"]
    for place, stage in enumerate(own):
        for seed, found in by_seed.items():
            points = found.get(stage, [])
            for axis, panel in zip(axes[0], panels, strict=True):
                values = [value(accuracy, panel) for _, accuracy in points]
                label = stage if seed == min(by_seed) else None
                axis.plot([v for v, _ in points], values, "o-", ms=2.5, lw=1.1, color=colours[place], label=label)
    for axis, panel in zip(axes[0], panels, strict=True):
        axis.set_title(panel, fontsize=9)
        axis.set_xlabel("policy version", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", lw=0.4)
    axes[0][0].set_ylabel("held-out accuracy", fontsize=8)
    axes[0][-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    PLOTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOTS / f"{recipe}.png", dpi=130, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def own_plot(recipe: str, seeds: Iterable[int]) -> Path | None:
    """What the recipe's own plot.py draws of the stores, if it has one."""
    script = JOBS / recipe / "plot.py"
    if not script.is_file():
        return None
    out = PLOTS / f"{recipe}-own.png"
    subprocess.run([sys.executable, script, "--out", out, *(STORES / f"{recipe}-{seed}" for seed in seeds)], check=True)
    return out


def table(by_seed: dict[int, Curves]) -> Iterable[str]:
    """Markdown rows: accuracy at the end of every stage, the mean over seeds and each seed's own value."""
    panels = columns(by_seed)
    yield f"| stage | {' | '.join(panels)} |"
    yield "|---" * (1 + len(panels)) + "|"
    for stage in stages(by_seed):
        ends = [found[stage][-1][1] for found in by_seed.values() if stage in found]
        cells = [[100 * value(accuracy, panel) for accuracy in ends] for panel in panels]
        shown = [f"**{statistics.mean(c):.1f}** ({' / '.join(f'{one:.1f}' for one in c)})" for c in cells]
        yield f"| {stage} | {' | '.join(shown)} |"


def section(recipe: str, job: Job, by_seed: dict[int, Curves]) -> str:
    """One recipe of the page."""
    readme = JOBS / recipe / "README.md"
    finding = readme.read_text().partition("## What was measured\n")[2].strip() if readme.is_file() else ""
    seeds = f"Seeds {', '.join(map(str, by_seed))}."
    said = f"{job.shows[0].upper()}{job.shows[1:]}. Follows {job.source}. {seeds}"
    lines = [f"## {recipe}", "", *textwrap.wrap(said, 120, break_on_hyphens=False), ""]
    lines += [
        f"![{recipe}: held-out accuracy over policy versions](images/recipes/{recipe}.png)",
        "",
        *table(by_seed),
        "",
    ]
    if drawn := own_plot(recipe, by_seed):
        lines += [f"![{recipe}: {drawn.stem}](images/recipes/{drawn.name})", ""]
    return "\n".join([*lines, *([finding, ""] if finding else [])])


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=recipes(), choices=recipes(), metavar="NAME", help="to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="to run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page-only", action="store_true", help="run nothing; show the runs that have finished")
    options = parser.parse_args()
    if not options.page_only:
        run_all(options.recipes, options.seeds, options.processes)
    parts = []
    for recipe in recipes():
        by_seed = {seed: curves(recipe, seed) for seed in finished(recipe)}
        if by_seed:
            plot(recipe, by_seed)
            parts.append(section(recipe, load_job(JOBS / recipe), by_seed))
            (STORES / f"{recipe}.json").write_text(json.dumps(by_seed, indent=1))
    head = (
        f"Written by `jobs/compare.py` on {datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), no "
        "GPU; every seed that was run is shown. Accuracy on held-out prompts in per cent: **mean** (seed / seed / …). "
        "Small models and tasks: directions, not records."
    )
    PAGE.write_text(f"# Recipes\n\n{textwrap.fill(head, 120, break_on_hyphens=False)}\n\n" + "\n".join(parts))


def run_all(recipes: list[str], seeds: list[int], processes: int) -> None:
    """Run what is missing; a run that was interrupted continues."""
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(shared_store, seeds))
        list(pool.map(lambda work: run(*work), [(recipe, seed) for recipe in recipes for seed in seeds]))


if __name__ == "__main__":
    main()
