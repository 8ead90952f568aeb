"""Pictures of the recipes' page, one SVG a recipe: what every stage ended with, from the committed figures alone."""

from __future__ import annotations

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
