"""The packed forward pass: sequences in one row do not see each other, and trained rows are the right ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd_dataplane.errors import MismatchError
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
        student = load_student(policy, ALONE, gradient_checkpointing=checkpointing)
        student(build([pack([9, 7], seed=4)]), lambda hidden, head: (hidden @ head.weight.T).square().sum()).backward()
        gradients.append([p.grad.clone() for p in student.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_head_gets_no_gradient_but_a_tied_embedding_learns(
    tied: bool, make_policy: Callable[..., Path], pack: Callable[..., Pack]
) -> None:
    student = load_student(make_policy(tie_word_embeddings=tied), ALONE, freeze_head=True)
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
