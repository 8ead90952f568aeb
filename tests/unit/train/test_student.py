"""The packed forward pass: sequences in one row do not see each other, and trained rows are the right ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from advice import advises
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.sections import Train
from mopd_dataplane.models import hf
from mopd_dataplane.records import Pack
from mopd_dataplane.train.microbatch import build
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.student import Student, load_student, packs_apart

ALONE = Ranks(0, 1, torch.device("cpu"))
QWEN = {"num_attention_heads": 2, "num_key_value_heads": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "llama": {"model_type": "llama"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 32},
    "mistral": {"model_type": "mistral", "sliding_window": 4},
}


def rows_of(student: Student, packs: list[Pack]) -> Tensor:
    with torch.no_grad():
        rows: Tensor = student(build(packs, student.layout), lambda hidden, head: hidden)
    return rows


def expected_rows(student: Student, packs: list[Pack]) -> Tensor:
    """Every sequence alone in its own forward pass; the state before each trained token."""
    plain = AutoModelForCausalLM.from_config(student.model.config, attn_implementation="sdpa").eval()
    plain.load_state_dict(student.model.state_dict())
    rows = []
    for pack in packs:
        for start, stop in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True):
            ids = torch.from_numpy(pack.tokens[start:stop].astype(np.int64))[None]
            with torch.no_grad():
                states = hf.hidden_states(plain, ids)[0]
            rows.append(states[np.flatnonzero(pack.loss_mask[start:stop]) - 1])
    return torch.cat(rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layout", ["packed", "rows"])
def test_packed_states_equal_separate_states(
    architecture: str, layout: Any, make_policy: Callable[..., Path], pack: Callable[..., Pack]
) -> None:
    student = load_student(make_policy(**ARCHITECTURES[architecture]), ALONE)
    assert student.layout == "packed"
    student.layout = layout
    packs = [pack([9, 7, 12], seed=1), pack([8], seed=2), pack([20, 6], seed=3)]
    torch.testing.assert_close(rows_of(student, packs), expected_rows(student, packs), atol=2e-5, rtol=1e-4)


def test_a_model_that_ignores_position_ids_gets_one_row_a_sequence(policy: Path, pack: Callable[..., Pack]) -> None:
    model = hf.load_model(policy)
    inner = model.base_model.forward
    model.base_model.forward = lambda input_ids, use_cache, **ignored: inner(input_ids, use_cache=use_cache)
    assert not packs_apart(model)
    student = Student(model)
    assert student.layout == "rows"
    packs = [pack([9, 7, 12], seed=1), pack([20, 6], seed=3)]
    torch.testing.assert_close(rows_of(student, packs), expected_rows(student, packs), atol=2e-5, rtol=1e-4)


HYBRID: dict[str, dict[str, Any]] = {
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "falcon_h1": {
        "model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
CLEAN = ARCHITECTURES | {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}


@pytest.mark.parametrize("times", [1, 10], ids=["small weights", "large weights"])
@pytest.mark.parametrize(("name", "apart"), [(name, name in CLEAN) for name in CLEAN | HYBRID])
def test_a_model_is_packed_only_where_sequences_ignore_each_other(
    name: str, apart: bool, times: int, make_policy: Callable[..., Path]
) -> None:
    """Random small weights hide a leak: 4e-4 of the states with lfm2, 7e-4 with falcon_h1."""
    model = hf.load_model(make_policy(**(CLEAN | HYBRID)[name]))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(times if weight.ndim > 1 else 1)
    assert packs_apart(model) == apart


def each_sequence_anew(function: Callable[..., Any], axis: int, starts: Callable[..., list[int] | None]) -> Any:
    """A function of recurrent layers that runs once for each sequence of a row, as kernels with their starts do.

    axis: of the tokens. starts: reads the first token of each sequence, and the end, from the arguments.
    """

    def kernel(*states: Tensor, **how: Any) -> Any:
        begins = starts(**how)
        if begins is None:
            return function(*states, **how)
        length = begins[-1]
        parts = []
        for begin, end in pairwise(begins):
            cut = dict(zip(how, _cut(how.values(), axis, length, begin, end), strict=True))
            parts.append(function(*_cut(states, axis, length, begin, end), **cut))
        if isinstance(parts[0], tuple):
            return torch.cat([part[0] for part in parts], axis), parts[-1][1]
        return torch.cat(parts, axis)

    return kernel


def _cut(values: Iterable[Any], axis: int, length: int, begin: int, end: int) -> list[Any]:
    """Values with the tokens begin:end of those that have all tokens of the row along the axis."""
    whole = [torch.is_tensor(one) and one.ndim > 2 and one.shape[axis] == length for one in values]
    return [one.narrow(axis, begin, end - begin) if cut else one for one, cut in zip(values, whole, strict=True)]


def by_numbers(*, seq_idx: Tensor | None = None, **_: Any) -> list[int] | None:
    """Starts in a row from the number of each token's sequence, as causal_conv1d takes them."""
    if seq_idx is None:
        return None
    assert seq_idx.dtype == torch.int32
    return [0, *(seq_idx[0].diff().nonzero()[:, 0] + 1).tolist(), seq_idx.shape[1]]


