"""Messages that name a next step. Whoever tries a step says so with `advises`; see tests/unit/advice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def advises(words: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The block ends with an error whose message has these words, which name a next step. The test goes on to take the
    step.

    words: a part of the message that no other message has, as it stands in the source.
    """
    with pytest.raises(Exception, match=re.escape(words)) as refused:
        yield refused


def assert_advised(words: str, text: str) -> None:
    """What a command printed has these words, which name a next step; the test goes on to take it. words: see
    `advises`."""
    assert words in " ".join(text.split())
