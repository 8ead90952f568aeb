"""One optimizer step: what changes it and what must not."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mopd_kernels import encode
from mopd_kernels.heads import Head
from safetensors.torch import save_file
from torch import Tensor

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.errors import DamagedError, EngineError, InputError, UnknownNameError
from mopd_dataplane.job.learning_rate import learning_rate
from mopd_dataplane.job.objectives import CrossEntropyTerm, DivergenceTerm, Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Train
from mopd_dataplane.records import Pack, StepMetrics
from mopd_dataplane.train import heads as heads_module
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.loop import Trainer
from mopd_dataplane.train.metrics import PADDING
from mopd_dataplane.train.microbatch import DeviceCopies
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.optimizer import make_optimizer
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.spec import HeadFile, Window
from mopd_dataplane.train.student import load_student

ALONE = Ranks(0, 1, torch.device("cpu"))
WINDOW = Window(window=0, plan_digest="p0", snapshot_digest="s0", steps=1, policy_version=2)
TEACHER_WIDTH = 24
OBJECTIVES = {
    "cross-entropy": Objective(cross_entropy=CrossEntropyTerm()),
    "opd": Objective(policy_gradient=PolicyGradientTerm(normaliser="sequence")),
    "mimo": Objective(policy_gradient=PolicyGradientTerm(student_logprob="current", correction="icepop", band=(0, 99))),
    "full-vocab": Objective(divergence=DivergenceTerm(), teacher_weights={"code": 2.0}),
}


@pytest.fixture
def heads(tmp_path: Path) -> dict[str, HeadFile]:
    """Head files of two teachers."""
    files = {}
    for number, name in enumerate(["math", "code"]):
        path = tmp_path / f"{name}.safetensors"
        weight = torch.randn(99, TEACHER_WIDTH, generator=torch.Generator().manual_seed(number))
        save_file({"weight": weight}, path, metadata={"logit_softcap": "0.0", "logit_scale": "1.0"})
        files[name] = HeadFile(path=str(path), digest=file_digest(path))
    return files


@pytest.fixture
def packs(pack: Callable[..., Pack]) -> list[Pack]:
    """Five packs of two teachers with logprobs and hidden states, in teacher order as a plan gives them."""
    teacher_packs = [
        pack([9, 14], seed=1, teacher="math", index=0),
        pack([7], seed=2, teacher="math", index=1),
        pack([11, 6, 8], seed=3, teacher="math", index=2),
        pack([16], seed=4, teacher="code", index=3),
        pack([5, 5], seed=5, teacher="code", index=4),
    ]
    for one in teacher_packs:
        states = torch.randn(
            int(one.loss_mask.sum()), TEACHER_WIDTH, generator=torch.Generator().manual_seed(one.index)
        )
        one.hidden, one.hidden_codec = encode(states, "bf16"), "bf16"
    return teacher_packs


def take_step(
    policy: Path,
    batch: Any,
    objective: Objective,
    heads: dict[str, HeadFile],
    *,
    layout: Any = "packed",
    step: int = 0,
    **settings: Any,
) -> tuple[StepMetrics, dict[str, Tensor], Trainer]:
    """Metrics, gradients and trainer after one step."""
    student = load_student(policy, ALONE)
    student.layout = layout
    trainer = Trainer(
        student, ObjectiveLoss(objective), Train(grad_clip=1e9, **settings), ALONE,
        TeacherHeads(heads, ALONE.device), ("math", "code"),
    )  # fmt: skip
    metrics = trainer.step(batch, WINDOW, step)
    return metrics, {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}, trainer


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_and_layout_never_change_loss_or_gradient(
    name: str, policy: Path, packs: list[Pack], batch: Callable[..., Any], heads: dict[str, HeadFile]
) -> None:
    whole, gradients, _ = take_step(policy, batch(packs), OBJECTIVES[name], heads, micro_batch_packs=1)
    assert gradients
    for settings in ({"micro_batch_packs": 2}, {"micro_batch_packs": 5}, {"micro_batch_packs": 3, "layout": "rows"}):
        metrics, split_gradients, _ = take_step(policy, batch(packs), OBJECTIVES[name], heads, **settings)
        assert metrics.loss == pytest.approx(whole.loss, rel=1e-5)
        padding = metrics.extra.pop(PADDING, None)  # two passes: six rows as wide as 14 tokens, three of 16
        assert padding == (pytest.approx(1 - 81 / (6 * 14 + 3 * 16)) if "layout" in settings else None)
        assert metrics.extra == pytest.approx(whole.extra, rel=1e-4, abs=1e-6, nan_ok=True)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(split_gradients[parameter], gradient, atol=2e-6, rtol=1e-4)


def test_a_step_reports_the_teacher_weights_it_used(
    policy: Path, packs: list[Pack], batch: Callable[..., Any], heads: dict[str, HeadFile]
) -> None:
    objective = Objective(divergence=DivergenceTerm(), teacher_weights={"code": ((0, 1.0), (10, 2.0))})
    metrics, scheduled, _ = take_step(policy, batch(packs), objective, heads, step=5)
    assert metrics.extra["teacher/code/weight"] == 1.5
    fixed = Objective(divergence=DivergenceTerm(), teacher_weights={"code": 1.5})
    same, gradients, _ = take_step(policy, batch(packs), fixed, heads, step=5)
    assert metrics.loss == same.loss
    for name, gradient in gradients.items():
        torch.testing.assert_close(scheduled[name], gradient)


def test_two_halves_of_a_global_step_sum_to_the_whole(
    policy: Path, packs: list[Pack], batch: Callable[..., Any], heads: dict[str, HeadFile]
) -> None:
    """What data-parallel ranks do: each holds some packs, all normalise by the counts of the step."""
    whole, gradients, _ = take_step(policy, batch(packs), OBJECTIVES["opd"], heads)
    total, loss = {name: torch.zeros_like(g) for name, g in gradients.items()}, 0.0
    for part in (packs[:1], packs[1:]):
        share = batch(part)
        share.loss_tokens, share.sequences = batch(packs).loss_tokens, batch(packs).sequences
        metrics, share_gradients, _ = take_step(policy, share, OBJECTIVES["opd"], heads)
        loss += metrics.loss
        for name in total:
            total[name] += share_gradients[name]
    assert loss == pytest.approx(whole.loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(total[name], gradient, atol=2e-6, rtol=1e-4)


def test_metrics_are_counts_and_means_of_the_batch(
    policy: Path, packs: list[Pack], batch: Callable[..., Any], heads: dict[str, HeadFile]
) -> None:
    packs[0].versions[:] = 1
    packs[3].rewards[:] = np.nan
    step = batch(packs)
    metrics, _, _ = take_step(policy, step, OBJECTIVES["full-vocab"], heads)
    assert (metrics.samples, metrics.tokens) == (9, sum(len(p.tokens) for p in packs))
    assert metrics.loss_tokens == step.loss_tokens
    younger, tokens = int(packs[0].loss_mask.sum()), step.loss_tokens
    assert metrics.staleness_max == 2
    assert metrics.staleness_mean == pytest.approx((2 * (tokens - younger) + younger) / tokens)
    by_teacher = [metrics.extra[f"teacher/{name}/reverse_kl"] for name in ("math", "code")]
    shares = [sum(int(p.loss_mask.sum()) for p in packs if p.teacher == name) for name in ("math", "code")]
    assert metrics.reverse_kl == pytest.approx(np.average(by_teacher, weights=shares))
    rewards = np.concatenate([p.rewards for p in packs])
    assert metrics.extra["reward"] == pytest.approx(np.nanmean(rewards))
    assert math.isnan(take_step(policy, step, OBJECTIVES["cross-entropy"], heads)[0].reverse_kl)


def test_each_pack_is_released_right_after_its_backward(
    policy: Path, packs: list[Pack], batch: Callable[..., Any], heads: dict[str, HeadFile]
) -> None:
    """A released pack's memory belongs to the loader: overwriting it must change nothing."""
    _, expected, _ = take_step(policy, batch(packs), OBJECTIVES["full-vocab"], heads)

    def overwrite(pack: Pack) -> None:
        for field in ("tokens", "loss_mask", "teacher_logprobs", "advantages"):
            getattr(pack, field)[:] = 77
        pack.hidden.fill_(255)

    step = batch(packs)
    step.on_release = overwrite
    _, gradients, _ = take_step(policy, step, OBJECTIVES["full-vocab"], heads)
    assert step.released == [0, 1, 2, 3, 4]
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient)


