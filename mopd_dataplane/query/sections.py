"""The sections of a report: measures in; sentences, plots and tables out. One without data says so in one line."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mopd_dataplane.query.change_marks import Mark, change_marks
from mopd_dataplane.query.compare import Comparison
from mopd_dataplane.query.measures import Measures, Rows, recovery, teacher_policies
from mopd_dataplane.query.plots import Line, Plot, bars, grouped, histogram, line_plot
from mopd_dataplane.query.statistics import Difference, mean_share
from mopd_dataplane.query.text import count, duration, number, percent, size
from mopd_dataplane.tables import TABLES

FLOW = ("data", "rollout", "reward", "score", "plan", "train", "evaluate")
"""Actions of a stage, in order."""
Plots = list[tuple[str, Plot]]
"""(caption, plot)"""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One table cell."""

    text: str
    heat: float | None = None
    """Share in [0, 1] that tints the cell."""
    note: str = ""
    """Small print below the text."""
    marked: bool = False


NOTHING = Cell(text="–")
MEAN_REWARD = "Mean reward of the same answers, partial credit included, ± its standard error."


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One table."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: int = 1
    """Leading columns that hold words, not numbers."""
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page."""

    key: str = ""
    title: str = ""
    text: str = ""
    plots: Plots = field(default_factory=list)
    grids: Sequence[Grid] = ()
    empty: str = ""
    """The one line that stands for a section without data."""
    folded: bool = False
    """Whether its tables are shown on demand only."""


Parts = Sequence[tuple[str, str, Callable[[Measures], Section], str]]
"""Sections in reading order: key, title, what makes its text, plots and tables, the line that stands for it without."""


def build_sections(parts: Parts, measures: Measures) -> list[Section]:
    """Some sections of measures."""
    built = [(key, title, make(measures), empty) for key, title, make, empty in parts]
    return [
        replace(part, key=key, title=title, empty="" if part.text or part.plots or part.grids else empty)
        for key, title, part, empty in built
    ]


def sections(measures: Measures) -> list[Section]:
    """Every section but the excerpts and those of run_sections.py."""
    return build_sections(PARTS, measures)


def cards(measures: Measures) -> list[tuple[str, str, str]]:
    """The figures on top: (name, value, remark)."""
    totals = measures.totals[0]
    trained, stages = sum(row["steps"] for row in measures.training), len(measures.training)
    shown = [
        ("samples", count(totals["samples"]), f"{count(totals['interrupted'])} interrupted and continued"),
        ("response tokens", count(totals["response_tokens"]), ""),
        ("optimizer steps", count(trained), f"{count(stages)} stage{'' if stages == 1 else 's'}"),
    ]
    recovered = [row for row in recovery(measures) if row["domain"] == "mean" and row["recovery"] is not None]
    if recovered:
        last = recovered[-1]
        remark = f"{last['policy']}, of its teachers' lead over {last['base']}; 95 %: {_span(last)}"
        shown.append(("recovered", percent(last["recovery"]), remark))
    seconds = sum(row["seconds"] for row in measures.training)
    if seconds:
        waiting = sum(row["data_wait_s"] for row in measures.training) / seconds
        shown.append(("waiting for data", percent(waiting), "share of training step time"))
    return shown


def accuracy_section(measures: Measures) -> Section:
    """The section on accuracy alone."""
    return build_sections(PARTS[:1], measures)[0]


def accuracy(measures: Measures) -> Section:
    """Domain × policy: accuracy of newest versions, recovered share of the teachers' lead, and mean reward."""
    rows = measures.accuracy
    if not rows:
        return Section()
    policies = {row["policy"]: row["policy_version"] for row in rows}
    domains = sorted({row["domain"] for row in rows})
    at = {(row["domain"], row["policy"]): row for row in rows}
    teachers = teacher_policies(measures)
    own = {(row["domain"], teachers.get(row["teacher"])) for row in measures.routing}
    recovered = recovery(measures)

    def right(domain: str, policy: str) -> Cell:
        row, key = at.get((domain, policy)), (domain, policy)
        if row is None or row["accuracy"] is None:
            return NOTHING
        text = _share(row["accuracy"], row["low"], row["high"])
        return Cell(text=text, heat=row["accuracy"], marked=key in own)

    def mean(policy: str) -> Cell:
        answers = measures.held_out.policies[policy, policies[policy]].correct
        if not answers:
            return NOTHING
        estimate = mean_share(answers)
        return Cell(text=_share(estimate.value, estimate.low, estimate.high), heat=estimate.value)

    def paid(domain: str, policy: str) -> Cell:
        row = at.get((domain, policy))
        if row is None or row["reward"] is None:
            return NOTHING
        return Cell(text=f"{row['reward']:.3f} ± {row['reward_error']:.3f}", marked=(domain, policy) in own)

    head = ["domain", *(f"{policy} v{version}" for policy, version in policies.items())]
    means = [[Cell(text="mean"), *map(mean, policies)]] if len(domains) > 1 else []
    shares = _matrix(domains, policies, right)
    bold = "In bold: the domain's teacher." if any(cell.marked for row in shares for cell in row) else ""
    grids = [
        Grid(head=head, rows=[*shares, *means], caption=bold),
        *_recovered(recovered),
        Grid(head=head, rows=_matrix(domains, policies, paid), caption=MEAN_REWARD + _left_out(measures, policies)),
    ]
    which = "tuning prompts, which settings were chosen on" if measures.held_out.split == "tune" else "held-out prompts"
    text = f"Share of {which} that is answered entirely right, with its 95 % interval; newest version of every policy."
    return Section(text=text, grids=grids)


