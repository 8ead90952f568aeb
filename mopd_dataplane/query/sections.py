"""The sections of a report: measures in; sentences, plots and tables out. One without data says so in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

    key: str
    title: str
    text: str = ""
    plots: Plots = field(default_factory=list)
    grids: Sequence[Grid] = ()
    empty: str = ""
    """The one line that stands for a section without data."""
    folded: bool = False
    """Whether its tables are shown on demand only."""


def sections(measures: Measures) -> list[Section]:
    """Every section but the excerpts, in reading order."""
    parts = (accuracy_section, learning, divergence, suitability, samples, staleness, times, cost, facts)
    return [part(measures) for part in parts]


def cards(measures: Measures) -> list[tuple[str, str, str]]:
    """The figures on top: (name, value, remark)."""
    totals = measures.totals[0]
    trained = sum(row["steps"] for row in measures.training)
    shown = [
        ("samples", count(totals["samples"]), f"{count(totals['interrupted'])} interrupted and continued"),
        ("response tokens", count(totals["response_tokens"]), ""),
        ("optimizer steps", count(trained), _plural(len(measures.training), "stage")),
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
    """Domain × policy: accuracy of every policy's newest version, the share of its teachers' lead that a student has
    recovered, and the mean reward."""
    title = "Accuracy by domain and policy"
    rows = measures.accuracy
    if not rows:
        return Section(key="accuracy", title=title, empty="No held-out answers with a reward are recorded.")
    policies = {row["policy"]: row["policy_version"] for row in rows}
    domains = sorted({row["domain"] for row in rows})
    own = {(policy, row["domain"]) for row in measures.routing for teacher, policy in teacher_policies(measures).items()
           if teacher == row["teacher"]}  # fmt: skip
    recovered = recovery(measures)
    head = ["domain", *(f"{policy} v{version}" for policy, version in policies.items())]
    grids = [
        Grid(head=head, rows=_accuracy_rows(measures, domains, policies, recovered, own), caption=_reading(recovered)),
        Grid(head=head, rows=_reward_rows(rows, domains, policies, own), caption=MEAN_REWARD),
    ]
    asked = "tuning prompts, which settings were chosen on" if measures.held_out.split == "tune" else "held-out prompts"
    text = f"Share of {asked} that is answered entirely right, with its 95 % interval; newest version of every policy."
    return Section(key="accuracy", title=title, text=text, grids=grids)


MEAN_REWARD = "Mean reward of the same answers, partial credit included, ± its standard error."


def _accuracy_rows(
    measures: Measures, domains: Sequence[str], policies: Mapping[str, int], recovered: Rows, own: set[tuple[str, str]]
) -> list[list[Cell]]:
    at = {(row["policy"], row["domain"]): row for row in measures.accuracy if row["accuracy"] is not None}
    notes = {(row["policy"], row["domain"]): _recovery_note(row) for row in recovered}
    body = []
    for domain in domains:
        cells = [Cell(text=domain)]
        for policy in policies:
            row, note, marked = at.get((policy, domain)), notes.get((policy, domain), ""), (policy, domain) in own
            cells.append(Cell(text=_share(row), heat=row["accuracy"], note=note, marked=marked) if row else NOTHING)
        body.append(cells)
    means = [Cell(text="mean")]
    for policy, version in policies.items():
        right = measures.held_out.policies[policy, version].correct
        if not right:
            means.append(NOTHING)
            continue
        found = mean_share(right)
        text = _share({"accuracy": found.value, "low": found.low, "high": found.high})
        means.append(Cell(text=text, heat=found.value, note=notes.get((policy, "mean"), "")))
    return [*body, means] if len(domains) > 1 else body


def _reward_rows(
    rows: Rows, domains: Sequence[str], policies: Iterable[str], own: set[tuple[str, str]]
) -> list[list[Cell]]:
    at = {(row["policy"], row["domain"]): row for row in rows if row["reward"] is not None}
    body = []
    for domain in domains:
        found = [(policy, at.get((policy, domain))) for policy in policies]
        cells = [
            Cell(text=f"{row['reward']:.3f} ± {row['reward_error']:.3f}", marked=(policy, domain) in own)
            if row else NOTHING for policy, row in found
        ]  # fmt: skip
        body.append([Cell(text=domain), *cells])
    return body


def _share(row: dict[str, Any]) -> str:
    """Share and interval in percent."""
    return f"{percent(row['accuracy'])} ({100 * row['low']:.0f}–{100 * row['high']:.0f})"


def _recovery_note(row: dict[str, Any]) -> str:
    return "recovered –" if row["recovery"] is None else f"recovered {percent(row['recovery'])} ({_span(row)})"


def _span(row: dict[str, Any]) -> str:
    return f"{100 * row['low']:.0f} to {100 * row['high']:.0f} %"


def _reading(recovered: Rows) -> str:
    """Explanation of the table, and a warning for every figure that could not be given."""
    parts = ["In bold: the domain's teacher."]
    if recovered:
        parts.append("Recovered: (student − start) / (teacher − start), with its 95 % interval.")
    missing: dict[tuple[str, str], list[str]] = {}
    for row in recovered:
        if row["warning"]:
            missing.setdefault((row["policy"], row["warning"]), []).append(row["domain"])
    parts += [f"{policy}, {', '.join(domains)}: – because {why}." for (policy, why), domains in missing.items()]
    return " ".join(parts)


def comparison_grid(comparison: Comparison) -> Grid:
    """A comparison of two policies as a table."""
    head = ["domain", "prompts", "A", "B", "B − A, points", "only A · only B", "McNemar p", "mean reward, B − A", ""]
    body = []
    for row in comparison.rows:
        found, paid = row.accuracy, row.reward
        cells = [row.domain, count(row.prompts)]
        cells += [_share({"accuracy": e.value, "low": e.low, "high": e.high}) if e else "–" for e in (row.a, row.b)]
        cells += [_points(found), f"{found.only_a} · {found.only_b}", f"{found.p:.2g}"] if found else ["–", "–", "–"]
        cells += [f"{paid.value:+.3f} ({paid.low:+.3f} to {paid.high:+.3f})" if paid else "–", row.verdict]
        body.append(_plain(*cells))
    caption = (
        f"{'Tuning' if comparison.split == 'tune' else 'Held-out'} prompts, paired; 95 % intervals, of differences by "
        "bootstrap over prompts. A difference is found where its interval leaves 0 out and McNemar's p is at most 0.05."
    )
    if comparison.left_out:
        caption += f" Left out: {count(comparison.left_out)} answers to prompts that the two do not share."
    return Grid(head=head, rows=body, caption=caption)


def _points(found: Difference) -> str:
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def learning(measures: Measures) -> Section:
    """Accuracy per domain over policy versions."""
    title = "Learning curves"
    plots: Plots = []
    theirs = {(r["policy"], r["domain"]): r["teacher_accuracy"] for r in recovery(measures)}
    known = [row for row in measures.accuracy_by_version if row["accuracy"] is not None]
    for policy, rows in grouped(known, "policy").items():
        if not _is_curve(rows):
            continue
        lines = [
            _line(domain, part, "policy_version", "accuracy", level=theirs.get((policy, domain)))
            for domain, part in grouped(rows, "domain").items()
        ]
        alt = f"Held-out accuracy of {policy} by version. {ends(lines, percent)}"
        dashed = " Dashed: the domain's teacher." if any(line.level is not None for line in lines) else ""
        plot = line_plot(f"acc{len(plots)}", alt, lines, x="policy version", y="held-out accuracy", share=True)
        plots.append((f"{policy}: held-out accuracy.{dashed}", plot))
    empty = "" if plots else "No policy was evaluated at more than one version."
    return Section(key="learning", title=title, plots=plots, empty=empty)


def divergence(measures: Measures) -> Section:
    """Reverse KL: per teacher over iterations, per stage over steps, held out over versions."""
    plots: Plots = []
    for run, rows in grouped(measures.teacher_kl, "stage").items():
        lines = [_line(t, part, "iteration", "reverse_kl") for t, part in grouped(rows, "teacher").items()]
        if max(len(line.x) for line in lines) > 1:
            alt = f"Reverse KL of {run} to each teacher by iteration. {ends(lines)}"
            plot = line_plot(f"kl{len(plots)}", alt, lines, x="iteration", y="nat per token")
            plots.append((f"{run}: reverse KL to each teacher on its own rollouts.", plot))
    for policy, rows in grouped(measures.heldout_kl, "policy").items():
        if not _is_curve(rows):
            continue
        lines = [_line(d, part, "policy_version", "reverse_kl") for d, part in grouped(rows, "domain").items()]
        alt = f"Held-out reverse KL of {policy} by version. {ends(lines)}"
        plot = line_plot(f"kl{len(plots)}", alt, lines, x="policy version", y="nat per token")
        plots.append((f"{policy}: reverse KL to the routed teacher on held-out prompts.", plot))
    stages = grouped([row for row in measures.steps if row["reverse_kl"] is not None], "stage")
    if stages:
        lines = [_line(stage, rows, "step", "reverse_kl") for stage, rows in stages.items()]
        alt = f"Reverse KL of the training batches by step. {ends(lines)}"
        plots.append(
            ("Reverse KL of the training batches.", line_plot("klstep", alt, lines, x="step", y="nat per token"))
        )
    empty = "" if plots else "No reverse KL over iterations, versions or steps is recorded."
    return Section(key="divergence", title="Reverse KL to the teachers", plots=plots, empty=empty)


def suitability(measures: Measures) -> Section:
    """Teachers by domain: mean reverse KL where several teachers scored the same domain."""
    title = "Which teacher suits which domain"
    rows = measures.suitability
    if not rows:
        return Section(key="teachers", title=title, empty="No teacher has scored a sample.")
    teachers = sorted({row["teacher"] for row in rows})
    at = {(row["domain"], row["teacher"]): row for row in rows}
    most = max(row["reverse_kl"] for row in rows) or 1.0
    body = []
    for domain in sorted({row["domain"] for row in rows}):
        scored = [row["reverse_kl"] for row in rows if row["domain"] == domain]
        best, rivals = min(scored), len(scored)
        cells = [Cell(text=domain)]
        for teacher in teachers:
            row = at.get((domain, teacher))
            heat = max(0.0, row["reverse_kl"] / most) if row else None
            note = f"{count(row['samples'])} samples" if row else ""
            text = number(row["reverse_kl"]) if row else "–"
            marked = row is not None and rivals > 1 and row["reverse_kl"] == best
            cells.append(Cell(text=text, heat=heat, note=note, marked=marked))
        body.append(cells)
    text = "Mean reverse KL in nat per token over all scored samples. Outlined: the closest of several teachers."
    grids = [Grid(head=["domain", *teachers], rows=body), *_rounding(measures.rounding)]
    return Section(key="teachers", title=title, text=text, grids=grids)


def _rounding(rows: Rows) -> list[Grid]:
    """Effect of quantisation on each quantised teacher."""
    if not rows:
        return []
    head = ["teacher", "weights", "KL, nat per token", "mean log-prob difference", "same first choice"]
    body = [
        [
            Cell(text=row["teacher"]),
            Cell(text=row["quantisation"]),
            Cell(text=number(row["kl"]), note=f"{count(row['tokens'])} tokens"),
            Cell(text=number(row["logprob_gap"])),
            Cell(text=percent(row["top1_agreement"])),
        ]
        for row in rows
    ]
    return [Grid(head=head, rows=body, caption="Teachers with quantised weights, against the same ones as stored.")]


def samples(measures: Measures) -> Section:
    """Response lengths, and how generations ended."""
    title = "Responses"
    if not measures.lengths:
        return Section(key="samples", title=title, empty="No sampled responses are stored.")
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
    return Section(key="samples", title=title, plots=[("Length of sampled responses.", plot)], grids=[grid])


def staleness(measures: Measures) -> Section:
    """Policy versions between sampling and training."""
    title = "Staleness"
    if not measures.steps:
        return Section(key="staleness", title=title, empty="No training step is recorded.")
    stale = [stage for stage, rows in grouped(measures.steps, "stage").items() if any(r["staleness_max"] for r in rows)]
    if not stale:
        text = "No token was older than the policy that trained on it: staleness is 0 versions on every step."
        return Section(key="staleness", title=title, text=text)
    lines = []
    for stage, rows in grouped(measures.steps, "stage").items():
        if stage in stale:
            lines += [
                _line(f"{stage} mean", rows, "step", "staleness_mean"),
                _line(f"{stage} max", rows, "step", "staleness_max"),
            ]
    alt = f"Policy versions between sampling and training by step. {ends(lines)}"
    plot = line_plot("stale", alt, lines, x="step", y="versions")
    return Section(key="staleness", title=title, plots=[("Versions between sampling and training.", plot)])


def times(measures: Measures) -> Section:
    """Wall time of every stage, split by action."""
    if not measures.times:
        return Section(key="time", title="Time per stage", empty="No stage times are recorded.")
    spent = {(row["stage"], row["action"]): row["seconds"] for row in measures.times}
    order = {action: place for place, action in enumerate(FLOW)}
    actions = sorted({action for _, action in spent}, key=lambda action: (order.get(action, len(order)), action))
    stages = dict.fromkeys(stage for stage, _ in spent)
    rows = {stage: {action: spent.get((stage, action), 0.0) for action in actions} for stage in stages}
    totals = {stage: sum(parts.values()) for stage, parts in rows.items()}
    labels = {stage: duration(total) for stage, total in totals.items()}
    alt = "Wall time by stage: " + ", ".join(f"{stage} {label}" for stage, label in labels.items()) + "."
    plot = bars("time", alt, rows, x="", labels=labels)
    text = f"{duration(sum(totals.values()))} in all."
    return Section(key="time", title="Time per stage", text=text, plots=[("Wall time by stage and action.", plot)])


def cost(measures: Measures) -> Section:
    """Bytes of each fidelity of signal."""
    title = "Signal cost"
    if not measures.cost:
        return Section(key="cost", title=title, empty="No teacher signal is stored.")
    body = [
        _plain(row["kind"], row["codec"], count(row["samples"]), count(row["tokens"]), size(row["bytes"]),
               number(row["bytes_per_token"], 1))
        for row in measures.cost
    ]  # fmt: skip
    labels = {f"{row['kind']} {row['codec']}": f"{number(row['bytes_per_token'], 1)} B" for row in measures.cost}
    values = {f"{row['kind']} {row['codec']}": {"bytes": row["bytes_per_token"]} for row in measures.cost}
    alt = "Stored bytes per token by fidelity: " + ", ".join(f"{name} {label}" for name, label in labels.items()) + "."
    plot = bars("cost", alt, values, x="", labels=labels)
    grid = Grid(head=["signal", "codec", "samples", "tokens", "stored", "bytes/token"], rows=body, words=2)
    return Section(
        key="cost", title=title, plots=[("Stored bytes per token, before file compression.", plot)], grids=[grid]
    )


def facts(measures: Measures) -> Section:
    """The store, snapshot and row counts that the numbers come from."""
    names = sorted(measures.rows, key=lambda name: (list(TABLES).index(name) if name in TABLES else len(TABLES), name))
    body = [_plain(name, count(measures.rows[name]), str(measures.snapshot.versions[name])) for name in names]
    text = f"Every number on this page was read from {measures.uri} at snapshot {measures.snapshot.digest}."
    return Section(key="store", title="Store", text=text, grids=[Grid(head=["table", "rows", "version"], rows=body)])


def _line(name: str, rows: Rows, x: str, y: str, *, level: float | None = None) -> Line:
    return Line(name=name, x=[row[x] for row in rows], y=[row[y] for row in rows], level=level)


def ends(lines: Iterable[Line], show: Callable[[float | None], str] = number) -> str:
    """First and last known value of each line, in words."""
    known = [(line.name, [value for value in line.y if value is not None]) for line in lines]
    return "; ".join(f"{name} from {show(y[0])} to {show(y[-1])}" for name, y in known if y) + "."


def _is_curve(rows: Rows) -> bool:
    """Whether a policy has several versions of its own, beside the one it starts from."""
    return len({row["policy_version"] for row in rows} - {0}) > 1


def _plain(*texts: str) -> list[Cell]:
    return [Cell(text=text) for text in texts]


def _plural(number: int, thing: str) -> str:
    return f"{count(number)} {thing}" + ("" if number == 1 else "s")
