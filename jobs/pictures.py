"""Pictures of the pages, as SVG, from the committed figures alone: what every stage ended with, what tokens bought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, ROW, LEFT, RIGHT = 640, 24, 150, 60
TOP, BOTTOM = 30, 14
INK, GRID, BAR, DOT = "#444", "#ccc", "#9ecae1", "#08519c"


def stages_picture(title: str, stages: dict[str, list[float]], measure: str) -> str:
    """An SVG with a bar for each stage, as long as the mean over seeds, and a dot for each seed.

    stages: {stage: [a share from 0 to 1 for each seed]}. measure: what the shares are, said in the picture.
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
    for place, (stage, values) in enumerate(stages.items()):
        middle = TOP + ROW * place + ROW / 2
        mean = sum(values) / len(values)
        lines += [
            f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(stage)}</text>',
            f'<rect x="{LEFT}" y="{middle - 7:.1f}" width="{span * mean:.1f}" height="14" fill="{BAR}"/>',
            *(f'<circle cx="{LEFT + span * value:.1f}" cy="{middle:.1f}" r="3" fill="{DOT}"/>' for value in values),
            f'<text x="{WIDTH - RIGHT + 8}" y="{middle + 4:.1f}">{mean:.3f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


HIGH, SIDE, NAMES = 380, 60, 160
LINE = 13
"""Least distance between two names at the right edge."""
COLOURS = ("#08519c", "#b35806", "#1b7837", "#762a83", "#7f7f7f", "#c51b7d", "#01665e", "#543005")
Curve = Sequence[tuple[float, float]]
"""(tokens, share) from left to right."""


def curves_picture(title: str, curves: Mapping[str, Curve], *, across: str, upward: str) -> str:
    """An SVG with a line for each curve, or a dot for one of a single point, named at the right edge.

    across, upward: what the axes say. Shares are from 0 to 1.
    """
    most = max(tokens for curve in curves.values() for tokens, _ in curve)
    wide, tall = WIDTH - SIDE - NAMES, HIGH - TOP - 40

    def place(tokens: float, share: float) -> tuple[float, float]:
        return SIDE + wide * tokens / most, TOP + tall * (1 - share)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HIGH}" font-family="sans-serif" '
        f'font-size="11" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HIGH}" fill="#fff"/>',
        f'<text x="{SIDE}" y="16" font-size="12">{escape(upward)}</text>',
        f'<text x="{SIDE + wide / 2:.1f}" y="{HIGH - 6}" text-anchor="middle" font-size="12">{escape(across)}</text>',
    ]
    for fifth in range(6):
        y = place(0, fifth / 5)[1]
        lines.append(f'<path d="M{SIDE} {y:.1f}H{SIDE + wide}" stroke="{GRID}"/>')
        lines.append(f'<text x="{SIDE - 6}" y="{y + 4:.1f}" text-anchor="end">{20 * fifth} %</text>')
    for tokens in range(0, int(most) + 1, 10_000):
        x = place(tokens, 0)[0]
        lines.append(f'<text x="{x:.1f}" y="{TOP + tall + 16}" text-anchor="middle">{tokens:,}</text>')
    ends = sorted((place(*curve[-1])[1], name) for name, curve in curves.items())
    heights: dict[str, float] = {}
    free: float = TOP - LINE
    for y, name in ends:
        free = heights[name] = max(y, free + LINE)
    for number, (name, curve) in enumerate(curves.items()):
        colour, spots = COLOURS[number % len(COLOURS)], [place(*point) for point in curve]
        dash = ' stroke-dasharray="5 3"' if number >= len(COLOURS) else ""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        lines += [
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots),
            f'<path d="M{spots[-1][0] + 4:.1f} {spots[-1][1]:.1f}L{SIDE + wide + 22} {heights[name]:.1f}" '
            f'stroke="{colour}" stroke-width="0.5"/>',
            f'<text x="{SIDE + wide + 26}" y="{heights[name] + 4:.1f}" fill="{colour}">{escape(name)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
