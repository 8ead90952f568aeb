"""Contrast of the viewer's colours: text against what it stands on, in the light and the dark scheme."""

from __future__ import annotations

import re

import pytest

from mopd_dataplane.query.show_terminal import STYLES
from mopd_dataplane.view.bundle import ASSETS

TEXT, EDGE = 4.5, 3.0
"""Least contrast of text, and of the edge of a control (WCAG 2.2, AA)."""
STYLE = (ASSETS / "view.css").read_text()


def declared(selector: str) -> dict[str, str]:
    """Colours that the first rule of a selector declares."""
    block = STYLE[STYLE.index(selector) + len(selector) :]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block[: block.index("}")]))


LIGHT = declared(":root {")
SCHEMES = {
    "light": LIGHT,
    "dark by the system": LIGHT | declared('@media (prefers-color-scheme: dark) { :root:not([data-theme="light"]) {'),
    "dark by choice": LIGHT | declared(':root[data-theme="dark"] {'),
}


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio by WCAG.

    Example: contrast("#000000", "#ffffff") == 21.
    """
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_measure_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


def test_both_dark_schemes_are_one() -> None:
    assert SCHEMES["dark by the system"] == SCHEMES["dark by choice"] != LIGHT


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read_on_everything_it_stands_on(scheme: str) -> None:
    colours = SCHEMES[scheme]
    tokens = [name for name in colours if re.fullmatch(r"(dm|d|r|k)\d", name)]
    inks = ["ink", "muted", "accent", "bad", *(name for name in colours if name.startswith(("series-", "pen-")))]
    assert len(tokens) >= 20
    assert len(inks) >= 20
    pairs = [(ink, surface) for ink in inks for surface in ("paper", "panel", "mark")]
    pairs += [("ink", token) for token in tokens] + [("paper", "accent"), ("paper", "bad")]
    weak = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: value for pair, value in weak.items() if value < TEXT} == {}
    assert {side: contrast(colours["edge"], colours[side]) >= EDGE for side in ("paper", "panel")} == {
        "paper": True, "panel": True,
    }  # fmt: skip


def test_no_text_is_faded_below_its_colour() -> None:
    faded = re.findall(r"^([^{}@\n]+) \{[^}]*\bopacity: 0\.\d+", STYLE, re.MULTILINE)
    assert set(faded) <= {"button:disabled", "main[aria-busy]", ".bar .here", ".track-bar i"}, "none of these is text"


def test_a_token_has_the_same_colour_in_the_terminal() -> None:
    of_strength = {-n: LIGHT[f"dm{n}"] for n in range(1, 5)} | {n: LIGHT[f"d{n}"] for n in range(1, 5)}
    assert {n: style.rpartition(" ")[2] for n, style in STYLES.items() if n} == of_strength
    for ink, _, ground in (style.split() for n, style in STYLES.items() if n):
        assert contrast({"black": "#000000", "white": "#ffffff"}[ink], ground) >= TEXT