def _matrix(domains: Iterable[str], columns: Iterable[str], cell: Callable[[str, str], Cell]) -> list[list[Cell]]:
    """A row for each domain: its name, and its cell of each column."""
    return [[Cell(text=domain), *(cell(domain, column) for column in columns)] for domain in domains]


def _share(value: float, low: float, high: float) -> str:
    """Share and interval in percent."""
    return f"{percent(value)} ({100 * low:.0f}–{100 * high:.0f})"


def _recovered(recovered: Rows) -> list[Grid]:
    """Share of the teachers' lead that each student recovered, by domain; none where no student has a teacher."""
    if not recovered:
        return []
    rows = [
        _plain(row["domain"], row["policy"], "–" if row["recovery"] is None else percent(row["recovery"]), _span(row))
        for row in recovered
    ]
    head = ["domain", "student", "recovered", "95 % interval"]
    return [Grid(head=head, rows=rows, words=2, caption=_reading(recovered))]


def _span(row: dict[str, Any]) -> str:
    return "–" if row["recovery"] is None else f"{100 * row['low']:.0f} to {100 * row['high']:.0f} %"


def _reading(recovered: Rows) -> str:
    """Explanation of the recovered shares, with the reason for every share that could not be given."""
    parts = ["Recovered: (student − start) / (teacher − start), with its 95 % interval."]
    missing: dict[tuple[str, str], list[str]] = {}
    for row in recovered:
        if row["warning"]:
            missing.setdefault((row["policy"], row["warning"]), []).append(row["domain"])
    parts += [f"{policy}, {', '.join(domains)}: – because {why}." for (policy, why), domains in missing.items()]
    return " ".join(parts)


def _left_out(measures: Measures, policies: dict[str, int]) -> str:
    """Sentence on the answers of these versions of policies that could not be scored; empty where all could."""
    counts: dict[str, int] = {}
    for row in measures.unscorable_evals:
        if policies.get(row["policy"]) == row["policy_version"]:
            counts[row["policy"]] = counts.get(row["policy"], 0) + row["answers"]
    shown = ", ".join(f"{count(answers)} of {policy}" for policy, answers in counts.items())
    return f" Left out, because they could not be scored: {shown}." if shown else ""