def test_a_pack_is_released_only_when_its_copy_has_ended(
    policy: Path, packs: list[Pack], batch: Callable[..., Any], heads: dict[str, HeadFile], monkeypatch
) -> None:
    """On a GPU the copy may still read the slot when the forward pass has been queued."""
    order: list[str] = []
    to_device, finish = DeviceCopies.to_device, DeviceCopies.finish
    monkeypatch.setattr(DeviceCopies, "to_device", lambda *args: order.append("copy") or to_device(*args))
    monkeypatch.setattr(DeviceCopies, "finish", lambda copies: order.append("finish") or finish(copies))
    step = batch(packs)
    step.on_release = lambda pack: order.append("release")
    take_step(policy, step, OBJECTIVES["full-vocab"], heads)
    assert order == ["copy", "finish", "release"] * len(packs)


def test_heads_switch_once_a_teacher_and_need_no_teacher_model(
    policy: Path, packs: list[Pack], batch: Callable[..., Any], heads: dict[str, HeadFile], monkeypatch
) -> None:
    moved: list[Head] = []
    on_device = heads_module._on_device
    monkeypatch.setattr(heads_module, "_on_device", lambda head, device: moved.append(head) or on_device(head, device))
    take_step(policy, batch(packs), OBJECTIVES["full-vocab"], heads)
    assert len(moved) == 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_pack_without_trained_tokens_changes_nothing(
    name: str,
    policy: Path,
    packs: list[Pack],
    batch: Callable[..., Any],
    heads: dict[str, HeadFile],
    pack: Callable[..., Pack],
) -> None:
    whole, gradients, _ = take_step(policy, batch(packs), OBJECTIVES[name], heads)
    mute = pack([6, 4], seed=9, teacher="code", index=5)
    for field in ("loss_mask", "sampler_logprobs", "teacher_logprobs"):
        getattr(mute, field)[:] = 0
    mute.hidden, mute.hidden_codec = encode(torch.zeros(0, TEACHER_WIDTH), "bf16"), "bf16"
    step = batch([*packs, mute])
    step.sequences -= 2  # the normaliser of the sequence mean is not what is tested here
    metrics, mute_gradients, _ = take_step(policy, step, OBJECTIVES[name], heads)
    assert metrics.loss == pytest.approx(whole.loss, rel=1e-6)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(mute_gradients[parameter], gradient)


