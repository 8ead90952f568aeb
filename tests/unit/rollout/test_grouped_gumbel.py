"""The sampler grouped-gumbel/1: its noise, its distribution, and what a token does not depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.rollout.engines import philox
from mopd_dataplane.rollout.engines.grouped_gumbel import Distribution, group_size
from mopd_dataplane.rollout.engines.sampling import sample_key

DRAWS = 20_000


def plain(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.ones(rows), np.zeros(rows, np.int64), np.ones(rows)


def words(count: int, name: str = "") -> np.ndarray:
    return np.stack([philox.key_words(sample_key(f"{name}{i}")) for i in range(count)])


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic over cells with at least five expected draws, the rest as one cell; as standard deviations
    from its mean, which the statistic is close to normal in.
    """
    few = expected < 5
    observed = np.append(observed[~few], observed[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return (statistic - degrees) / (2 * degrees) ** 0.5


def tokens_of(
    logits: np.ndarray, *, by: str, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """20,000 tokens from one row of logits: over positions of one key, or over keys at one position."""
    keys = np.tile(words(1, "one"), (DRAWS, 1)) if by == "position" else words(DRAWS, "many")
    positions = np.arange(DRAWS) if by == "position" else np.full(DRAWS, 7)
    one = Distribution.of(logits[None], np.full(1, temperature), np.full(1, top_k), np.full(1, top_p))
    many = Distribution(
        np.repeat(one.logits, DRAWS, 0), np.repeat(one.peak, DRAWS), np.repeat(one.scale, DRAWS),
        np.repeat(one.masses, DRAWS, 0), np.repeat(one.floor, DRAWS), np.repeat(one.last, DRAWS),
    )  # fmt: skip
    return many.draw(keys, positions, np.full(DRAWS, temperature))


def expected(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities by sorting in float64, as docs/objectives.md states the cuts."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    probabilities = np.exp(scaled[order] - scaled.max())
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = order[np.cumsum(probabilities) - probabilities < top_p]
    distribution = np.zeros(len(logits))
    distribution[order] = np.exp(scaled[order] - scaled.max())
    return distribution / distribution.sum()


def test_the_generator_gives_the_published_words() -> None:
    """The known answers of Random123 (kat_vectors, philox4x32 10)."""

    def block(*numbers: int) -> list[int]:
        return philox._blocks(*(np.full((1, 1), number, np.uint32) for number in numbers))[0, 0].tolist()

    assert block(0, 0, 0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert block(*[0xFFFFFFFF] * 6) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert block(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip


def test_uniforms_are_strictly_inside_the_unit_interval_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.array([[[0, 0, 0xFFFFFFFF, 0xFFFFFFFF]]], np.uint32)
    monkeypatch.setattr(philox, "_blocks", lambda *_: raw)
    lowest, highest = philox.uniforms(np.zeros((1, 4), np.uint32), np.zeros(1, np.int64), 2)[0]
    assert 0 < lowest < 2**-52
    assert 1 - 2**-52 < highest < 1


def test_keys_positions_and_numbers_have_unrelated_noise() -> None:
    """Correlations of 100,000 pairs are within 5 standard errors of zero, and no value comes twice."""
    noise = philox.uniforms(words(2).repeat(1000, 0), np.tile(np.arange(1000), 2), 100)
    first, other = noise[:1000], noise[1000:]
    pairs = [(first, other), (first[:-1], first[1:]), (first[:, :-1], first[:, 1:]), (first[:, :50], first[:, 50:])]
    for one, two in pairs:
        assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 * one.size**-0.5
    assert len(np.unique(noise)) == noise.size
    assert abs(noise.mean() - 0.5) < 5 * (12 * noise.size) ** -0.5


@pytest.mark.parametrize("by", ["position", "key"])
@pytest.mark.parametrize(
    ("vocab", "temperature", "top_k", "top_p"),
    [
        (8, 1.0, 0, 1.0),
        (100, 0.7, 0, 1.0),
        (301, 1.0, 40, 1.0),
        (301, 1.3, 0, 0.8),
        (500, 1.0, 300, 0.95),
        (1, 1.0, 0, 1.0),
    ],
)
def test_tokens_follow_the_distribution(by: str, vocab: int, temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square over 20,000 draws, along the positions of one key and across keys, within 5 standard deviations."""
    logits = np.random.default_rng(vocab).normal(0, 2, vocab).astype(np.float32)
    tokens = tokens_of(logits, by=by, temperature=temperature, top_k=top_k, top_p=top_p)
    probabilities = expected(logits, temperature, top_k, top_p)
    observed = np.bincount(tokens, minlength=vocab)
    assert observed[probabilities == 0].sum() == 0
    if vocab > 1:
        assert chi_square(observed, probabilities * DRAWS) < 5


def test_tokens_of_neighbouring_positions_and_keys_are_independent() -> None:
    """Chi-square of pairs of tokens against the product of their probabilities."""
    logits = np.random.default_rng(3).normal(0, 1, 9).astype(np.float32)
    single = expected(logits, 1.0, 0, 1.0)
    for by in ("position", "key"):
        tokens = tokens_of(logits, by=by)
        pairs = np.bincount(tokens[0::2] * 9 + tokens[1::2], minlength=81)
        assert chi_square(pairs, np.outer(single, single).ravel() * (DRAWS // 2)) < 5


def test_the_log_prob_is_that_of_the_distribution() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 4, (64, 1000)).astype(np.float32)
    temperature, top_k, top_p = rng.uniform(0.3, 2, 64), rng.integers(0, 900, 64), rng.uniform(0.5, 1, 64)
    distribution = Distribution.of(logits, temperature, top_k, top_p)
    tokens = distribution.draw(words(64), np.arange(64), temperature)
    truth = [
        np.log(expected(*row)[token])
        for token, *row in zip(tokens, logits, temperature, top_k.tolist(), top_p, strict=True)
    ]
    np.testing.assert_allclose(
        distribution.logprobs(tokens), truth, rtol=0, atol=2e-6
    )  # float32 scores of size up to 20
    np.testing.assert_allclose(np.exp(distribution.log_q()).sum(axis=1), 1, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 9), vocab=st.sampled_from([1, 2, 33, 256, 257, 3000]))
def test_a_row_does_not_feel_its_neighbours(seed: int, rows: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    keys, positions = words(rows, f"{seed}/"), rng.integers(0, 1 << 20, rows)
    temperature, top_k, top_p = rng.uniform(0, 2, rows), rng.integers(0, vocab + 3, rows), rng.uniform(0.1, 1, rows)
    temperature[rng.random(rows) < 0.2] = 0
    together = Distribution.of(logits, temperature, top_k, top_p)
    tokens = together.draw(keys, positions, temperature)
    for i in range(rows):
        one = slice(i, i + 1)
        alone = Distribution.of(logits[one], temperature[one], top_k[one], top_p[one])
        assert alone.draw(keys[one], positions[one], temperature[one])[0] == tokens[i]
        assert alone.logprobs(tokens[one]).tobytes() == together.logprobs(tokens)[one].tobytes()
        np.testing.assert_array_equal(alone.kept()[0], together.kept()[i])
        assert np.isfinite(alone.logprobs(tokens[one])).all()


def test_temperature_zero_is_greedy_and_ties_go_to_the_lower_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 0.0], [5.0, 1.0, 5.0, 5.0]], np.float32)
    _, top_k, top_p = plain(2)
    distribution = Distribution.of(logits, np.zeros(2), top_k, top_p)
    tokens = distribution.draw(words(2), np.zeros(2, np.int64), np.zeros(2))
    assert tokens.tolist() == [1, 0]
    whole = logits - np.log(np.exp(logits.astype(float)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(distribution.logprobs(tokens), [whole[0, 1], whole[1, 0]], rtol=1e-6)


@pytest.mark.parametrize("vocab", [6, 500])
def test_cuts_keep_exactly_what_sorting_keeps(vocab: int) -> None:
    """With ties, which go to the lower id, and cuts far below the likeliest token; no mass falls on a boundary."""
    rng = np.random.default_rng(vocab)
    for _ in range(60):
        logits = (rng.integers(-4, 5, vocab) * rng.choice([0.1, 1.0, 6.0])).astype(np.float32)
        top_k, top_p = int(rng.integers(0, vocab + 1)), float(rng.choice([0.2013, 0.7537, 0.99871, 1.0]))
        mask = Distribution.of(logits[None], np.ones(1), np.full(1, top_k), np.full(1, top_p)).kept()[0]
        np.testing.assert_array_equal(mask, expected(logits, 1.0, top_k, top_p) > 0)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5, 4.0, 20.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.05), (0, 0.99999), (4000, 0.9), (30, 0.5), (1, 0.9)])
def test_a_large_vocabulary_keeps_the_likeliest_tokens_up_to_the_mass(spread: float, top_k: int, top_p: float) -> None:
    """Flat and peaked rows of 20,000 tokens, beside one with ties, where candidates are set aside before sorting."""
    rng = np.random.default_rng(7)
    rows = rng.normal(0, spread, (3, 20_000)).astype(np.float32)
    rows[1] = np.round(rows[1])
    rows -= rows.max(axis=1, keepdims=True)
    masks = Distribution.of(rows, np.ones(3), np.full(3, top_k), np.full(3, top_p)).kept()
    for row, mask in zip(rows, masks, strict=True):
        order = np.argsort(-row, kind="stable")
        count = int(mask.sum())
        np.testing.assert_array_equal(np.flatnonzero(mask), np.sort(order[:count]))
        mass = np.cumsum(np.exp(row[order[: top_k or None]].astype(np.float64)))
        before = mass[count - 2] if count > 1 else 0.0
        assert before / mass[-1] < top_p * (1 + 1e-6)
        assert mass[count - 1] / mass[-1] > top_p * (1 - 1e-6)


def test_a_mixture_of_two_distributions_is_drawn_from_as_one() -> None:
    rng = np.random.default_rng(8)
    rows = [rng.normal(0, 2, 60).astype(np.float32)[None] for _ in range(2)]
    one, two = (Distribution.of(row, np.ones(1), np.zeros(1, np.int64), np.full(1, 0.9)) for row in rows)
    mixed = one.mixed(two, share=0.3)
    truth = 0.7 * expected(rows[0][0], 1, 0, 0.9) + 0.3 * expected(rows[1][0], 1, 0, 0.9)
    np.testing.assert_allclose(np.exp(mixed.log_q())[0], truth, atol=1e-6)
    np.testing.assert_array_equal(mixed.kept()[0], truth > 0)
    np.testing.assert_array_equal(one.mixed(two, share=0.0).kept(), one.kept())


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 16, 17, 100, 49152, 151936])
def test_a_group_is_the_smallest_power_of_two_whose_square_covers_the_vocabulary(vocab: int) -> None:
    size = group_size(vocab)
    assert size & (size - 1) == 0
    assert size**2 >= vocab
    assert size == 1 or (size // 2) ** 2 < vocab
