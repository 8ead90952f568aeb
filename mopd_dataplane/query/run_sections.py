"""Sections of a report on how the run went and what it was made with: training, rollouts, versions, settings."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mopd_dataplane.query.change_marks import change_marks, changed
from mopd_dataplane.query.exactness import nat, part_name, position_cause, verdict, worst_gaps
from mopd_dataplane.query.measures import Measures, Rows
from mopd_dataplane.query.plots import Line, grouped
from mopd_dataplane.query.sections import Cell, Grid, Parts, Plots, Section, build_sections, curves, lines_of
from mopd_dataplane.query.signal_health import HEAD, health_cells, health_verdict, newest_health, probe_cells
from mopd_dataplane.query.text import count, percent

STEP_CURVES = (
    ("loss", "Loss.", "objective value"),
    ("grad_norm", "Gradient norm, before clipping.", "norm"),
    ("learning_rate", "Learning rate.", "learning rate"),
    ("entropy", "Entropy of the student on trained tokens.", "nat"),
    ("tokens_per_s", "Throughput of training.", "tokens/s"),
)
"""Column of measures.steps, caption, unit."""
ROLLOUT_CURVES = (
    ("reward", "Reward of rollouts, with 95 % intervals.", "mean reward"),
    ("length", "Response length, with 95 % intervals.", "tokens"),
    ("truncated", "Ended by the token budget, with 95 % intervals.", "share of samples"),
)
"""Column of measures.curves, caption, unit."""
BOUNDED = ("length", "truncated")
"""Columns of which an interval does not fall below 0."""
LONGEST_VALUE = 200


def run_sections(measures: Measures) -> list[Section]:
    """In reading order, behind those of sections.py."""
    return build_sections(PARTS, measures)


def rollouts(measures: Measures) -> Section:
    """Reward, length and truncation of each domain over iterations, of every stage with several."""
    plots: Plots = []
    for stage, rows in grouped(measures.curves, "stage").items():
        if len({row["iteration"] for row in rows}) < 2:
            continue
        for name, caption, unit in ROLLOUT_CURVES:
            lines = [_with_interval(d, own, name) for d, own in grouped(rows, "domain").items()]
            lines = [line for line in lines if any(value is not None for value in line.y)]
            if lines:
                shown = f"{stage}: {caption[0].lower()}{caption[1:]}"
                axes = {"x": "iteration", "y": unit}
                key, alt = f"run{len(plots)}", f"{stage}: {caption}"
                marks = change_marks(measures.changes, [stage], "iteration")
                plots.append(curves(key, shown, alt, lines, **axes, share=name == "truncated", marks=marks))
    return Section(plots=plots)


def training(measures: Measures) -> Section:
    """Loss, gradient norm, learning rate, entropy and throughput over steps, a line for each stage."""
    plots: Plots = []
    for name, caption, unit in STEP_CURVES:
        lines = lines_of(measures.steps, "stage", "step", name)
        lines = [line for line in lines if any(value is not None for value in line.y)]
        if lines:
            marks = change_marks(measures.changes, [line.name for line in lines], "step")
            plots.append(curves(f"trained{len(plots)}", caption, caption, lines, x="step", y=unit, marks=marks))
    return Section(plots=plots)


def exactness(measures: Measures) -> Section:
    """Sampler, teachers and trainer beside the plain pass of their models, and the trainer beside the sampler."""
    checks, gaps = measures.self_checks, measures.sampler_gaps
    grids = []
    if checks:
        rows = [
            [row["stage"], part_name(row), row["model"], row["dtype"], count(row["tokens"]) if row["tokens"] else "–",
             *_bounded(row, "gap")]
            for row in checks
        ]  # fmt: skip
        grids.append(
            Grid(
                head=["stage", "part", "model", "dtype", "tokens", "difference", "allowed"],
                rows=_cells(rows),
                words=4,
                caption="Mean difference of log-probs from the model's own plain pass of the same texts, in nat: a "
                "made-up one, and the job's prompts up to the longest sample, as far as takes seconds. Tokens: of the "
                "longest text.",
            )
        )
    if gaps:
        rows = [
            [row["stage"], f"{row['engine']}, {row['sampler_dtype']}", row["dtype"], str(row["window"]),
             nat(row["p99"]), percent(row["outside"]), *_bounded(row, "mean")]
            for row in worst_gaps(gaps)
        ]  # fmt: skip
        grids.append(
            Grid(
                head=["stage", "sampler", "trainer", "window", "99th percentile", "outside", "mean", "allowed"],
                rows=_cells(rows),
                words=3,
                caption="Trainer against sampler on the policy's own samples before it is trained on them, in nat: "
                "each stage's window with the largest mean.",
            )
        )
    grids += _by_position(measures.gaps_by_position, worst_gaps(gaps))
    return Section(text=verdict(checks, gaps), grids=grids)


def _by_position(positions: Rows, gaps: Rows) -> list[Grid]:
    """Differences from the sampler along the answer, of the windows in `gaps`."""
    rows, causes = [], []
    for gap in gaps:
        own = [row for row in positions if (row["stage"], row["window"]) == (gap["stage"], gap["window"])]
        rows += [
            [row["stage"], str(row["window"]), f"{row['start']}–{row['last']}", count(row["tokens"]), nat(row["mean"]),
             nat(row["p99"])]
            for row in own
        ]  # fmt: skip
        if gap["warning"] and (cause := position_cause(own)):
            causes.append(f"{gap['stage']}: {cause}.")
    if not rows:
        return []
    caption = "The same windows by position among the trained tokens, of samples whose statistics were kept."
    head = ["stage", "window", "trained tokens", "count", "mean", "99th percentile"]
    return [Grid(head=head, rows=_cells(rows), words=1, caption=" ".join([caption, *causes]))]


def signal_health(measures: Measures) -> Section:
    """Health of every teacher's signal in its last scored iteration, the probes before the first step, and failed
    checks."""
    health, probes = newest_health(measures.signal_health), measures.signal_probes
    if not health:
        return Section()
    words = HEAD.index("samples") + 1
    grids = [
        Grid(
            head=["stage", *HEAD],
            rows=_cells([[row["stage"], *health_cells(row)] for row in health]),
            words=words,
            caption="Last scored iteration. Means over trained tokens in nat, perplexity and end as teacher / student; "
            "agrees: share of tokens that are the teacher's first choice; broken: uniform, constant or zero.",
        )
    ]
    if probes:
        grids.append(
            Grid(
                head=["stage", "reader", "domain", "tokens", "reference answers", "entropy", "own text"],
                rows=_cells([[row["stage"], *probe_cells(row)] for row in probes]),
                words=3,
                caption="Before the first step: mean log-prob in nat of reference answers and of the reader's own "
                "greedy text.",
            )
        )
    return Section(text=health_verdict(measures.signal_health), grids=grids)


def _bounded(row: dict[str, Any], name: str) -> list[str]:
    return [nat(row[name]), f"{row['band']:g}"]


def _cells(rows: Sequence[Sequence[str]]) -> list[list[Cell]]:
    return [[Cell(text=text) for text in row] for row in rows]


def changes(measures: Measures) -> Section:
    """Every key of the job that changed after its stage had begun."""
    if not measures.changes:
        return Section()
    head = ["stage", "from iteration", "change", "class", "when", "command"]
    rows = [
        [row["stage"], str(row["iteration"]), changed(row), row["change_class"],
         row["created_at"].isoformat(sep=" ", timespec="seconds"), row["command"]]
        for row in measures.changes
    ]  # fmt: skip
    return Section(grids=[Grid(head=head, rows=_cells(rows), words=6)])


def made_with(measures: Measures) -> Section:
    """Commit, versions, machine and date of every call that differed from those before."""
    runs = measures.made_with.get("runs", [])
    if not runs:
        return Section()
    text = f"The last of {count(len(runs))} calls that differ in commit, versions or machine." if len(runs) > 1 else ""
    return Section(text=text, grids=[_values([*_flat(runs[-1])])], folded=True)


def settings(measures: Measures) -> Section:
    """Every setting of the job as the store remembers it."""
    rows = [*_flat(measures.job)]
    return Section(grids=[_values(rows)], folded=True) if rows else Section()


PARTS: Parts = (
    ("rollouts", "Rollouts over iterations", rollouts, "No stage has sampled twice."),
    ("training", "Training", training, "No training step is recorded."),
    ("changes", "Changes of the job", changes, "The job is the one that the run began with."),
    ("signals", "Health of the signals", signal_health, "No signal has been measured."),
    ("exactness", "Exactness", exactness, "No self-check is recorded."),
    ("made-with", "Made with", made_with, "The store does not say what it was made with."),
    ("settings", "Settings of the job", settings, "No job made this store."),
)


def _values(rows: Sequence[tuple[str, str]]) -> Grid:
    return Grid(head=["setting", "value"], rows=[[Cell(text=key), Cell(text=value)] for key, value in rows], words=2)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, value) of every leaf; a list of sections goes by their names."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}.{item.get('name', index)}")
    else:
        text = str(value)
        yield path, text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _with_interval(name: str, rows: Rows, column: str) -> Line:
    half = [row[f"{column}_ci"] for row in rows]
    y = [row[column] for row in rows]
    with_value = [
        (value, width) if value is not None and width is not None else None
        for value, width in zip(y, half, strict=True)
    ]
    least = 0.0 if column in BOUNDED else -math.inf
    return Line(
        name=name, x=[row["iteration"] for row in rows], y=y,
        low=[pair and max(pair[0] - pair[1], least) for pair in with_value],
        high=[pair and pair[0] + pair[1] for pair in with_value],
    )  # fmt: skip
