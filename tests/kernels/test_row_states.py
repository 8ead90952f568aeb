"""Row states merge in any grouping: vocabulary tiles, slices and vocabulary-parallel ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mopd_kernels import finish_row_state, merge_row_states, reference
from mopd_kernels.epilogue import Products
from mopd_kernels.forms import KINDS, divergence_form
from mopd_kernels.torch_rows.fdiv import fdiv_rows, mean_from_state, scan_gradient, scan_mean, scan_state


def pair_of_logits(rows=6, columns=301):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 5
    return x, x + torch.randn(rows, columns, generator=generator, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True), st.randoms())
def test_any_split_in_any_order_gives_the_whole(cuts, random):
    x, y = pair_of_logits()
    edges = [0, *sorted(cuts), 301]
    parts = [scan_state(Products(x[:, a:b], y[:, a:b]), first_column=a) for a, b in pairwise(edges)]
    random.shuffle(parts)
    stats = finish_row_state(merge_row_states(parts))
    for value, expected in zip(stats, reference.row_stats(x, y), strict=True):
        torch.testing.assert_close(value, expected)


def test_merging_far_apart_maxima_and_huge_shifts_loses_nothing():
    """Parts whose maxima differ by hundreds: exponentials underflow, the moments stay right."""
    x, y = pair_of_logits()
    x[:, :150] += 500
    y[:, 150:] += 700
    parts = [scan_state(Products(x[:, a:b], y[:, a:b]), first_column=a) for a, b in ((0, 150), (150, 301))]
    stats = finish_row_state(merge_row_states(parts))
    torch.testing.assert_close(stats.reverse_kl, reference.divergence(x, y, kind="reverse"))
    torch.testing.assert_close(stats.forward_kl, reference.divergence(x, y, kind="forward"))


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_parallel_ranks(kind):
    """Each rank holds a slice of both heads: states merge, H and the loss add up, gradients stay local."""
    x, y = pair_of_logits()
    form, coefficient = divergence_form(kind), torch.linspace(0.5, 2, 6, dtype=torch.float64)
    whole = torch.empty_like(x)
    loss, _ = fdiv_rows(Products(x, y), form, coefficient, whole)

    ranks = [(0, 100), (100, 228), (228, 301)]
    shards = [Products(x[:, a:b], y[:, a:b]) for a, b in ranks]
    states = [scan_state(z, first_column=a) for z, (a, _) in zip(shards, ranks, strict=True)]
    state = merge_row_states(states)
    if form.needs_mean:
        mean = sum(scan_mean(z, state, form) for z in shards)
    else:
        mean = mean_from_state(state, form)
    shares = torch.zeros_like(loss)
    for z, (a, b) in zip(shards, ranks, strict=True):
        gradient = torch.empty_like(z.zs)
        shares += scan_gradient(z, state, mean, form, coefficient, gradient)
        torch.testing.assert_close(gradient, whole[:, a:b])
    torch.testing.assert_close(shares, loss)


def test_ties_go_to_the_first_column_like_argmax():
    x = torch.zeros(1, 6, dtype=torch.float64)
    y = torch.tensor([[0.0, 1, 0, 1, 0, 0]], dtype=torch.float64)
    parts = [scan_state(Products(x[:, a : a + 2], y[:, a : a + 2]), first_column=a) for a in (0, 2, 4)]
    state = merge_row_states(parts)
    assert (state.student_top.item(), state.teacher_top.item()) == (0, 1)
