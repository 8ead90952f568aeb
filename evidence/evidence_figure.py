"""The figure of docs/evidence.md: accuracy against the answers that a student learnt from, for every arm."""

from __future__ import annotations

from collections.abc import Iterable

from comparisons import COMPARISONS, Arm, Comparison, answers_of
from evidence_tables import QUICKSTART_OBJECTIVES, ends_after, ends_of
from pictures import Curve, Panel, panels_picture
from quickstart_tables import quickstart_ends
from results import JOBS, Right, mean, results, right

from mopd_dataplane.job.load import load_job


def accuracy_picture() -> str:
    """An SVG with a panel for the pretrained model and one for the toy world."""
    smol, toy = COMPARISONS["smollm2-mopd"], COMPARISONS["alternatives"]
    domains = sorted(smol.job.routing)
    smol_curves, smol_levels = _curves(smol, domains, start=True)
    toy_curves, toy_levels = _curves(toy, sorted(toy.job.routing), start=False)
    answers = answers_of(load_job(JOBS / "quickstart").stage("student"))
    many = {
        f"{arm}, quickstart": [(answers, mean(map(accuracy, quickstart_ends(objective))))]
        for arm, objective in QUICKSTART_OBJECTIVES.items()
    }
    panels = (
        Panel(
            title="SmolLM2-135M, mean of three seeds", curves=smol_curves,
            levels={**smol_levels, **_specialists(smol)},
            ticks=(0, 384, 768, 1536, 2304, 3072), width=620,
        ),
        Panel(
            title="toy world, mean of seeds 0 to 2", curves={**toy_curves, **many}, levels=toy_levels,
            ticks=(1024, 2048, 4096, 8192, 16384, 24576), logarithmic=True, width=640,
        ),
    )  # fmt: skip
    return panels_picture(
        "Accuracy against answers, by arm", panels, across="answers that the student learnt from",
        upward="entirely right, mean over three domains; dashed: learns from no answers",
    )  # fmt: skip


def _curves(comparison: Comparison, domains: list[str], *, start: bool) -> tuple[dict[str, Curve], dict[str, float]]:
    """Curves of the arms that learn from answers, and levels of those that do not; specialists are left out.

    start: curves begin at the base, with no answers.
    """
    curves: dict[str, Curve] = {}
    levels: dict[str, float] = {}
    job = comparison.folder.name
    for name, arm in comparison.arms.items():
        if arm.like or name in comparison.specialists or not learns_all(comparison, arm):
            continue
        runs = [result for result in results(job) if result["arm"] == name]
        if not runs:
            continue
        by_answers = {count: ends_after(runs, count) for count in comparison.answers_by_point(name)}
        means = [(count, mean(accuracy(end, domains) for end in ends.values())) for count, ends in by_answers.items()
                 if ends.keys() == {run["seed"] for run in runs}]  # fmt: skip
        if arm.stages:
            curves[name] = means
        else:
            levels[name] = mean(accuracy(end, domains) for end in ends_of(runs).values())
    if start:
        curves = {name: [(0, levels[comparison.base]), *curve] for name, curve in curves.items()}
    return curves, levels


def learns_all(comparison: Comparison, arm: Arm) -> bool:
    """Whether an arm's stages together learn every skill that has a specialist."""
    learnt = {domain for name in arm.stages for domain in comparison.job.domains_of(comparison.job.stage(name))}
    return not arm.stages or learnt >= comparison.job.routing.keys()


def _specialists(comparison: Comparison) -> dict[str, float]:
    """Mean over domains of what each domain's own specialist gets right, once all are measured."""
    ends = {result["arm"]: right(result["curve"][-1]["right"]) for result in results(comparison.folder.name)}
    routing = comparison.job.routing
    if not ends.keys() >= {*routing.values()}:
        return {}
    return {"specialists": mean(float(ends[teacher][domain].mean()) for domain, teacher in routing.items())}


def accuracy(end: Right, domains: Iterable[str] = ()) -> float:
    """Mean over domains of the share that is right; domains: default all."""
    return mean(float(end[domain].mean()) for domain in domains or end)
