"""A step cut into forward passes: every sample once, within bounds, and the loss and gradients of the uncut step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mopd_kernels import encode
from safetensors.torch import save_file

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.job.objectives import CrossEntropyTerm, DivergenceTerm, Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Train
from mopd_dataplane.records import Pack
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.loop import Trainer
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.passes import Piece, cut_step, samples_of
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.spec import HeadFile, Window
from mopd_dataplane.train.student import load_student

ALONE = Ranks(0, 1, torch.device("cpu"))
WINDOW = Window(window=0, plan_digest="p0", snapshot_digest="s0", steps=1, policy_version=2)
TEACHER_WIDTH = 24
BATCHES = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(1, 40), min_size=1, max_size=6)), max_size=6)


def test_passes_never_mix_teachers() -> None:
    lengths = [[8]] * 5
    teachers = ["math", "math", "math", "code", "math"]
    places = [[piece.pack_index for piece in pieces] for pieces in cut_step(teachers, lengths, 2, 0)]
    assert places == [[0, 1], [2], [3], [4]]
    assert cut_step([], [], 2, 0) == []


def test_packs_are_cut_between_samples_where_the_tokens_end() -> None:
    assert cut_step(["a", "a"], [[5, 5, 5], [5, 20, 1]], 2, 10) == [
        [Piece(0, 0, 2)],
        [Piece(0, 2, 3), Piece(1, 0, 1)],
        [Piece(1, 1, 2)],
        [Piece(1, 2, 3)],
    ]


@given(batch=BATCHES, packs=st.integers(1, 3), tokens=st.integers(0, 60))
def test_every_sample_is_in_one_pass_within_the_bounds(
    batch: list[tuple[str, list[int]]], packs: int, tokens: int
) -> None:
    teachers, lengths = [teacher for teacher, _ in batch], [own for _, own in batch]
    passes = cut_step(teachers, lengths, packs, tokens)
    taken = [(piece.pack_index, sample) for piece in chain(*passes) for sample in range(piece.first, piece.last)]
    assert taken == [(pack_index, sample) for pack_index, own in enumerate(lengths) for sample in range(len(own))]
    for pieces in passes:
        pass_lengths = list(chain(*(lengths[piece.pack_index][piece.first : piece.last] for piece in pieces)))
        assert pass_lengths
        assert len({teachers[piece.pack_index] for piece in pieces}) == 1
        assert len({piece.pack_index for piece in pieces}) <= packs
        assert not tokens or sum(pass_lengths) <= tokens or len(pass_lengths) == 1


@pytest.fixture
def packs(pack: Callable[..., Pack]) -> list[Pack]:
    """Packs of two teachers with hidden states and top-k; one sample is longer than the bounds of these tests."""
    shapes = [("math", [9, 14, 30]), ("math", [7, 22, 6]), ("code", [50, 8, 11]), ("code", [5])]
    teacher_packs = [pack(lengths, seed=i, teacher=name, index=i) for i, (name, lengths) in enumerate(shapes)]
    for one in teacher_packs:
        trained, noise = int(one.loss_mask.sum()), torch.Generator().manual_seed(one.index)
        one.hidden, one.hidden_codec = encode(torch.randn(trained, TEACHER_WIDTH, generator=noise), "bf16"), "bf16"
        one.topk_ids = np.arange(2 * trained, dtype=np.int32).reshape(trained, 2) % 99
        one.topk_logprobs = np.full((trained, 2), -1.0, np.float32)
        one.sampling_mask_sizes = np.arange(trained, dtype=np.int32) % 3
        drawn = np.repeat(one.tokens[one.loss_mask.astype(bool)], one.sampling_mask_sizes)
        one.sampling_mask_ids = (drawn + np.arange(len(drawn)) % 2).astype(np.int32)
        one.sampling_mask_ids[np.cumsum(one.sampling_mask_sizes)[one.sampling_mask_sizes > 0] - 1] = one.tokens[
            one.loss_mask.astype(bool)
        ][one.sampling_mask_sizes > 0]
    return teacher_packs


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_parts_of_a_pack_are_the_pack(packs: list[Pack], kind: str) -> None:
    whole = packs[0]
    whole.experts = np.arange(4 * len(whole.tokens), dtype=np.int16).reshape(-1, 4)
    names = [name for name in whole.__slots__ if isinstance(getattr(whole, name), np.ndarray)]
    if kind == "torch":
        for name in names:
            setattr(whole, name, torch.as_tensor(getattr(whole, name)))
    assert samples_of(whole, 0, 3) is whole
    parts = [samples_of(whole, 0, 1), samples_of(whole, 1, 3)]
    assert [np.asarray(part.cu_seqlens).tolist() for part in parts] == [[0, 9], [0, 14, 44]]
    assert [np.asarray(part.version_starts).tolist() for part in parts] == [[0], [0, 14]]
    assert [np.asarray(part.policy_versions).max() for part in parts] == [0, 0]
    for name in set(names) - {"cu_seqlens", "version_starts"}:
        pieces = [np.asarray(getattr(part, name)) for part in parts]
        np.testing.assert_array_equal(np.concatenate(pieces), np.asarray(getattr(whole, name)))
        assert np.shares_memory(pieces[1], np.asarray(getattr(whole, name))), "a view"
    assert [(part.teacher, part.hidden_codec, part.index) for part in parts] == [("math", "bf16", 0)] * 2


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # in float64 there is nothing to lower
@pytest.mark.parametrize(
    ("objective", "off"),
    [
        (Objective(cross_entropy=CrossEntropyTerm()), 1e-13),
        (Objective(policy_gradient=PolicyGradientTerm(normaliser="sequence", student_logprob="current")), 1e-13),
        (Objective(divergence=DivergenceTerm(), teacher_weights={"code": 2.0}), 1e-7),
    ],
    ids=["cross-entropy", "policy-gradient", "divergence"],
)
def test_a_cut_step_is_the_uncut_step_in_float64(
    objective: Objective, off: float, policy: Path, packs: list[Pack], batch: Callable[..., Any], tmp_path: Path
) -> None:
    """Only the order of sums differs: a few units of 2^-53 in float64; divergences of a token are summed in float32."""
    heads = {}
    for number, name in enumerate(["math", "code"]):
        weight = torch.randn(99, TEACHER_WIDTH, generator=torch.Generator().manual_seed(number))
        save_file({"weight": weight}, tmp_path / name, metadata={"logit_softcap": "0.0", "logit_scale": "1.0"})
        heads[name] = HeadFile(path=str(tmp_path / name), digest=file_digest(tmp_path / name))

    def step(**settings: int) -> tuple[float, dict[str, float], dict[str, torch.Tensor], int, list[int]]:
        student = load_student(policy, ALONE)
        student.model.double()
        student.dtype = torch.float64
        loss = ObjectiveLoss(objective)
        trainer = Trainer(
            student, loss, Train(grad_clip=1e9, **settings), ALONE, TeacherHeads(heads, ALONE.device), ("math", "code")
        )
        passes: list[int] = []
        student.register_forward_hook(lambda module, inputs, output: passes.append(inputs[0].tokens))
        whole = batch(packs)
        metrics = trainer.step(whole, WINDOW, 0)
        assert whole.released == [0, 1, 2, 3], "each pack goes back once, when its last sample has been used"
        gradients = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
        return metrics.loss, metrics.extra, gradients, metrics.samples, passes

    loss, extra, gradients, samples, passes = step(micro_batch_packs=2)
    assert passes == [88, 74]
    for settings, cut in (
        ({"micro_batch_packs": 2, "micro_batch_tokens": 32}, [23, 30, 29, 6, 50, 24]),
        ({"micro_batch_packs": 1, "micro_batch_tokens": 1}, [9, 14, 30, 7, 22, 6, 50, 8, 11, 5]),
    ):
        found_loss, found_extra, found_gradients, found_samples, found_passes = step(**settings)
        assert found_passes == cut
        assert found_loss == pytest.approx(loss, rel=off)
        assert found_extra == pytest.approx(extra, rel=1e-6, nan_ok=True)
        assert found_samples == samples == 10
        assert found_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found_gradients[name], gradient, rtol=1e3 * off, atol=off)
