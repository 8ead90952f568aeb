"""Prompts of the job: general questions, which its base answers as it did before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

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
    "Which word rhymes with {}?", "Describe a {} to a child.",
)  # fmt: skip


def general(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Questions about things, each at most once; `size` of them, or all 512."""
    every = [form.format(thing) for thing in THINGS for form in FORMS]
    random.Random(seed).shuffle(every)
    for question in every[:size]:
        yield {"text": question, "answer": ""}


def any_answer(question: str, response: str) -> bool:
    """Every answer is right: the base's distribution is all that is taught."""
    return True