def comparison_grid(comparison: Comparison) -> Grid:
    """A comparison of two policies as a table."""
    head = ["domain", "prompts", "A", "B", "B − A, points", "only A · only B", "McNemar p", "mean reward, B − A", ""]
    body = []
    for row in comparison.rows:
        difference, paid = row.accuracy, row.reward
        cells = [row.domain, count(row.prompts)]
        cells += [_share(e.value, e.low, e.high) if e else "–" for e in (row.a, row.b)]
        cells += (
            [_points(difference), f"{difference.only_a} · {difference.only_b}", f"{difference.p:.2g}"]
            if difference
            else ["–", "–", "–"]
        )
        cells += [f"{paid.value:+.3f} ({paid.low:+.3f} to {paid.high:+.3f})" if paid else "–", row.verdict]
        body.append(_plain(*cells))
    caption = (
        f"{'Tuning' if comparison.split == 'tune' else 'Held-out'} prompts, paired; 95 % intervals, of differences by "
        "bootstrap over prompts. A difference is found where its interval leaves 0 out and McNemar's p is at most 0.05."
    )
    if comparison.left_out:
        caption += f" Left out: {count(comparison.left_out)} answers to prompts that the two do not share."
    for name, origin in comparison.origins.items():
        caption += f" {name.upper()} goes on from {origin}."
    for name, changes in comparison.changes.items():
        if changes:
            caption += f" The job of {name.upper()} changed: {'; '.join(changes)}."
    return Grid(head=head, rows=body, caption=caption)


def _points(difference: Difference) -> str:
    return f"{100 * difference.value:+.1f} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"


def learning(measures: Measures) -> Section:
    """Accuracy per domain over policy versions."""
    plots: Plots = []
    theirs = {(r["policy"], r["domain"]): r["teacher_accuracy"] for r in recovery(measures)}
    graded = [row for row in measures.accuracy_by_version if row["accuracy"] is not None]
    for policy, rows in _over_versions(graded).items():
        lines = [
            replace(line, level=theirs.get((policy, line.name)))
            for line in lines_of(rows, "domain", "policy_version", "accuracy")
        ]
        dashed = " Dashed: the domain's teacher." if any(line.level is not None for line in lines) else ""
        alt, caption = f"Held-out accuracy of {policy} by version.", f"{policy}: held-out accuracy.{dashed}"
        axes = {"x": "policy version", "y": "held-out accuracy"}
        marks = change_marks(measures.changes, [policy], "policy version")
        plots.append(curves(f"acc{len(plots)}", caption, alt, lines, **axes, share=True, marks=marks))
    return Section(plots=plots)


def divergence(measures: Measures) -> Section:
    """Reverse KL: per teacher over iterations, per stage over steps, held out over versions."""
    charts: list[tuple[str, str, str, list[Line], list[str]]] = []
    for stage, rows in grouped(measures.teacher_kl, "stage").items():
        lines = lines_of(rows, "teacher", "iteration", "reverse_kl")
        if max(len(line.x) for line in lines) > 1:
            caption = f"{stage}: reverse KL to each teacher on its own rollouts."
            charts.append(
                (caption, f"Reverse KL of {stage} to each teacher by iteration.", "iteration", lines, [stage])
            )
    for policy, rows in _over_versions(measures.heldout_kl).items():
        lines = lines_of(rows, "domain", "policy_version", "reverse_kl")
        caption = f"{policy}: reverse KL to the routed teacher on held-out prompts."
        charts.append((caption, f"Held-out reverse KL of {policy} by version.", "policy version", lines, [policy]))
    steps = [row for row in measures.steps if row["reverse_kl"] is not None]
    if steps:
        caption = "Reverse KL of the training batches."
        lines = lines_of(steps, "stage", "step", "reverse_kl")
        trained = [line.name for line in lines]
        charts.append((caption, "Reverse KL of the training batches by step.", "step", lines, trained))
    plots = [
        curves(
            f"kl{index}", caption, alt, lines, x=x, y="nat per token", marks=change_marks(measures.changes, stages, x)
        )
        for index, (caption, alt, x, lines, stages) in enumerate(charts)
    ]
    return Section(plots=plots)


