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
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopd_dataplane.job.sections import Student, Train
from mopd_dataplane.models.initial_weights import make_student
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


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """A float64 softmax over the scores of a sequence and its head's sink, as gpt-oss's model card writes it:
    [1, H, L, d]."""
    q, k, v = (states[0].double() for states in (query, key, value))
    k, v = (states.repeat_interleave(len(q) // len(k), dim=0) for states in (k, v))
    back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])[None]
    seen = (back >= 0) & (back < (window or len(back)))
    scores = (q @ k.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(~seen, -torch.inf)
    weights = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(back), 1)], -1).softmax(-1)[..., :-1]
    return (weights @ v)[None]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("value_width", [8, 6])
def test_sinks_take_their_share_of_every_softmax(window: int | None, value_width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, heads, shared, width = [1, 9, 3], 4, 2, 8
    shapes = [(1, heads, sum(lengths), width), (1, shared, sum(lengths), width), (1, shared, sum(lengths), value_width)]
    states = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs = [*states, torch.randn(heads, generator=generator, dtype=torch.float64)]
    for tensor in inputs:
        tensor.requires_grad_()
    *qkv, sinks = inputs
    packed, _ = packed_attention(
        torch.nn.Module(), *qkv, None, sequence_lengths=lengths, sliding_window=window, s_aux=sinks
    )
    split = zip(*(torch.split(part, lengths, dim=2) for part in qkv), strict=True)
    apart = torch.cat([with_sinks(q, k, v, sinks, window) for q, k, v in split], dim=2).transpose(1, 2)
    weights = torch.randn(apart.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((result * weights).sum(), inputs) for result in (packed, apart)]
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-12)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("shortest", "longest"), [(2, 4096), (1, 4), (1, 3), (5, 5)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [1, 3, 6, 11])
def test_blocks_of_a_window_are_the_whole_window(
    window: int, has_sinks: bool, shortest: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_SHORTEST_BLOCK", shortest)
    monkeypatch.setattr(attention, "_LONGEST_BLOCK", longest)
    generator = torch.Generator().manual_seed(window)
    length, heads = 23, 2
    states = [torch.randn(1, heads, length, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    # A sink of minus infinity takes nothing of the softmax.
    sinks = torch.randn(heads, generator=generator, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (*states, sinks)]
    blocks, _ = packed_attention(
        torch.nn.Module(), *states, None, sliding_window=window, s_aux=sinks if has_sinks else None
    )
    whole = with_sinks(*states, sinks if has_sinks else torch.full_like(sinks, -torch.inf), window).transpose(1, 2)
    torch.testing.assert_close(blocks, whole, rtol=0, atol=1e-12)
    weights = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    taught = inputs if has_sinks else states
    gradients = [torch.autograd.grad((result * weights).sum(), taught) for result in (blocks, whole)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_long_sequence_with_a_window_takes_no_mask_of_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    band = attention._band

    def measured(*arguments: Any) -> Tensor:
        mask = band(*arguments)
        sizes.append(mask.numel())
        return mask

    monkeypatch.setattr(attention, "_band", measured)
    query = torch.zeros(1, 1, 20_000, 4)
    packed_attention(torch.nn.Module(), query, query, query, None, sliding_window=512)
    assert sizes == [512 * 512, 512 * (512 + 511)]


LENGTHS = [5, 7]


def sink_inputs() -> list[Tensor]:
    """Queries, keys, values and sinks of two sequences in one row, that ask for gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 4, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (4,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def shared_with_sinks(rank: int, rendezvous: str, folder: str) -> None:
    """A process that has half of the tokens: stores its output and the gradient of the sinks."""
    store = dist.FileStore(rendezvous, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    *states, sinks = sink_inputs()
    own = [part.chunk(2, dim=2)[rank] for part in states]
    output, _ = packed_attention(
        torch.nn.Module(), *own, None, sequence_lengths=LENGTHS, s_aux=sinks, context_group=dist.group.WORLD
    )
    [gradient] = torch.autograd.grad(output.sum(), [sinks])
    save_file({"output": output.detach(), "sinks": gradient}, Path(folder) / f"{rank}.safetensors")
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_share_a_row_have_the_sinks_of_their_heads(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(shared_with_sinks, (str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2)
    parts = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    *states, sinks = sink_inputs()
    whole, _ = packed_attention(torch.nn.Module(), *states, None, sequence_lengths=LENGTHS, s_aux=sinks)
    [gradient] = torch.autograd.grad(whole.sum(), [sinks])
    torch.testing.assert_close(torch.cat([part["output"] for part in parts], dim=1), whole.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(part["sinks"] for part in parts), gradient, rtol=0, atol=1e-12)


def test_a_model_with_sinks_is_packed_without_a_mask_of_the_pack(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    make_student(Student(config=config), tmp_path / "m", seed=0)
    student = load_student(tmp_path / "m", Ranks(0, 1, torch.device("cpu")), Train())
    assert student.layout == "packed"
    assert student.model.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_what_learns_in_bfloat16_on_a_cpu_attends_in_float32(
    window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[torch.dtype] = []
    plain = attention.scaled_dot_product_attention

    def recording(query: Tensor, *args: Any, **settings: Any) -> Tensor:
        dtypes.append(query.dtype)
        return plain(query, *args, **settings)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", recording)
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 5]
    states = [torch.randn(1, heads, sum(lengths), 8, generator=generator).bfloat16() for heads in (4, 2, 2)]
    states = [state.requires_grad_() for state in states]
    sinks = torch.randn(4, generator=generator) if has_sinks else None
    module = torch.nn.Module()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = packed_attention(
            module, *states, None, sequence_lengths=lengths, sliding_window=window, s_aux=sinks
        )
    assert (output.dtype, set(dtypes)) == (torch.bfloat16, {torch.float32})
    no_sink = torch.full((4,), -torch.inf)
    exact = [state.detach().double().requires_grad_() for state in states]
    parts = zip(*(state.split(lengths, dim=2) for state in exact), strict=True)
    expected = torch.cat([with_sinks(*part, no_sink if sinks is None else sinks, window) for part in parts], dim=2)
    weights = torch.randn(output.shape, generator=generator)
    (output.float() * weights).sum().backward()
    (expected.transpose(1, 2) * weights).sum().backward()
    torch.testing.assert_close(output.double(), expected.transpose(1, 2), rtol=2**-8, atol=1e-6)  # rounded once
    for state, reference in zip(states, exact, strict=True):
        # Rounded once, and so is the gradient of the output.
        torch.testing.assert_close(state.grad.double(), reference.grad, rtol=2**-7, atol=2**-7)
    dtypes.clear()
    with torch.no_grad():
        packed_attention(module, *states, None, sequence_lengths=lengths, sliding_window=window, s_aux=sinks)
    assert set(dtypes) == {torch.bfloat16}
