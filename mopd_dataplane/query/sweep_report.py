"""The page of a sweep, and its table: arms beside the first one, and curves against answers, tokens and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mopd_dataplane.base.file_urls import write_file
from mopd_dataplane.query.plots import Line
from mopd_dataplane.query.report import fill_template
from mopd_dataplane.query.sections import Cell, Grid, Plots, Section, curves
from mopd_dataplane.query.spent import BUDGETS, Budget
from mopd_dataplane.query.statistics import Difference
from mopd_dataplane.query.sweep import ArmMeasures, Point, SweepMeasures
from mopd_dataplane.query.text import count, number, percent

LABELS: dict[Budget, str] = {
    "answers": "answers learnt from", "tokens": "trained tokens", "seconds": "seconds of the stage",
}  # fmt: skip


def write_sweep_report(measures: SweepMeasures, out: Path) -> Path:
    """Write the page of a sweep: one HTML file without scripts or links to elsewhere."""
    subtitle = f"stage {measures.stage} · {count(measures.prompts)} held-out prompts ({measures.split} split)"
    page = fill_template("sweep.html.j2", name=measures.name, subtitle=subtitle, sections=list(_sections(measures)))
    write_file(out, page.encode())
    return out


def sweep_grid(measures: SweepMeasures) -> Grid:
    """One row an arm: its score, its divergence from the teachers, and its difference to the first arm."""
    first = measures.arms[0]
    body = [
        [
            Cell(text=arm.name),
            Cell(text=", ".join(map(str, sorted(arm.by_seed))) or "none"),
            Cell(text=_score(measures, arm)),
            Cell(text=_newest_kl(arm)),
            Cell(text="" if arm is first else _points(measures, arm.difference)),
        ]
        for arm in measures.arms
    ]
    caption = (
        f"{measures.score.capitalize()} of the newest policies on {count(measures.prompts)} held-out prompts that all "
        "runs answered, mean over domains and seeds. Differences are paired by prompt; 95 % intervals by bootstrap "
        "over prompts, each with its answers of all seeds. KL: nat per token of the last answers that a teacher scored."
    )
    head = ["arm", "seeds", measures.score, "reverse KL", f"minus {first.name}"]
    return Grid(head=head, rows=body, caption=caption)


def _sections(measures: SweepMeasures) -> Iterator[Section]:
    yield Section(key="arms", title="Arms", grids=[sweep_grid(measures)])
    score_plots = _plots(measures, measures.score, lambda point: point.score, is_share=measures.score == "accuracy")
    yield Section(key="score", title=measures.score.capitalize(), plots=score_plots)
    kl_plots = _plots(measures, "reverse KL, nat per token", lambda point: point.reverse_kl, is_share=False)
    empty = "" if kl_plots else "No teacher scored answers of this stage."
    yield Section(key="kl", title="Reverse KL", plots=kl_plots, empty=empty)
    yield Section(key="seeds", title="Each seed", grids=[_seed_grid(measures)])


def _seed_grid(measures: SweepMeasures) -> Grid:
    """One row a run: its score, its cost, and its difference to the first arm with the same seed."""
    body = []
    for arm in measures.arms:
        for seed in sorted(arm.by_seed):
            spent = arm.curves[seed][-1].spent
            score, difference = arm.by_seed[seed], arm.differences.get(seed)
            p = "" if difference is None or difference.p is None else f"{difference.p:.2g}"
            cells = (
                arm.name, str(seed), percent(score) if measures.score == "accuracy" else number(score),
                _points(measures, difference), p, *(count(spent.of(budget)) for budget in BUDGETS),
            )  # fmt: skip
            body.append([Cell(text=text) for text in cells])
    head = ["arm", "seed", measures.score, f"minus {measures.arms[0].name}", "McNemar p", *BUDGETS]
    return Grid(head=head, rows=body, words=2)


def _plots(measures: SweepMeasures, title: str, value_of: Callable[[Point], float | None], *, is_share: bool) -> Plots:
    """A plot for each kind of cost with a line for each arm; none where no point has a value."""
    plots = []
    for budget in BUDGETS:
        lines = [line for arm in measures.arms if (line := _line(arm, budget, value_of)).x]
        if lines:
            caption = f"{title} against {LABELS[budget]}: mean over seeds, band from the lowest to the highest."
            key, alt = f"{'score' if is_share else 'value'}-{title.partition(' ')[0]}-{budget}", f"{title}, by arm."
            plots.append(curves(key, caption, alt, lines, x=LABELS[budget], y=title, share=is_share))
    return plots


def _line(arm: ArmMeasures, budget: Budget, value_of: Callable[[Point], float | None]) -> Line:
    """Mean over seeds of every version, at the mean of its cost."""
    costs: dict[int, list[float]] = {}
    values: dict[int, list[float]] = {}
    for points in arm.curves.values():
        for point in points:
            if (value := value_of(point)) is not None:
                costs.setdefault(point.version, []).append(point.spent.of(budget))
                values.setdefault(point.version, []).append(value)
    versions = sorted(values)
    has_band = len(arm.curves) > 1
    return Line(
        name=arm.name,
        x=[float(np.mean(costs[version])) for version in versions],
        y=[float(np.mean(values[version])) for version in versions],
        low=[min(values[version]) for version in versions] if has_band else (),
        high=[max(values[version]) for version in versions] if has_band else (),
    )


def _score(measures: SweepMeasures, arm: ArmMeasures) -> str:
    if arm.score is None:
        return "not run"
    if measures.score == "accuracy":
        return f"{percent(arm.score.value)} ({100 * arm.score.low:.0f}–{100 * arm.score.high:.0f})"
    return f"{number(arm.score.value)} ({number(arm.score.low)} to {number(arm.score.high)})"


def _newest_kl(arm: ArmMeasures) -> str:
    """Mean over seeds of the reverse KL of the last answers that a teacher scored."""
    newest = [
        [point.reverse_kl for point in points if point.reverse_kl is not None][-1:] for points in arm.curves.values()
    ]
    values = [value for values in newest for value in values]
    return number(float(np.mean(values))) if values else "–"


def _points(measures: SweepMeasures, difference: Difference | None) -> str:
    """A difference with its interval: in points of accuracy, or in mean reward."""
    if difference is None:
        return "–"
    scale, form = (100, "+.1f") if measures.score == "accuracy" else (1, "+.3f")
    value, low, high = (format(scale * end, form) for end in (difference.value, difference.low, difference.high))
    return f"{value} ({low} to {high})"
