"""Text of models is harmless on a terminal and in a page, whichever way it is decided that it was already."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from mopd_dataplane.query.text import visible

STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")


@pytest.mark.slow
def test_of_all_characters_those_that_steer_are_shown_and_no_others() -> None:
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        steers = unicodedata.category(character) in STEERING and character not in "\n\t"
        shown = visible(character)
        assert (shown != character) == steers, hex(code)
        assert steers <= shown.isprintable(), hex(code)
        assert visible(f"é{character}x") == f"é{shown}x", hex(code)
