"""Prompts of every iteration: distinct inside it, each once an epoch, the same for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from advice import advises
from hypothesis import given
from hypothesis import strategies as st

from mopd_dataplane.errors import PromptError
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.iteration import iteration_prompts

ORDER = [[3, 0, 6], [2, 1, 4], [5, 4, 3], [1, 5, 0], [2, 6, 1]]


def prompts(total: int) -> list[Prompt]:
    return [Prompt(prompt_id=str(i), domain="domain", text=f"question {i}") for i in range(total)]


def prompt_numbers(total: int, count: int, iteration: int, seed: int = 0) -> list[int]:
    chosen = iteration_prompts(prompts(total), count=count, iteration=iteration, seed=seed, stage="student")
    return [int(prompt.prompt_id) for prompt in chosen]


@given(total=st.integers(1, 40), share=st.floats(0.01, 1), iterations=st.integers(1, 12), seed=st.integers(0, 9))
def test_distinct_in_an_iteration_and_once_an_epoch(total: int, share: float, iterations: int, seed: int) -> None:
    count = max(1, int(share * total))
    stream: list[int] = []
    for iteration in range(iterations):
        chosen = prompt_numbers(total, count, iteration, seed)
        assert len(set(chosen)) == len(chosen) == count
        stream += chosen
    for epoch in range(len(stream) // total):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))
    assert max(Counter(stream[len(stream) // total * total :]).values(), default=0) <= 1


def test_all_of_them_in_a_new_order_each_iteration() -> None:
    first, second = prompt_numbers(20, 0, 0), prompt_numbers(20, 0, 1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_the_order_is_fixed_for_ever() -> None:
    """Changing it would give a store that is continued by a newer version other samples than it began with."""
    assert [prompt_numbers(7, 3, iteration) for iteration in range(5)] == ORDER


def test_too_few_prompts_are_refused_with_what_to_do() -> None:
    with advises("raise domains.*.train, or sample each prompt several times with rollout.group_size"):
        prompt_numbers(8, 9, 0)
    assert len(prompt_numbers(9, 9, 0)) == 9
    assert len(prompt_numbers(8, 8, 0)) == 8
    with pytest.raises(PromptError, match="no training prompts"):
        prompt_numbers(0, 0, 0)