def suitability(measures: Measures) -> Section:
    """Teachers by domain: mean reverse KL where several teachers scored the same domain."""
    rows = measures.suitability
    if not rows:
        return Section()
    teachers = sorted({row["teacher"] for row in rows})
    scored = {domain: {row["teacher"]: row for row in own} for domain, own in grouped(rows, "domain").items()}
    most = max(row["reverse_kl"] for row in rows) or 1.0

    def kl(domain: str, teacher: str) -> Cell:
        row = scored[domain].get(teacher)
        if row is None:
            return NOTHING
        value, rivals = row["reverse_kl"], [other["reverse_kl"] for other in scored[domain].values()]
        note, marked = f"{count(row['samples'])} samples", len(rivals) > 1 and value == min(rivals)
        return Cell(text=number(value), heat=max(0.0, value / most), note=note, marked=marked)

    text = "Mean reverse KL in nat per token over all scored samples. Outlined: the closest of several teachers."
    by_teacher = Grid(head=["domain", *teachers], rows=_matrix(sorted(scored), teachers, kl))
    return Section(text=text, grids=[by_teacher, *_rounding(measures.rounding)])


def _rounding(rows: Rows) -> list[Grid]:
    """Effect of quantisation on each quantised teacher."""
    if not rows:
        return []
    head = ["teacher", "weights", "KL, nat per token", "mean log-prob difference", "same first choice"]
    body = []
    for row in rows:
        kl = Cell(text=number(row["kl"]), note=f"{count(row['tokens'])} tokens")
        others = _plain(number(row["logprob_gap"]), percent(row["top1_agreement"]))
        body.append([*_plain(row["teacher"], row["quantisation"]), kl, *others])
    return [Grid(head=head, rows=body, caption="Teachers with quantised weights, against the same ones as stored.")]


def samples(measures: Measures) -> Section:
    """Response lengths, and how generations ended."""
    if not measures.lengths:
        return Section()
    width = measures.lengths[0]["width"]
    groups = {
        domain: [(row["start"], row["samples"]) for row in rows]
        for domain, rows in grouped(measures.lengths, "domain").items()
    }
    total = sum(row["samples"] for row in measures.lengths)
    alt = f"Histogram of the length of {count(total)} responses, in tokens, by domain."
    plot = histogram("lengths", alt, groups, width=width, x="response tokens", y="samples")
    body = [
        _plain(row["stage"], row["finish_reason"], count(row["samples"]), count(row["interrupted"]))
        for row in measures.finish
    ]
    grid = Grid(head=["stage", "finished by", "samples", "interrupted"], rows=body, words=2)
    return Section(plots=[("Length of sampled responses.", plot)], grids=[grid, *_unscorable(measures.unscorable)])


def _unscorable(rows: Rows) -> list[Grid]:
    """Answers that could not be scored, by domain and reason."""
    if not rows:
        return []
    body = [_plain(row["stage"], row["domain"], row["reason"], count(row["samples"])) for row in rows]
    head = ["stage", "domain", "could not be scored because", "samples"]
    caption = (
        "Answers without a reward, left out of their groups. mopd reward JOB --stage NAME --missing scores them again."
    )
    return [Grid(head=head, rows=body, words=3, caption=caption)]


def staleness(measures: Measures) -> Section:
    """Policy versions between sampling and training."""
    if not measures.steps:
        return Section()
    lines = [
        replace(line, name=f"{stage} {what}")
        for stage, rows in grouped(measures.steps, "stage").items() if any(row["staleness_max"] for row in rows)
        for what in ("mean", "max") for line in lines_of(rows, "stage", "step", f"staleness_{what}")
    ]  # fmt: skip
    if not lines:
        text = "No token was older than the policy that trained on it: staleness is 0 versions on every step."
        return Section(text=text)
    alt = "Policy versions between sampling and training by step."
    plot = curves("stale", "Versions between sampling and training.", alt, lines, x="step", y="versions")
    return Section(plots=[plot])


def times(measures: Measures) -> Section:
    """Wall time of every stage, split by action."""
    if not measures.times:
        return Section()
    spent = {(row["stage"], row["action"]): row["seconds"] for row in measures.times}
    order = {action: index for index, action in enumerate(FLOW)}
    actions = sorted({action for _, action in spent}, key=lambda action: (order.get(action, len(order)), action))
    stages = dict.fromkeys(stage for stage, _ in spent)
    rows = {stage: {action: spent.get((stage, action), 0.0) for action in actions} for stage in stages}
    totals = {stage: sum(parts.values()) for stage, parts in rows.items()}
    labels = {stage: duration(total) for stage, total in totals.items()}
    alt = "Wall time by stage: " + ", ".join(f"{stage} {label}" for stage, label in labels.items()) + "."
    plot = bars("time", alt, rows, labels=labels)
    text = f"{duration(sum(totals.values()))} in all."
    return Section(text=text, plots=[("Wall time by stage and action.", plot)])


