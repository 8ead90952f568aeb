"""Packed attention: one launch for all sequences of a row computes what one call a sequence does.

torch's kernel for variable lengths runs on CUDA alone; here a float64 softmax with its documented arguments stands in
for it. The kernel itself is compared by `make gpu PARTS=attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd_dataplane.records import Pack
from mopd_dataplane.train import attention
from mopd_dataplane.train.attention import is_faster_in_one_launch, packed_attention
from mopd_dataplane.train.microbatch import build, starts_of
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.student import load_student


def stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What torch documents of varlen_attn: [T, H, d] and [T, H_kv, d] give [T, H, d]."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert window_size[1] == 0, "causal"
    assert query.is_contiguous()
    assert key.is_contiguous()
    assert value.is_contiguous()
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert int(cu_seq_q.diff().max()) == max_q == max_k
    output = torch.empty_like(query)
    repeats = query.shape[1] // key.shape[1]
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (states[start:end].double() for states in (query, key, value))
        k, v = (states.repeat_interleave(repeats, dim=1) for states in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or query.shape[2] ** -0.5)
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
    return output


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of sequences of each launch of the stand-in, which takes every tensor."""
    counts: list[int] = []

    def launch(*args: Any, **kwargs: Any) -> Tensor:
        counts.append(len(args[3]) - 1)
        return stand_in(*args, **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", launch)
    monkeypatch.setattr(attention, "takes_variable_lengths", lambda query, dropout: not dropout)
    return counts


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_launch_is_every_sequence_by_itself(window: int | None, scaling: float | None, launches: list[int]) -> None:
    lengths = [1, 7, 4, 12]
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(lengths), 8, generator=draw) for heads in (4, 2, 2))
    arguments = {"scaling": scaling, "sliding_window": window, "sequence_lengths": lengths}
    module = torch.nn.Identity()
    together, _ = packed_attention(module, query, key, value, None, sequence_starts=starts_of(lengths), **arguments)
    made_here, _ = packed_attention(module, query, key, value, None, **arguments)
    assert launches == [4, 4]
    apart = attention.each_sequence(query, key, value, lengths, scaling, window, 0.0).transpose(1, 2)
    # Both are float32 over at most 12 terms; 1e-5 is a hundred roundings.
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made_here, together, rtol=0, atol=0)


def test_a_layer_of_a_student_is_one_launch(
    policy: Path, pack: Callable[..., Pack], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    student = load_student(policy, Ranks.join("cpu", environment={}))
    batch = build([pack([9, 6], seed=1), pack([7], seed=2)])
    launches.clear()
    with torch.no_grad():
        states = student(batch, lambda hidden, head: hidden)
        assert launches == [3] * student.model.config.num_hidden_layers
        monkeypatch.setattr(attention, "takes_variable_lengths", lambda query, dropout: False)
        apart = student(batch, lambda hidden, head: hidden)
    assert len(launches) == student.model.config.num_hidden_layers
    torch.testing.assert_close(states, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "window", "is_faster"),
    [
        ([64] * 4, None, True), ([1024, 1024], None, True), ([2048, 2048], None, False), ([4096], None, False),
        ([4096, 4096], 512, True), ([4096, 4096], 4096, False), ([4096], 512, False),
    ],
)  # fmt: skip
def test_long_sequences_are_left_to_torch(lengths: list[int], window: int | None, is_faster: bool) -> None:
    assert is_faster_in_one_launch(lengths, window) is is_faster


def test_the_kernel_takes_nothing_on_a_cpu() -> None:
    assert not attention.takes_variable_lengths(torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16), 0.0)
