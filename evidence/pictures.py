"""Pictures of the pages as SVG: accuracy at the end of every stage, accuracy against answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

WIDTH, ROW, LEFT, RIGHT = 640, 24, 150, 60
TOP, BOTTOM = 30, 14
INK, GRID, BAR, DOT = "#444", "#ccc", "#9ecae1", "#08519c"


def stages_picture(title: str, stages: dict[str, list[float]], measure: str) -> str:
    """An SVG with a bar for each stage, as long as the mean over seeds, and a dot for each seed.

    stages: {stage: [a share from 0 to 1 for each seed]}. measure: name of the shares, printed in the picture.
    """
    height = TOP + ROW * len(stages) + BOTTOM
    span = WIDTH - LEFT - RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f"<title>{escape(f'{title}: {measure} at the end of every stage')}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="14">{escape(measure)}, mean over domains; a dot is one seed</text>',
    ]
    for tenth in range(0, 11, 5):
        x = LEFT + span * tenth / 10
        lines.append(f'<path d="M{x:.1f} {TOP - 8}V{height - BOTTOM}" stroke="{GRID}"/>')
        lines.append(f'<text x="{x:.1f}" y="{height - 3}" font-size="10" text-anchor="middle">{tenth / 10:g}</text>')
    for row, (stage, values) in enumerate(stages.items()):
        middle = TOP + ROW * row + ROW / 2
        mean = sum(values) / len(values)
        lines += [
            f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(stage)}</text>',
            f'<rect x="{LEFT}" y="{middle - 7:.1f}" width="{span * mean:.1f}" height="14" fill="{BAR}"/>',
            *(f'<circle cx="{LEFT + span * value:.1f}" cy="{middle:.1f}" r="3" fill="{DOT}"/>' for value in values),
            f'<text x="{WIDTH - RIGHT + 8}" y="{middle + 4:.1f}">{mean:.3f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


HEIGHT, SIDE, NAMES = 420, 60, 175
LINE = 13
"""Smallest distance between two names at the right edge."""
COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
    "#0b3c6f", "#a65200", "#145214", "#6b1414",
)  # fmt: skip
Curve = Sequence[tuple[float, float]]
"""(answers, share) from left to right."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot of a picture: shares against the number of answers."""

    title: str
    curves: Mapping[str, Curve]
    """Name -> curve; of one point a dot."""
    levels: Mapping[str, float]
    """Name -> share of what learns from no answers: a dashed line across the panel."""
    ticks: Sequence[int]
    """Labelled numbers of answers; the first and the last are the panel's edges."""
    logarithmic: bool = False
    width: int

    def x(self, answers: float) -> float:
        """Horizontal position in the panel."""
        scale: Callable[[float], float] = math.log if self.logarithmic else float
        first, last = scale(self.ticks[0]), scale(self.ticks[-1])
        return SIDE + (self.width - SIDE - NAMES) * (scale(answers) - first) / (last - first)


def panels_picture(title: str, panels: Sequence[Panel], *, across: str, upward: str) -> str:
    """An SVG of panels side by side. across, upward: titles of the axes. Shares are from 0 to 1."""
    width = sum(panel.width for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="12" y="16" font-size="12">{escape(upward)}</text>',
    ]
    names = dict.fromkeys(_arm(name) for panel in panels for name in (*panel.curves, *panel.levels))
    colours = dict(zip(names, cycle(COLOURS), strict=False))
    left = 0
    for panel in panels:
        lines += [f'<g transform="translate({left})">', *_panel(panel, across, colours), "</g>"]
        left += panel.width
    return "\n".join([*lines, "</svg>", ""])


def _arm(name: str) -> str:
    """Arm of a curve, which has one colour in all panels: `mopd-exact` of `mopd-exact, quickstart`."""
    return name.partition(",")[0]


def _panel(panel: Panel, across: str, colours: Mapping[str, str]) -> Iterator[str]:
    top, bottom, right = 52, HEIGHT - 40, panel.width - NAMES

    def y(share: float) -> float:
        return top + (bottom - top) * (1 - share)

    middle = (SIDE + right) / 2
    yield f'<text x="{SIDE}" y="38" font-size="12" font-weight="bold">{escape(panel.title)}</text>'
    yield f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle" font-size="12">{escape(across)}</text>'
    for fifth in range(6):
        yield f'<path d="M{SIDE} {y(fifth / 5):.1f}H{right}" stroke="{GRID}"/>'
        yield f'<text x="{SIDE - 6}" y="{y(fifth / 5) + 4:.1f}" text-anchor="end">{20 * fifth} %</text>'
    for tick in panel.ticks:
        yield f'<text x="{panel.x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,}</text>'
    levels = {name: [(panel.ticks[0], share), (panel.ticks[-1], share)] for name, share in panel.levels.items()}
    curves: dict[str, Curve] = {**panel.curves, **levels}
    name_heights = _spread({name: y(curve[-1][1]) for name, curve in curves.items()}, first=top)
    for name, curve in curves.items():
        colour = colours[_arm(name)]
        dash = ' stroke-dasharray="2 4"' if name in levels else ""
        positions = [(panel.x(answers), y(share)) for answers, share in curve]
        path = "L".join(f"{x:.1f} {height:.1f}" for x, height in positions)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        if name not in levels:
            yield from (f'<circle cx="{x:.1f}" cy="{h:.1f}" r="3" fill="{colour}"/>' for x, h in positions)
        x, height = positions[-1]
        yield (
            f'<path d="M{x + 4:.1f} {height:.1f}L{right + 12} {name_heights[name]:.1f}" '
            f'stroke="{colour}" stroke-width="0.5"/>'
        )
        yield f'<text x="{right + 15}" y="{name_heights[name] + 4:.1f}" fill="{colour}">{escape(name)}</text>'


def _spread(heights: Mapping[str, float], *, first: float) -> dict[str, float]:
    """Move names down until none overlaps the one above."""
    spread: dict[str, float] = {}
    free = first
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        spread[name] = max(height, free)
        free = spread[name] + LINE
    return spread