def by_starts(*, cu_seqlens: Tensor | None = None, **_: Any) -> list[int] | None:
    """Starts in a row as flash-linear-attention takes them."""
    if cu_seqlens is None:
        return None
    assert cu_seqlens.dtype == torch.int32
    return cu_seqlens.tolist()


def two_ranks() -> Any:
    """Stands in for a process group of two ranks, where only their number is asked for."""
    return SimpleNamespace(size=lambda: 2)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_recurrent_layers_are_packed_where_their_kernels_start_anew(
    name: str, make_policy: Callable[..., Path], pack: Callable[..., Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such kernels need a GPU; theirs are stood in for here by transformers' own functions, once for each sequence."""
    folder = make_policy(**HYBRID[name])
    packs = [pack([9, 7, 12], seed=1), pack([8], seed=2), pack([20, 6], seed=3)]
    expected = expected_rows(Student(hf.load_model(folder)), packs)
    module = sys.modules[f"transformers.models.{name}.modeling_{name}"]
    for function, axis, starts in (("causal_conv1d_fn", 2, by_numbers), ("torch_chunk_gated_delta_rule", 1, by_starts)):
        if hasattr(module, function):
            monkeypatch.setattr(module, function, each_sequence_anew(getattr(module, function), axis, starts))
    student = load_student(folder, ALONE)
    assert student.layout == "packed"
    torch.testing.assert_close(rows_of(student, packs), expected, atol=2e-5, rtol=1e-4)
    with advises(" keeps a state from token to token, which ranks cannot share; set scale.context_parallel = 1"):
        Student(student.model, context_group=two_ranks())
    loss = student(build(packs, student.layout), lambda hidden, head: hidden.square().sum())
    loss.backward()
    packed = {name: weight.grad.clone() for name, weight in student.named_parameters() if weight.grad is not None}
    monkeypatch.undo()
    alone = load_student(folder, ALONE)
    assert alone.layout == "rows"
    with advises(" brings attention of its own, which cannot share a pack; set scale.context_parallel = 1"):
        Student(alone.model, context_group=two_ranks())
    alone(build(packs, alone.layout), lambda hidden, head: hidden.square().sum()).backward()
    for name, weight in alone.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(packed[name], weight.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_two_passes_agree_unless_dropout_is_asked_for(
    name: str, checkpointing: bool, make_policy: Callable[..., Path], pack: Callable[..., Pack]
) -> None:
    configs = {
        "gpt2": CLEAN["gpt2"],
        "opt": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.2},
        "llama": {"model_type": "llama", "attention_dropout": 0.2},
    }
    folder, packs = make_policy(**configs[name]), [pack([9, 7], seed=4)]

    def apart(dropout: bool) -> float:
        student = load_student(folder, ALONE, Train(dropout=dropout, gradient_checkpointing=checkpointing))
        first, second = (student(build(packs, student.layout), lambda hidden, head: hidden) for _ in range(2))
        second.sum().backward()
        return float((first - second).detach().abs().max())

    assert apart(dropout=False) == 0
    assert apart(dropout=True) > 1e-3


def test_loading_a_student_keeps_the_models_own_logits(policy: Path, pack: Callable[..., Pack]) -> None:
    student = load_student(policy, ALONE)
    packs = [pack([9, 7], seed=4)]
    with torch.no_grad():
        logits: Tensor = student(build(packs), lambda hidden, head: hidden @ head.weight.T)
        ids = torch.from_numpy(packs[0].tokens[:9].astype(np.int64))[None]
        alone = student.model(ids).logits[0]
    trained = np.flatnonzero(packs[0].loss_mask[:9]) - 1
    torch.testing.assert_close(logits[: len(trained)], alone[trained], atol=2e-5, rtol=1e-4)


def test_gradient_checkpointing_changes_no_gradient(policy: Path, pack: Callable[..., Pack]) -> None:
    gradients = []
    for checkpointing in (False, True):
        student = load_student(policy, ALONE, Train(gradient_checkpointing=checkpointing))
        student(build([pack([9, 7], seed=4)]), lambda hidden, head: (hidden @ head.weight.T).square().sum()).backward()
        gradients.append([p.grad.clone() for p in student.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_head_gets_no_gradient_but_a_tied_embedding_learns(
    tied: bool, make_policy: Callable[..., Path], pack: Callable[..., Pack]
) -> None:
    student = load_student(make_policy(tie_word_embeddings=tied), ALONE, Train(freeze_head=True))
    student(build([pack([9], seed=4)]), lambda hidden, head: (hidden @ head.weight.T).square().sum()).backward()
    untouched = torch.ones(len(hf.embedding_weight(student.model)), dtype=torch.bool)
    untouched[pack([9], seed=4).tokens] = False
    gradient = hf.embedding_weight(student.model).grad
    assert gradient is not None
    assert gradient[~untouched].abs().sum() > 0
    assert gradient[untouched].abs().sum() == 0  # a trained head would reach every row of a tied matrix
    if not tied:
        assert hf.head_weight(student.model).grad is None


def test_a_trained_first_token_is_refused(pack: Callable[..., Pack]) -> None:
    broken = pack([8, 8], seed=1)
    broken.loss_mask[8] = 1
    with pytest.raises(MismatchError, match="first token"):
        build([broken])
