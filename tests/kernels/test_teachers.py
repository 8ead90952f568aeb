"""Several teachers in one call: right head for every row, one head alive at a time."""

import gc
import weakref

import pytest
import torch
from mopd_kernels import Head, divergence
from mopd_kernels.sweep import length
from mopd_kernels.teachers import row_segments
from mopd_kernels.testing import Case, make_inputs

CASE = Case(rows=11, vocabulary=211, student_width=8, teacher_width=12)
IDS = torch.tensor([2, 0, 0, 1, 2, 2, 0, 1, 1, 0, 2])


def three_heads(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(211, 12, generator=generator, dtype=dtype) for _ in range(3)]
    return [Head(weights[0]), Head(weights[1], softcap=3.0), Head(weights[2], torch.randn(211, dtype=dtype))]


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("order", ["mixed", "sorted"])
def test_each_row_meets_its_own_teacher(order, mode):
    inputs, heads = make_inputs(CASE, dtype=torch.float64), three_heads()
    ids = IDS if order == "mixed" else IDS.sort().values
    hidden = inputs.student_hidden.clone().requires_grad_()
    head = inputs.student_head.clone().requires_grad_()
    together, stats = divergence(
        hidden, head, inputs.teacher_hidden, heads,
        row_teacher_ids=ids, weights=inputs.weights, logit_rows=2, mode=mode, return_stats=True,
    )  # fmt: skip
    together.sum().backward()

    alone_hidden = inputs.student_hidden.clone().requires_grad_()
    alone_head = inputs.student_head.clone().requires_grad_()
    for number, teacher in enumerate(heads):
        rows = ids == number
        loss, part = divergence(
            alone_hidden[rows], alone_head, inputs.teacher_hidden[rows], teacher,
            weights=inputs.weights[rows], return_stats=True,
        )  # fmt: skip
        loss.sum().backward()
        torch.testing.assert_close(together[rows], loss)
        torch.testing.assert_close(stats.forward_kl[rows], part.forward_kl)
    torch.testing.assert_close(hidden.grad, alone_hidden.grad)
    torch.testing.assert_close(head.grad, alone_head.grad)


def test_one_head_resident_at_a_time_and_none_afterwards():
    inputs = make_inputs(CASE, dtype=torch.float64)
    alive: list[weakref.ref] = []
    order: list[int] = []

    def load(number):
        gc.collect()
        assert all(ref() is None for ref in alive), "the previous head is still referenced"
        weight = torch.randn(211, 12, dtype=torch.float64)
        alive.append(weakref.ref(weight))
        order.append(number)
        return Head(weight)

    loss = divergence(
        inputs.student_hidden, inputs.student_head.clone().requires_grad_(), inputs.teacher_hidden, load,
        row_teacher_ids=IDS, reduction="sum", logit_rows=2,
    )  # fmt: skip
    assert order == [0, 1, 2], "each head once, in order"
    loss.backward()
    assert order == [0, 1, 2], "the gradient was taken in the forward pass"
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_sorted_rows_are_views_and_masked_rows_are_left_out():
    ids = torch.tensor([0, 0, 0, 1, 1])
    assert row_segments(5, ids, None, torch.device("cpu")) == [(0, slice(0, 3)), (1, slice(3, 5))]
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    ((number, rows),) = row_segments(5, ids, weights, torch.device("cpu"))
    assert (number, length(rows), rows.tolist()) == (0, 2, [0, 2])


def test_unknown_teacher_and_mismatched_heads_are_refused():
    inputs, heads = make_inputs(CASE, dtype=torch.float64), three_heads()
    rest = (inputs.student_hidden, inputs.student_head, inputs.teacher_hidden)
    with pytest.raises(ValueError, match="names teacher 3, but 3 teacher heads were given"):
        divergence(*rest, heads, row_teacher_ids=IDS + 1)
    with pytest.raises(ValueError, match="teacher hidden width is 12, but the head is \\[211, 9\\]"):
        divergence(*rest, [Head(torch.ones(211, 9, dtype=torch.float64))], row_teacher_ids=IDS * 0)
    with pytest.raises(ValueError, match="smaller head has 100 tokens"):
        divergence(*rest, lambda _: Head(torch.ones(100, 12, dtype=torch.float64)), row_teacher_ids=IDS * 0)
    with pytest.raises(ValueError, match="put them into each Head instead"):
        divergence(*rest, heads, row_teacher_ids=IDS, teacher_softcap=3.0)
    with pytest.raises(ValueError, match="pass both or neither"):
        divergence(*rest, heads)
