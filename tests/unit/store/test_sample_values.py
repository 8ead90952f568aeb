"""Values that no sample can have are refused before any cast, and a uid names one content for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from store_builders import sample

from mopd_dataplane.errors import EngineError, MismatchError, MopdError
from mopd_dataplane.records import Sample
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import check_sample
from mopd_dataplane.store.format.repetition import repetition
from mopd_dataplane.store.format.sample_values import whole_numbers

GOOD = sample(0, response=4)
BAD: list[tuple[str, Any, str]] = [
    ("tokens", np.array([1, -1, 2, 3, 4, 5, 6, 7, 8]), "tokens holds -1 at place 1; allowed: 0 to 2147483647"),
    ("tokens", np.array([1, 1 << 40, 2, 3, 4, 5, 6, 7, 8]), "tokens holds 1099511627776"),
    ("tokens", np.array([1.5] * 9), "tokens holds float64 values"),
    ("tokens", np.array(["a"] * 9), "whole numbers are needed"),
    ("loss_mask", np.array([1, 7, 0, 1]), "loss_mask holds 7 at place 1; allowed: 0 to 1"),
    ("loss_mask", np.array([1, 257, 0, 1]), "loss_mask holds 257"),
    ("loss_mask", np.array([1.0, 0.5, 0.0, 1.0]), "loss_mask holds float64"),
    ("versions", np.array([1 << 40]), "versions holds 1099511627776"),
    ("logprobs", np.array([-1e300, -1, -1, -1]), "log-prob -1e\\+300 at response position 0"),
    ("logprobs", np.array([-1, 0.5, -1, -1]), "log-prob 0.5 at response position 1"),
    ("logprobs", np.array([-1, np.nan, -1, -1]), "log-prob nan"),
    ("logprobs", np.array([-1, -np.inf, -1, -1]), "log-prob -inf"),
    ("temperature", float("nan"), "temperature is nan"),
    ("temperature", -0.5, "temperature is -0.5; allowed: finite numbers, at least 0"),
    ("temperature", "warm", "temperature is 'warm'"),
    ("top_p", 7.0, "top_p is 7.0; allowed: finite numbers, 0 to 1"),
    ("top_p", float("nan"), "top_p is nan"),
    ("top_k", -5, "top_k is -5; allowed: whole numbers, 0 to"),
    ("top_k", 1 << 40, "top_k is 1099511627776"),
    ("top_k", 2.5, "top_k is 2.5"),
    ("iteration", 1 << 40, "iteration is"),
    ("writer_seq", 1 << 70, "writer_seq is"),
    ("group_index", -1, "group_index is -1"),
    ("turns", True, "turns is True"),
    ("tokens", [1, 2, 3, 4, 5, 6, 7, 8, 9], "tokens is \\[1, 2.*; a numpy array is needed"),
    ("loss_mask", None, "loss_mask is None; a numpy array is needed"),
    ("experts", [1], "experts is \\[1\\]; a numpy array is needed"),
    ("uid", None, "uid is None; a text is needed"),
    ("finish_reason", None, "finish_reason is None; a text is needed"),
    ("domain", 7, "domain is 7; a text is needed"),
    ("prompt_id", "\ud800", "prompt_id is '.ud800'.*surrogates not allowed"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD, ids=[f"{n}-{f}" for n, (f, _, _) in enumerate(BAD)])
def test_impossible_values_are_named_and_nothing_is_written(store: Store, field: str, value: Any, message: str) -> None:
    with pytest.raises(MopdError, match=message) as refused:
        store.commit_samples([sample(1), sample(0, response=4, **{field: value})])
    assert isinstance(refused.value, EngineError if field == "logprobs" else MismatchError)
    assert store.samples().num_rows == store.table("tokens").num_rows == 0


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_whole_numbers_of_any_width_are_taken(kind: type) -> None:
    check_sample(sample(0, tokens=np.arange(25).astype(kind), loss_mask=np.ones(20, bool)))


def _other(number: int) -> Sample:
    same = sample(number)
    return sample(number, tokens=same.tokens[::-1].copy())


def test_the_same_uid_with_other_tokens_is_refused_and_nothing_is_written(store: Store) -> None:
    store.commit_samples([sample(0)])
    with pytest.raises(MismatchError, match=f"sample {sample(0).uid} is in the store.* with other tokens"):
        store.commit_samples([sample(1), _other(0)])
    with pytest.raises(MismatchError, match="or in this batch"):
        store.commit_samples([sample(2), _other(2)])
    assert store.samples(["uid"])["uid"].to_pylist() == [sample(0).uid]
    assert store.table("tokens").num_rows == 1


def test_of_two_in_a_rollout_the_first_stands_and_the_second_is_named(store: Store) -> None:
    store.commit_samples([sample(0)])
    receipt = store.commit_samples([sample(1), _other(0)], keep_first=True)
    assert (receipt.inserted, receipt.dropped) == (1, (sample(0).uid,))
    tokens = store.read_tokens(receipt.rows, ["tokens"], verify=True)["tokens"].to_pylist()
    assert tokens == [sample(1).tokens.tolist(), sample(0).tokens.tolist()]
    assert store.commit_samples([sample(1)]).dropped == ()


@pytest.mark.parametrize("largest", [2, 5, 50, 2**31 - 1])
@pytest.mark.parametrize("length", [0, 3, 4, 5, 6, 7, 500, 20_000, (1 << 15) + 3, (1 << 15) + 4])
def test_repetition_counts_runs_of_four_that_came_before(length: int, largest: int) -> None:
    response = np.random.default_rng(length).integers(0, largest, length).astype(np.int32)
    runs = [tuple(response[start : start + 4].tolist()) for start in range(length - 3)]
    assert repetition(response) == ((len(runs) - len(set(runs))) / len(runs) if runs else 0.0)


def test_repetition_of_a_loop_and_of_a_view() -> None:
    loop = np.tile(np.arange(7, dtype=np.int32), 1_000)
    assert repetition(loop) == (len(loop) - 3 - 7) / (len(loop) - 3)
    assert repetition(np.repeat(loop, 2)[::2]) == repetition(loop)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("high", [1, 200, 2**31 - 1])
def test_whole_numbers_are_refused_on_both_sides_in_every_width(dtype: str, high: int) -> None:
    inside = min(high, int(np.iinfo(dtype).max))
    assert whole_numbers(np.array([0, inside], dtype), 0, high, "x").tolist() == [0, inside]
    outside = [high + 1] * (high < np.iinfo(dtype).max) + [-1, int(np.iinfo(dtype).min)] * (np.iinfo(dtype).min < 0)
    for value in outside:
        with pytest.raises(MismatchError, match=f"x holds {value} at place 1; allowed: 0 to {high}"):
            whole_numbers(np.array([0, value, 1], dtype), 0, high, "x")
