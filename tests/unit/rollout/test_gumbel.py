"""The sampler gumbel/1, which continues old logs: a token is a function of (logits, key, position)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.rollout.engines.gumbel import Distribution, gumbel, uniforms
from mopd_dataplane.rollout.engines.philox import key_words
from mopd_dataplane.rollout.engines.sampling import sample_key

KEYS = st.integers(0, 2**128 - 1)


def choose(
    logits: np.ndarray, key: int, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs of rows at positions 0, 1, … of a key."""
    distribution = Distribution.of(logits, temperature, top_k, top_p)
    tokens = distribution.draw(np.tile(key_words(key), (len(logits), 1)), np.arange(len(logits)), temperature)
    return tokens, distribution.logprobs(tokens)


def plain(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.ones(rows), np.zeros(rows, np.int64), np.ones(rows)


@settings(max_examples=50, deadline=None)
@given(key=KEYS, position=st.integers(0, 1 << 20), count=st.integers(1, 6), vocab=st.integers(1, 70))
def test_noise_of_a_position_does_not_depend_on_the_block_it_is_made_in(
    key: int, position: int, count: int, vocab: int
) -> None:
    block = uniforms(key, position, count, vocab)
    alone = np.concatenate([uniforms(key, position + i, 1, vocab) for i in range(count)])
    np.testing.assert_array_equal(block, alone)


def test_uniforms_are_strictly_inside_the_unit_interval_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Extreme:
        def __init__(self, **_: object) -> None: ...

        def random_raw(self, size: int) -> np.ndarray:
            return np.resize(np.array([0, 2**64 - 1], np.uint64), size)

    monkeypatch.setattr(np.random, "Philox", Extreme)
    lowest, highest = uniforms(1, 0, 1, 2)[0]
    assert 0 < lowest < 2**-52
    assert 1 - 2**-52 < highest < 1
    assert np.isfinite(gumbel(1, 0, 1, 2)).all()


def test_keys_and_positions_have_unrelated_noise() -> None:
    first, other_key = uniforms(sample_key("a"), 0, 200, 50), uniforms(sample_key("b"), 0, 200, 50)
    assert abs(np.corrcoef(first.ravel(), other_key.ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1].ravel(), first[1:].ravel())[0, 1]) < 0.05
    assert len(np.unique(first)) == first.size


def test_tokens_follow_the_distribution_they_report() -> None:
    """Pearson's chi-square over 40 000 draws; 23.2 is the 0.999 quantile at 7 degrees of freedom, plus slack."""
    draws = 40_000
    logits = np.tile(np.array([2.0, 1.0, 0.0, -1.0, 0.5, 0.3, -2.0, 1.5], np.float32), (draws, 1))
    temperature, top_k, top_p = plain(draws)
    tokens, logprobs = choose(logits, sample_key("x"), temperature * 0.7, top_k, top_p)
    expected = np.exp(logits[0] / 0.7) / np.exp(logits[0] / 0.7).sum() * draws
    observed = np.bincount(tokens, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3
    np.testing.assert_allclose(logprobs, np.log(expected / draws)[tokens], rtol=1e-5)


def test_temperature_zero_is_greedy_and_ties_go_to_the_lower_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 0.0], [5.0, 1.0, 5.0, 5.0]], np.float32)
    _, top_k, top_p = plain(2)
    tokens, logprobs = choose(logits, 9, np.zeros(2), top_k, top_p)
    assert tokens.tolist() == [1, 0]
    whole = logits - np.log(np.exp(logits.astype(float)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, [whole[0, 1], whole[1, 0]], rtol=1e-6)


def test_top_k_and_top_p_cut_and_renormalise() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05]], np.float32))
    temperature, top_k, top_p = plain(1)
    cut = np.exp(Distribution.of(logits, temperature, np.array([2]), top_p).log_q())[0]
    np.testing.assert_allclose(cut, [4 / 7, 3 / 7, 0, 0, 0], rtol=1e-6)
    nucleus = np.exp(Distribution.of(logits, temperature, top_k, np.array([0.71])).log_q())[0]
    np.testing.assert_allclose(nucleus, np.array([0.4, 0.3, 0.15, 0, 0]) / 0.85, rtol=1e-6)
    both = np.exp(Distribution.of(logits, temperature, np.array([2]), np.array([0.5])).log_q())[0]
    np.testing.assert_allclose(both, [1, 0, 0, 0, 0] if 4 / 7 >= 0.5 else [], rtol=1e-6)


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    temperature, _, top_p = plain(1)
    mask = Distribution.of(np.zeros((1, 6), np.float32), temperature, np.array([4]), top_p).kept()[0]
    assert mask.tolist() == [True] * 4 + [False] * 2


def test_the_token_is_the_largest_of_log_prob_and_noise() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (9, 33)).astype(np.float32)
    temperature, top_k, top_p = rng.uniform(0.1, 2, 9), rng.integers(0, 33, 9), rng.uniform(0.1, 1, 9)
    tokens, logprobs = choose(logits, 5, temperature, top_k, top_p)
    for i in range(9):
        one = slice(i, i + 1)
        log_q = Distribution.of(logits[one], temperature[one], top_k[one], top_p[one]).log_q()[0]
        assert tokens[i] == (log_q + gumbel(5, i, 1, 33)[0]).argmax()
        assert logprobs[i].tobytes() == log_q[tokens[i]].astype(np.float32).tobytes()
