"""Prompts of the job: questions about things, and about countries, which its base answers as it did before."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

Rows = Iterator[dict[str, Any]]
COUNTRIES = tuple(import_module("mopd_dataplane.recipes.smollm2-mopd.tasks").CAPITALS)
THINGS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "guitar", "hammer", "island", "jacket", "kettle",
    "lemon", "mirror", "needle", "ocean", "pencil", "quilt", "river", "saddle", "tiger", "umbrella", "violin",
    "window", "yacht", "anchor", "basket", "camel", "drum", "eagle", "feather", "garden", "horse", "iron", "jungle",
    "kite", "ladder", "magnet", "nest", "onion", "piano", "rabbit", "ship", "telescope", "volcano", "whale",
    "bicycle", "clock", "dolphin", "elephant", "furnace", "glacier", "hospital", "insect", "jewel", "library",
    "market", "novel", "oven", "planet", "radio", "school", "train", "valley", "wheel",
)  # fmt: skip
FORMS = (
    "What is a {}?", "Where would you find a {}?", "Name one thing that a {} is good for.",
    "Write a short sentence with the word {}.", "What colour may a {} have?", "Is a {} larger than a house?",
    "Which word rhymes with {}?", "Describe a {} to a child.", "What is a {} made of?", "How heavy is a {}?",
    "Is a {} alive?", "Who uses a {}?", "What sound does a {} make?", "How old can a {} be?",
    "Which shop sells a {}?", "What goes well with a {}?",
)  # fmt: skip
ABOUT_COUNTRIES = (
    "Which continent is {} in?", "Which language is spoken in {}?", "What is the currency of {}?",
    "Name a neighbour of {}.", "What is the climate of {}?", "What do people eat in {}?", "Name a river in {}.",
    "What is the flag of {}?",
)  # fmt: skip


def general(seed: int, size: int) -> Rows:
    """Questions about things, each at most once; `size` of them, or all 1,024."""
    return _asked(FORMS, THINGS, seed, size)


def countries(seed: int, size: int) -> Rows:
    """Questions about countries, not about their capitals, each at most once; `size` of them, or all 1,144."""
    return _asked(ABOUT_COUNTRIES, COUNTRIES, seed, size)


def any_answer(question: str, response: str) -> bool:
    """Every answer is right: the base's distribution is all that is taught."""
    return True


def _asked(forms: Iterable[str], names: Iterable[str], seed: int, size: int) -> Rows:
    every = [form.format(name) for name in names for form in forms]
    random.Random(seed).shuffle(every)
    for question in every[:size]:
        yield {"text": question, "answer": ""}
