"""Prompts of the job, drawn from a seed: two numbers of three digits, to be added."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def sums(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """A question and the sum that is right, which has three digits or four."""
    draw = random.Random(seed)
    for _ in range(size):
        first, second = draw.randint(100, 999), draw.randint(100, 999)
        yield {"text": f"What is {first} + {second}?", "answer": str(first + second)}