def cost(measures: Measures) -> Section:
    """Bytes of each fidelity of signal."""
    if not measures.cost:
        return Section()
    body = [
        _plain(row["kind"], row["codec"], count(row["samples"]), count(row["tokens"]), size(row["bytes"]),
               number(row["bytes_per_token"], 1))
        for row in measures.cost
    ]  # fmt: skip
    labels = {f"{row['kind']} {row['codec']}": f"{number(row['bytes_per_token'], 1)} B" for row in measures.cost}
    values = {f"{row['kind']} {row['codec']}": {"bytes": row["bytes_per_token"]} for row in measures.cost}
    alt = "Stored bytes per token by fidelity: " + ", ".join(f"{name} {label}" for name, label in labels.items()) + "."
    plot = bars("cost", alt, values, labels=labels)
    grid = Grid(head=["signal", "codec", "samples", "tokens", "stored", "bytes/token"], rows=body, words=2)
    return Section(plots=[("Stored bytes per token, before file compression.", plot)], grids=[grid])


def facts(measures: Measures) -> Section:
    """The store, snapshot and row counts that the numbers come from."""
    names = sorted(measures.rows, key=lambda name: (list(TABLES).index(name) if name in TABLES else len(TABLES), name))
    body = [_plain(name, count(measures.rows[name]), str(measures.snapshot.versions[name])) for name in names]
    text = f"Every number on this page was read from {measures.uri} at snapshot {measures.snapshot.digest}."
    return Section(text=text, grids=[Grid(head=["table", "rows", "version"], rows=body)])


PARTS: Parts = (
    ("accuracy", "Accuracy by domain and policy", accuracy, "No held-out answers with a reward are recorded."),
    ("learning", "Learning curves", learning, "No policy was evaluated at more than one version."),
    ("divergence", "Reverse KL to the teachers", divergence,
     "No reverse KL over iterations, versions or steps is recorded."),
    ("teachers", "Which teacher suits which domain", suitability, "No teacher has scored a sample."),
    ("samples", "Responses", samples, "No sampled responses are stored."),
    ("staleness", "Staleness", staleness, "No training step is recorded."),
    ("time", "Time per stage", times, "No stage times are recorded."),
    ("cost", "Signal cost", cost, "No teacher signal is stored."),
    ("store", "Store", facts, ""),
)  # fmt: skip


def lines_of(rows: Rows, by: str, x: str, y: str) -> list[Line]:
    """A line for each value of the column `by`: columns x and y of its rows."""
    groups = grouped(rows, by).items()
    return [Line(name=name, x=[row[x] for row in own], y=[row[y] for row in own]) for name, own in groups]


def curves(
    key: str,
    caption: str,
    alt: str,
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    share: bool = False,
    marks: Sequence[Mark] = (),
) -> tuple[str, Plot]:
    """Caption and plot of some lines and of changes of the job, which the alternative text describes by their ends."""
    ends = f"{alt} {_ends(lines, percent if share else number)}"
    told = "".join(f" The job changed at {x} {mark.x:g}: {mark.label}." for mark in marks)
    return caption, line_plot(key, ends + told, lines, x=x, y=y, share=share, marks=marks)


def _ends(lines: Iterable[Line], show: Callable[[float | None], str]) -> str:
    """First and last known value of each line, in words."""
    by_line = [(line.name, [value for value in line.y if value is not None]) for line in lines]
    return "; ".join(f"{name} from {show(y[0])} to {show(y[-1])}" for name, y in by_line if y) + "."


def _over_versions(rows: Rows) -> dict[str, Rows]:
    """Rows by policy, of those that have several versions of their own, beside the one they start from."""
    policies = grouped(rows, "policy")
    return {policy: own for policy, own in policies.items() if len({row["policy_version"] for row in own} - {0}) > 1}


def _plain(*texts: str) -> list[Cell]:
    return [Cell(text=text) for text in texts]
