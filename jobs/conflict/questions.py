"""Prompts of the job, drawn from a seed: two tasks whose questions differ in one word and whose answers are opposite,
and capitals, on which only the base is trained.

Each function is a prompt source (`mopd_dataplane/prompts.py`): rows with the messages that the model reads and the one
answer that is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

Rows = Iterator[dict[str, Any]]
CAPITALS: dict[str, str] = import_module("mopd_dataplane.recipes.smollm2-mopd.tasks").CAPITALS
"""Of the other job of this model, whose name no import statement can say."""
SYSTEM = {"role": "system", "content": "Answer with one word or number."}


def larger(seed: int, size: int) -> Rows:
    """The larger of two numbers of three digits."""
    return _pairs("larger", max, seed, size)


def smaller(seed: int, size: int) -> Rows:
    """The smaller of two numbers of three digits."""
    return _pairs("smaller", min, seed, size)


def capitals(seed: int, size: int) -> Rows:
    """The capital of a country, every country once."""
    countries = sorted(CAPITALS)
    random.Random(seed).shuffle(countries)
    for country in countries[:size]:
        yield _row(f"What is the capital of {country}?", CAPITALS[country])


def _pairs(word: str, wanted: Callable[[int, int], int], seed: int, size: int) -> Rows:
    draw = random.Random(seed)
    for _ in range(size):
        first, second = draw.sample(range(100, 1000), 2)
        yield _row(f"What is {word}, {first} or {second}?", str(wanted(first, second)))


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [SYSTEM, {"role": "user", "content": question}], "answer": answer}