def test_a_poisoned_batch_is_refused_and_the_policy_stays(
    policy: Path, packs: list[Pack], batch: Callable[..., Any], heads: dict[str, HeadFile]
) -> None:
    packs[2].teacher_logprobs[packs[2].loss_mask == 1] = np.nan
    before = load_student(policy, ALONE).state_dict()
    student = load_student(policy, ALONE)
    trainer = Trainer(student, ObjectiveLoss(OBJECTIVES["opd"]), Train(), ALONE)
    with pytest.raises(EngineError, match=r"step 7.*not applied"):
        trainer.step(batch(packs), WINDOW, 7)
    for name, tensor in student.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_training_on_one_batch_lowers_its_loss(policy: Path, packs: list[Pack], batch: Callable[..., Any]) -> None:
    trainer = Trainer(
        load_student(policy, ALONE), ObjectiveLoss(OBJECTIVES["cross-entropy"]), Train(learning_rate=3e-3), ALONE
    )
    losses = [trainer.step(batch(packs), WINDOW, step).loss for step in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_head_is_gone_before_the_next_one_arrives(
    heads: dict[str, HeadFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = TeacherHeads(heads, ALONE.device)
    first = weakref.ref(pool.get("math").weight)
    assert first() is not None
    alive: list[bool] = []
    inner = heads_module._on_device

    def arrive(head: Head, device: torch.device) -> Head:
        alive.append(first() is not None)
        return inner(head, device)

    monkeypatch.setattr(heads_module, "_on_device", arrive)
    pool.prefetch("code")
    pool.get("code")
    pool.close()
    assert alive == [False]


def test_a_missing_or_changed_head_file_is_named(heads: dict[str, HeadFile]) -> None:
    pool = TeacherHeads(heads, ALONE.device)
    with pytest.raises(UnknownNameError, match="did you mean 'math'"):
        pool.get("maths")
    path = Path(heads["math"].path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="sha256"):
        pool.get("math")
    Path(heads["code"].path).unlink()
    with pytest.raises(DamagedError, match="code"):
        pool.get("code")
    pool.close()


def test_schedules() -> None:
    warm = Train(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(warm, step, 0) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = Train(learning_rate=1.0, warmup_steps=2, schedule="linear")
    assert [learning_rate(linear, step, 6) for step in range(2, 7)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = Train(learning_rate=1.0, schedule="cosine")
    assert [learning_rate(cosine, step, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    with pytest.raises(InputError, match="number of steps"):
        learning_rate(cosine, 0, 0)


def test_weight_decay_spares_norms_and_biases(policy: Path) -> None:
    student = load_student(policy, ALONE)
    decayed, plain = make_optimizer(student, Train(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert {id(p) for g in (decayed, plain) for p in g["params"]} == {id(p) for p in student.parameters()}
