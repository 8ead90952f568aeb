"""Write tables and pictures of the pages from the committed results.

A table is a block of a Markdown page, `<!-- figures: NAME -->` … `<!-- end of figures -->`.

    python evidence/figures.py            rewrite every such block
    python evidence/figures.py --check    name the stale blocks and results; exit 1

A result is stale when the job's settings or the sampler have changed since it was measured. Arms without a result
are marked `not run`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from comparisons import COMPARISONS
from evidence_figure import accuracy_picture
from evidence_tables import (
    alternatives,
    claims,
    conflict,
    evidence,
    near,
    selection,
    teacher_count,
)
from gradient_tables import gradients, noise, noise_mixed, signals
from quickstart_tables import quickstart, quickstart_sampled, quickstart_seeds
from results import JOBS, Result, module, results
from skill_tables import DATES, SUMS, skill_curves, skill_picture, skill_ratio
from smollm2_tables import (
    smollm2,
    smollm2_base_teaches,
    smollm2_begun,
    smollm2_costs,
    smollm2_curves,
    smollm2_json,
    smollm2_kept,
    smollm2_other_base,
    smollm2_picture,
    smollm2_search,
)

from mopd_dataplane.job.load import load_job
from mopd_dataplane.rollout.engines.sampling import FIRST_SAMPLER, SAMPLER
from mopd_dataplane.run.provenance import settings_digest

ROOT = JOBS.parent
PAGES = (
    "README.md", "docs/benchmarks/quickstart.md", "docs/evidence.md", "docs/objectives.md",
    *(f"jobs/{job}/README.md" for job in COMPARISONS), "jobs/quickstart/gradients/README.md",
)  # fmt: skip
"""Pages with blocks."""
BLOCK = re.compile(r"<!-- figures: ([a-z0-9-]+) -->\n(.*?)<!-- end of figures -->", re.DOTALL)
PICTURES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "images" / "evidence.svg": accuracy_picture,
    ROOT / "docs" / "images" / "smollm2-costs.svg": smollm2_picture,
    ROOT / "docs" / "images" / "one-skill.svg": skill_picture,
}
FIGURES: dict[str, Callable[[], str]] = {
    "quickstart": quickstart, "quickstart-seeds": quickstart_seeds,
    "quickstart-sampled": quickstart_sampled, "evidence": evidence, "alternatives": alternatives, "claims": claims,
    "near": near, "smollm2-mopd": smollm2, "smollm2-curves": smollm2_curves, "smollm2-json": smollm2_json,
    "smollm2-search": smollm2_search, "smollm2-skill": partial(skill_curves, DATES),
    "smollm2-ratio": partial(skill_ratio, DATES), "smollm2-sums": partial(skill_curves, SUMS),
    "smollm2-sums-ratio": partial(skill_ratio, SUMS), "smollm2-kept": smollm2_kept,
    "smollm2-begun": smollm2_begun, "smollm2-costs": smollm2_costs, "smollm2-base-teaches": smollm2_base_teaches,
    "smollm2-other-base": smollm2_other_base, "conflict": conflict,
    "teacher-count": teacher_count, "selection": selection, "noise": noise, "noise-mixed": noise_mixed,
    "signals": signals,
}  # fmt: skip


def stale() -> Iterator[str]:
    """Describe what is stale: blocks that differ from the results, results of other settings or of another sampler."""
    for page in PAGES:
        file = ROOT / page
        text = file.read_text() if file.exists() else ""
        for name, body in BLOCK.findall(text):
            if body != FIGURES[name]():
                yield f"{page}: block {name!r} differs from the results; run: python evidence/figures.py"
    for picture, draw in PICTURES.items():
        if not picture.exists() or picture.read_text() != draw():
            yield f"{picture.relative_to(ROOT)} differs from the results; run: python evidence/figures.py"
    for folder in sorted(JOBS.glob("*/results")):
        for inner in (".", "tried", "begun"):
            for result in results(folder.parent.name, inner):
                yield from _stale_result(folder.parent.name, result)
    stages = module(JOBS / "quickstart" / "signals.py").STAGES
    now = settings_digest(load_job(JOBS / "quickstart"), stages)
    for result in (*gradients("signals"), *gradients("baselines")):
        if (result["settings"], result["sampler"]) != (now, SAMPLER):
            yield "jobs/quickstart/gradients: job or sampler have changed; run jobs/quickstart/signals.py again"


def _stale_result(job: str, result: Result) -> Iterator[str]:
    where = f"jobs/{job}: result of commit {result['commit']}"
    if result["sampler"] not in (SAMPLER, FIRST_SAMPLER):
        yield f"{where}: sampler {result['sampler']!r}, which drew its samples, is no longer here; run it again"
    arguments = {"arm": result.get("arm", ""), "setting": result.get("setting", 1.0)}
    arguments |= {"objective": result.get("objective", ""), "stages": tuple(result.get("stages", ()))}
    now = _settings_now(JOBS / job, **arguments)
    if result["settings"] != now:
        yield f"{where}: the job's settings have changed ({result['settings']} then, {now} now); run it again"


@cache
def _settings_now(folder: Path, arm: str, setting: float, objective: str, stages: tuple[str, ...]) -> str:
    """Digest of a job's settings today: of an arm at a setting, of an objective's quickstart, or of a recipe.

    stages: stages of a recipe's result. A stage that was added later changes nothing that was measured.
    """
    if folder.name in COMPARISONS:
        comparison = COMPARISONS[folder.name]
        job = load_job(folder, overrides=comparison.rates(comparison.arms[arm], setting))
        return settings_digest(job, (*comparison.shared, *comparison.arms[arm].trained_stages))
    if objective:
        job = module(folder / "seeds.py").job_of(objective, 0)
        return settings_digest(job, [stage.name for stage in job.stages])
    job = load_job(folder)
    return settings_digest(
        job.model_copy(update={"stages": tuple(stage for stage in job.stages if stage.name in stages)})
    )


def main() -> None:
    """Rewrite the blocks, or name what is stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        problems = list(stale())
        print("\n".join(problems))
        sys.exit(bool(problems))
    for picture, draw in PICTURES.items():
        picture.write_text(draw())
    for page in PAGES:
        file = ROOT / page
        before = file.read_text()
        after = BLOCK.sub(lambda m: f"<!-- figures: {m[1]} -->\n{FIGURES[m[1]]()}<!-- end of figures -->", before)
        if after != before:
            file.write_text(after)
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
