"""What the ops replace: the same losses on full [N, V] logits, in eager PyTorch. The yardstick of every bench."""

from __future__ import annotations

import torch.nn.functional as F
from mopd_kernels.testing import Inputs
from torch import Tensor


def reverse_kl(inputs: Inputs) -> Tensor:
    """Weighted sum of KL(student | teacher), as a trainer without fused ops writes it."""
    log_q = (inputs.student_hidden @ inputs.student_head.t()).float().log_softmax(-1)
    log_p = (inputs.teacher_hidden @ inputs.teacher_head.t()).float().log_softmax(-1)
    return (F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1) * inputs.weights).sum()


def forward_kl(inputs: Inputs) -> Tensor:
    log_q = (inputs.student_hidden @ inputs.student_head.t()).float().log_softmax(-1)
    log_p = (inputs.teacher_hidden @ inputs.teacher_head.t()).float().log_softmax(-1)
    return (F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * inputs.weights).sum()


def jsd(inputs: Inputs) -> Tensor:
    """beta = 1/2."""
    log_q = (inputs.student_hidden @ inputs.student_head.t()).float().log_softmax(-1)
    log_p = (inputs.teacher_hidden @ inputs.teacher_head.t()).float().log_softmax(-1)
    log_m = ((log_q.exp() + log_p.exp()) / 2).log()
    halves = F.kl_div(log_m, log_q, reduction="none", log_target=True) + F.kl_div(
        log_m, log_p, reduction="none", log_target=True
    )
    return (0.5 * halves.sum(-1) * inputs.weights).sum()


def logprob(inputs: Inputs) -> Tensor:
    """Weighted sum of sampled-token log-probs: its gradient is a policy gradient's."""
    logits = (inputs.student_hidden @ inputs.student_head.t()).float()
    return -(F.cross_entropy(logits, inputs.token_ids, reduction="none") * inputs.weights).sum()
