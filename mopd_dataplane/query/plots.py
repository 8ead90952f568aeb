"""The plots of a report: inline SVG in one style, with an alternative text and the colours of the page's theme."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd_dataplane.query.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#010101", "#020202", "#030303"
"""Placeholders, which leave as CSS variables."""
SERIES = tuple(f"#0400{index:02x}" for index in range(8))
DASHES = ("-", "--", ":")
MOST_SERIES = len(SERIES) * len(DASHES)
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "text.color": INK, "font.size": 9,
    "axes.labelcolor": MUTED, "axes.edgecolor": GRID, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": MUTED, "xtick.major.size": 0, "ytick.color": MUTED, "ytick.major.size": 0,
    "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.8, "lines.markersize": 4,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A finished plot."""

    svg: str
    """<svg> element, safe to inline."""
    omitted: str = ""
    """Says how many series did not fit; empty when all did."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of a line plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    level: float | None = None
    """A value to hold against the line, drawn as a dashed level of its colour."""
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    """Ends of an interval about each y, drawn as a band; empty: none."""


def line_plot(key: str, alt: str, lines: Sequence[Line], *, x: str, y: str, share: bool = False) -> Plot:
    """Lines over whole-numbered x. share: y is a share, shown in percent. `key` makes ids unique on the page."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes, figure = _axes()
    for index, line in enumerate(lines[:MOST_SERIES]):
        colour, dash = SERIES[index % len(SERIES)], DASHES[index // len(SERIES)]
        marker = "o" if len(line.x) <= 40 else ""
        axes.plot(line.x, _floats(line.y), color=colour, linestyle=dash, marker=marker, label=_name(line.name))
        if line.low:
            axes.fill_between(line.x, _floats(line.low), _floats(line.high), color=colour, alpha=0.18, linewidth=0)
        if line.level is not None:
            axes.axhline(line.level, color=colour, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(0, 1.03)
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(key, alt, figure, axes, len(lines))


def histogram(
    key: str, alt: str, groups: dict[str, list[tuple[float, float]]], *, width: float, x: str, y: str
) -> Plot:
    """Stacked bars: group name -> (bin start, count)."""
    from matplotlib.ticker import MaxNLocator

    axes, figure = _axes()
    base: dict[float, float] = {}
    for index, (name, bins) in enumerate(list(groups.items())[:MOST_SERIES]):
        starts = [start for start, _ in bins]
        bottoms = [base.get(start, 0.0) for start in starts]
        counts = [n for _, n in bins]
        axes.bar(starts, counts, width=width * 0.92, bottom=bottoms, align="edge", **_look(index, name))
        for start, n in bins:
            base[start] = base.get(start, 0.0) + n
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=x, ylabel=y)
    return _finish(key, alt, figure, axes, len(groups))


def bars(key: str, alt: str, rows: dict[str, dict[str, float]], labels: dict[str, str]) -> Plot:
    """Stacked horizontal bars: row name -> part name -> value; `labels` stands at the end of each row."""
    axes, figure = _axes(height=0.75 + 0.36 * len(rows))
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    left = np.zeros(len(rows))
    for index, part in enumerate(parts[:MOST_SERIES]):
        values = [row.get(part, 0.0) for row in rows.values()]
        drawn = axes.barh([_name(row) for row in rows], values, left=left, height=0.62, **_look(index, part))
        left = left + values
    axes.bar_label(drawn, [labels[row] for row in rows], padding=4, color=MUTED)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.set_ticks([])
    axes.set_xlim(right=left.max() * 1.18 or 1)
    axes.tick_params(axis="y", colors=INK)
    return _finish(key, alt, figure, axes, len(parts), legend=len(parts) > 1)


def _look(index: int, name: str) -> dict[str, Any]:
    """Colour, opacity and label of a series of bars."""
    colour, opacity = SERIES[index % len(SERIES)], 1 - 0.3 * (index // len(SERIES))
    return {"color": colour, "alpha": opacity, "label": _name(name)}


def _axes(height: float = 2.9) -> tuple[Axes, Figure]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.8, height), layout="constrained")
        return figure.subplots(), figure


def _floats(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _name(text: str) -> str:
    """A label: one harmless line that does not vanish from the legend by starting with an underscore."""
    label = one_line(text, limit=28)
    return "\u200a" + label if label.startswith("_") else label


def _finish(key: str, alt: str, figure: Figure, axes: Axes, series: int, *, legend: bool = True) -> Plot:
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": key}), warnings.catch_warnings():
        if legend and axes.get_legend_handles_labels()[0]:
            columns = 4 if series > 3 else max(series, 1)
            figure.legend(loc="outside upper left", ncols=columns, handlelength=1.4, columnspacing=1.4)
        warnings.filterwarnings("ignore", "Glyph .* missing")  # text stays text: the browser has the glyph
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    omitted = f"{series - MOST_SERIES} of {series} series do not fit and are left out." if series > MOST_SERIES else ""
    return Plot(svg=_inline(key, alt, buffer.getvalue()), omitted=omitted)


def _inline(key: str, alt: str, document: str) -> str:
    """The <svg> element of a matplotlib document: themed, named, sized by the page, its ids unique on the page."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{key}-\1"', svg)
    svg = re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match.group()], svg)
    head = re.match(r"<svg[^>]*>", svg)
    assert head is not None
    box = re.search(r'viewBox="[^"]+"', head.group())
    assert box is not None
    opening = f'<svg {box.group()} role="img" aria-labelledby="{key}-alt" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return f'{opening}<title id="{key}-alt">{escape(one_line(alt))}</title>{svg[head.end() :]}'


def grouped(rows: Iterable[dict[str, Any]], *keys: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by the joined text of some columns, in order of first appearance."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(" · ".join(str(row[key]) for key in keys), []).append(row)
    return groups
