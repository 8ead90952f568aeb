"""A trainer with a batch in ordinary memory: what the part `step` of `make gpu` measures."""

from pathlib import Path

import numpy as np
import torch
from mopd_kernels import encode
from safetensors.torch import save_file

from mopd_dataplane.base.files import file_digest
from mopd_dataplane.job.objectives import DivergenceTerm, Objective, PolicyGradientTerm
from mopd_dataplane.job.sections import Train
from mopd_dataplane.models.hf import load_head
from mopd_dataplane.records import Batch, Pack
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.loop import Trainer
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.spec import HeadFile
from mopd_dataplane.train.student import load_student

OBJECTIVE = Objective(
    divergence=DivergenceTerm(kind="reverse", signal="hidden"),
    policy_gradient=PolicyGradientTerm(student_logprob="current", correction="icepop", band=(0.5, 2.0)),
)
TEACHER, PROMPT = "teacher", 4


def trainer(policy: Path, folder: Path, width: int, device: str, *, bfloat16: bool) -> Trainer:
    """A trainer of the objective above, with one teacher's head of that width."""
    ranks = Ranks.join(device, environment={})
    head = folder / "head.safetensors"
    weight = load_head(policy, dtype="bfloat16").weight.detach().contiguous()
    assert weight.shape[1] == width
    save_file({"weight": weight}, head, metadata={"logit_softcap": "0.0", "logit_scale": "1.0"})
    heads = TeacherHeads({TEACHER: HeadFile(path=str(head), digest=file_digest(head))}, ranks.device)
    student = load_student(policy, ranks, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    return Trainer(student, ObjectiveLoss(OBJECTIVE), Train(), ranks, heads, (TEACHER,))


def random_batch(count: int, lengths: list[int], width: int) -> Batch:
    """`count` packs of sequences of these lengths, with int8 teacher states [M, width] at every trained token."""
    packs = [_pack(number, lengths, width) for number in range(count)]
    trained = sum(int(pack.loss_mask.sum()) for pack in packs)
    return Batch(stage="student", window=0, step=0, packs=packs, loss_tokens=trained, sequences=count * len(lengths))


def _pack(number: int, lengths: list[int], width: int) -> Pack:
    rng = np.random.default_rng(number)
    total = sum(lengths)
    mask = np.concatenate([np.arange(length) >= PROMPT for length in lengths]).astype(np.uint8)
    sampled = np.where(mask, -rng.gamma(2.0, 0.5, total), 0).astype(np.float32)
    states = torch.randn(int(mask.sum()), width, generator=torch.Generator().manual_seed(number))
    return Pack(
        index=number, teacher=TEACHER, tokens=rng.integers(4, 90, total).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), loss_mask=mask, sampler_logprobs=sampled,
        sample_rows=np.arange(len(lengths)), version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32),
        rewards=np.zeros(len(lengths), np.float32), advantages=np.zeros(len(lengths), np.float32),
        teacher_logprobs=sampled, hidden=encode(states, "int8"), hidden_codec="int8",
    )  # fmt: skip
