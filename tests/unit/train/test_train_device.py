"""A training step on the stand-in device: the CPU's step, and nothing copied to the host but the step's figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mopd_kernels import encode
from safetensors.torch import save_file
from stand_in_device.stand_in import NAME, active

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.objectives import DivergenceTerm, Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Lora, Train
from mopd_dataplane.records import Pack
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.loop import Trainer
from mopd_dataplane.train.microbatch import build
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.run import full_weights
from mopd_dataplane.train.spec import HeadFile, Window
from mopd_dataplane.train.student import load_student

pytestmark = pytest.mark.device

WINDOW = Window(window=0, plan_digest="p0", snapshot_digest="s0", steps=1, policy_version=2)
FULL = Objective(
    divergence=DivergenceTerm(kind="reverse", signal="hidden"),
    policy_gradient=PolicyGradientTerm(student_logprob="current", correction="icepop", band=(0.5, 2.0)),
)
READ_BACK = {
    "train/optimizer.py:clip_gradients": "the gradient norm, which is checked and recorded",
    "train/loop.py:over_ranks": "the step's figures",
    "train/student.py:packs_apart": "one flag when a model is loaded",
}


def one_step(
    device: str,
    policy: Path,
    packs: list[Pack],
    batch: Callable[..., Any],
    folder: Path,
    copies: Counter[str],
    rank: int,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    head = folder / "head.safetensors"
    weight = torch.randn(99, 25, generator=torch.Generator().manual_seed(0))
    tensors = {"weight": weight[:, :24].contiguous(), "bias": weight[:, 24].contiguous()}
    save_file(tensors, head, metadata={"logit_softcap": "0.0", "logit_scale": "1.0"})
    ranks = Ranks.join(device, environment={})
    assert ranks.device.type == ("cpu" if device == "cpu" else NAME)
    heads = TeacherHeads({"math": HeadFile(path=str(head), digest=file_digest(head))}, ranks.device)
    student = load_student(policy, ranks, Train(gradient_checkpointing=True, lora=Lora(r=rank)))
    trainer = Trainer(student, ObjectiveLoss(FULL), Train(learning_rate=1e-2), ranks, heads, ("math",))
    copies.clear()
    metrics = trainer.step(batch(packs), WINDOW, 0)
    copied = dict(copies)
    heads.close()
    assert copied.keys() <= READ_BACK.keys(), copied
    return asdict(metrics), {name: value.float() for name, value in full_weights(student, ranks).items()}


@pytest.mark.parametrize("rank", [0, 4], ids=["weights", "adapter"])
def test_a_step_on_a_device_is_the_cpus(
    rank: int, policy: Path, pack: Callable[..., Pack], batch: Callable[..., Any], tmp_path: Path
) -> None:
    packs = [pack([9, 14], seed=1, teacher="math", index=0), pack([20], seed=2, teacher="math", index=1)]
    for one in packs:
        states = torch.randn(int(one.loss_mask.sum()), 24, generator=torch.Generator().manual_seed(one.index))
        one.hidden, one.hidden_codec = encode(states, "int8"), "int8"
    with active() as copies:
        (ours, our_weights), (theirs, their_weights) = (
            one_step(device, policy, packs, batch, tmp_path, copies, rank) for device in ("auto", "cpu")
        )
        for name in ("loss", "grad_norm", "reverse_kl", "tokens", "staleness_max"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
        for name, weight in our_weights.items():
            assert weight.is_cpu
            torch.testing.assert_close(weight, their_weights[name], rtol=0, atol=2e-3)


def test_every_tensor_of_a_batch_goes_to_the_device(pack: Callable[..., Pack]) -> None:
    """Also fields that a plug-in's signal added, which no term of ours reads."""
    one = pack([9, 14], seed=1, teacher="math", index=0)
    one.extra["margin"] = np.arange(len(one.tokens), dtype=np.float32)
    with active():
        moved = build([one]).to(torch.device(NAME))
        tensors = {name: value for name, value in vars(moved).items() if torch.is_tensor(value)} | moved.extra
        assert {name: value.device.type for name, value in tensors.items()} == dict.fromkeys(tensors, NAME)
        assert {"input_ids", "margin"} <= tensors.keys()


def test_more_ranks_than_devices_are_refused() -> None:
    with active(), pytest.raises(InputError, match=r"4 ranks on this node, which has 1 standin"):
        Ranks.join("auto", environment={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"})
