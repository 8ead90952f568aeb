"""Agreement of student and teacher on their likeliest tokens: the diagnostics of Rethinking OPD (arXiv 2604.13016).

Axes: M trained tokens, D student and Dt teacher width, k likeliest tokens of each model. p is the student, q the
teacher, S_p and S_q their k likeliest tokens, S = S_p ∩ S_q.
"""

from typing import NamedTuple

import torch
from mopd_kernels import chosen_logprobs, topk_logprobs
from mopd_kernels.heads import Head
from torch import Tensor


class TopkAgreement(NamedTuple):
    """Agreement at each trained token; every field is [M] f32."""

    overlap_ratio: Tensor
    """|S| / k"""
    overlap_mass: Tensor
    """Probability of the student that the shared tokens hold: sum over S of p"""
    overlap_teacher_mass: Tensor
    """Probability of the teacher that the shared tokens hold: sum over S of q"""
    overlap_advantage: Tensor
    """mean over S of p̄ (log q̄ - log p̄), both renormalised on S, nats; 0 where S is empty. Never positive, and 0 when
    the two agree on the shared tokens."""
    entropy_gap: Tensor
    """|H(q) - H(p)| over the whole vocabulary, nats"""


@torch.no_grad()
def measure_topk_agreement(
    student_hidden: Tensor, student_head: Head, teacher_hidden: Tensor, teacher_head: Head, k: int
) -> TopkAgreement:
    """Measure the agreement at each trained token. student_hidden [M, D], teacher_hidden [M, Dt].

    k is cut to the smaller vocabulary.
    """
    columns = min(len(student_head.weight), len(teacher_head.weight))
    k = min(k, columns)
    student = (student_hidden, student_head)
    ids, log_p = topk_logprobs(*student, k, vocab_size=columns)
    log_q, teacher_entropy = chosen_logprobs(teacher_hidden, teacher_head, ids, vocab_size=columns)
    teachers, _ = topk_logprobs(teacher_hidden, teacher_head, k, vocab_size=columns)
    _, student_entropy = chosen_logprobs(*student, ids[:, :1], vocab_size=columns)
    shared = (ids[:, :, None] == teachers[:, None, :]).any(2)
    size = shared.sum(1)
    p, q = (torch.where(shared, value, -torch.inf).log_softmax(1) for value in (log_p, log_q))
    advantage = torch.where(shared, p.exp() * (q - p), 0.0).sum(1) / size.clamp(min=1)
    return TopkAgreement(
        overlap_ratio=size.float() / k,
        overlap_mass=torch.where(shared, log_p.exp(), 0.0).sum(1),
        overlap_teacher_mass=torch.where(shared, log_q.exp(), 0.0).sum(1),
        overlap_advantage=torch.where(size > 0, advantage, 0.0),
        entropy_gap=(teacher_entropy - student_entropy).abs(),
    )
