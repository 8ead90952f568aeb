"""What README.md says under a picture is what the picture shows: its text was saved when the picture was taken."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = "docs/images/red-pen.png"


def caption_of(picture: str) -> str:
    """The paragraph under a picture."""
    text = (ROOT / "README.md").read_text()
    return re.split(r"\n\n", text[text.index(f"({picture})") :])[1]


def test_the_caption_of_the_red_pen_is_true_of_its_picture() -> None:
    answers = json.loads((ROOT / PICTURE).with_suffix(".json").read_text())
    caption = " ".join(caption_of(PICTURE).split())
    [answer] = [one for one in answers if one["text"].startswith("date")]
    prompt, *written = re.findall(r"`([^`]+)`", caption)
    assert prompt in answer["text"]
    *own, teachers = written
    shares = re.findall(r"(\d+\.\d %)", caption)
    expected = [
        f"the student wrote {token}, date would write {teachers}, with {share}"
        for token, share in zip(own, shares, strict=True)
    ]
    assert [correction.partition(";")[0] for correction in answer["corrections"]] == expected
    assert len(answers) == 3, "three teachers are in the picture"
