"""Routing replay: the trainer sends tokens where the sampler sent them, with gates of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mopd_kernels import token_logprob
from torch import Tensor

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.sections import Train
from mopd_dataplane.models.hf import hidden_states
from mopd_dataplane.models.router_replay import Routing
from mopd_dataplane.records import Pack
from mopd_dataplane.train.microbatch import MicroBatch, build
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.student import Student, load_student

ALONE = Ranks(0, 1, torch.device("cpu"))
EXPERTS, CHOSEN, LAYERS = 8, 2, 2
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "glm4_moe": {
        "n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 48, "first_k_dense_replace": 0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtures(make_policy: Callable[..., Path]) -> Callable[[str], Path]:
    """Folder of a tiny mixture of experts of a family."""
    return lambda family: make_policy(model_type=family, initializer_range=0.2, **MIXTURES[family])


def chosen_by(student: Student, packs: list[Pack]) -> list[np.ndarray]:
    """[L - 1, W] of each sequence of the packs, as a model chooses for each alone."""
    routing = student._routing
    assert routing is not None
    routing.replay(None)
    choices = []
    for pack in packs:
        for first, last in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True):
            with torch.no_grad():
                hidden_states(student.model, torch.from_numpy(pack.tokens[first:last].astype(np.int64))[None])
            choices.append(routing.chosen().numpy()[:-1])
    return choices


def recorded(packs: list[Pack], experts: list[np.ndarray]) -> list[Pack]:
    """The packs with the experts of their sequences, -1 at the last token of each."""
    left = iter(experts)
    for pack in packs:
        ids = [np.concatenate([next(left), np.full((1, LAYERS * CHOSEN), -1)]) for _ in pack.cu_seqlens[1:]]
        pack.experts = np.concatenate(ids).astype(np.int16)
    return packs


def logprobs(student: Student, batch: MicroBatch) -> Tensor:
    token_logprobs = student(batch, lambda hidden, head: token_logprob(hidden, head, batch.targets))
    assert isinstance(token_logprobs, Tensor)
    return token_logprobs


@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, layout) for family in MIXTURES for layout in ("rows", "packed")],
)
def test_recorded_experts_are_followed(
    mixtures: Callable[[str], Path], pack: Callable[..., Pack], family: str, layout: Any
) -> None:
    student = load_student(mixtures(family), ALONE)
    student.layout = layout
    packs = [pack([9, 14], seed=0), pack([7], seed=1)]
    own = chosen_by(student, packs)
    with torch.no_grad():
        free = logprobs(student, build(packs, layout))
        same = logprobs(student, build(recorded(packs, own), layout))
        others = [(ids.reshape(-1, LAYERS, CHOSEN) + 3) % EXPERTS for ids in own]
        batch = build(recorded(packs, [ids.reshape(len(ids), -1) for ids in others]), layout)
        sent = logprobs(student, batch)
    torch.testing.assert_close(same, free, atol=2e-5, rtol=0)
    assert float((sent - free).abs().mean()) > 1e-3
    assert student._routing is not None
    assert batch.experts is not None
    where = batch.experts[:, 0] >= 0
    assert torch.equal(student._routing.chosen()[where], batch.experts[where])


def test_gates_are_the_students_own_and_learn(mixtures: Callable[[str], Path], pack: Callable[..., Pack]) -> None:
    """With recorded experts the router still has a gradient, also through recomputed layers; the same one."""
    folder, packs = mixtures("qwen3_moe"), [pack([9, 14], seed=0)]
    gradients = []
    for recompute in (False, True):
        student = load_student(folder, ALONE, Train(gradient_checkpointing=recompute))
        others = [(ids + 3) % EXPERTS for ids in chosen_by(student, packs)]
        logprobs(student, build(recorded(packs, others), student.layout)).sum().backward()
        gradients.append([w.grad for name, w in student.model.named_parameters() if name.endswith("gate.weight")])
    assert len(gradients[0]) == LAYERS
    for plain, again in zip(*gradients, strict=True):
        assert float(plain.abs().sum()) > 0
        torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("cause", ["bfloat16", "perturbed router"])
def test_with_replay_the_trainer_is_closer_to_its_sampler(
    mixtures: Callable[[str], Path], pack: Callable[..., Pack], cause: str
) -> None:
    """A sampler in float32; a trainer in bfloat16, or one whose routers moved a little: without replay a token near a
    tie goes elsewhere."""
    folder = mixtures("qwen3_moe")
    packs = [pack([60, 60, 60, 60], seed=seed) for seed in range(4)]
    sampler = load_student(folder, ALONE)
    own = chosen_by(sampler, packs)
    with torch.no_grad():
        sampled = logprobs(sampler, build(packs, sampler.layout))
    trainer = load_student(folder, ALONE, dtype=torch.bfloat16 if cause == "bfloat16" else torch.float32)
    if cause != "bfloat16":
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in trainer.model.named_parameters():
                if name.endswith("gate.weight"):
                    weight += 0.02 * torch.randn(weight.shape, generator=noise)
    gaps = {}
    for replayed in (False, True):
        if replayed:
            packs = recorded(packs, own)
        with torch.no_grad():
            gaps[replayed] = float((logprobs(trainer, build(packs, trainer.layout)) - sampled).abs().mean())
    assert gaps[True] < 0.8 * gaps[False], gaps


def test_experts_of_another_model_are_refused(
    mixtures: Callable[[str], Path], policy: Path, pack: Callable[..., Pack]
) -> None:
    packs = recorded([pack([9], seed=0)], [np.zeros((8, LAYERS * CHOSEN), np.int16)])
    with pytest.raises(MismatchError, match="Qwen3ForCausalLM has no router to follow"):
        logprobs(load_student(policy, ALONE), build(packs))
    packs[0].experts = np.zeros((9, 12), np.int16)
    with pytest.raises(MismatchError, match="12 expert ids a token, the student chooses 4 in 2 layers"):
        logprobs(load_student(mixtures("qwen3_moe"), ALONE), build(packs))


def test_a_router_that_does_not_choose_by_topk_says_so() -> None:
    class OtherTopKRouter(torch.nn.Module):
        top_k = 1

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(4))

        def forward(self, states: Tensor) -> Tensor:
            return (states @ self.weight).argmax(1)

    routing = Routing([module := OtherTopKRouter()])
    module(torch.eye(4))
    with pytest.raises(MismatchError, match="OtherTopKRouter does not choose its experts with one topk"):
        routing.chosen()
    routing.replay(torch.zeros(4, 1, dtype=torch.int16))
    with pytest.raises(MismatchError, match="OtherTopKRouter does not choose"):
        module(torch.eye(4))
