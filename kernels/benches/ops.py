"""The ops under test by name: ours, eager, and how many matrix products each cannot do without."""

from __future__ import annotations

from collections.abc import Callable

import eager
from mopd_kernels import divergence, fused_policy_loss, token_logprob
from mopd_kernels.testing import Inputs
from torch import Tensor

Op = Callable[[Inputs], Tensor]


def _divergence(kind: str, mode: str = "fast") -> Op:
    def op(inputs: Inputs) -> Tensor:
        loss: Tensor = divergence(
            inputs.student_hidden,
            inputs.student_head,
            inputs.teacher_hidden,
            inputs.teacher_head,
            kind=kind,  # type: ignore[arg-type]
            mode=mode,  # type: ignore[arg-type]
            weights=inputs.weights,
            reduction="sum",
        )
        return loss

    return op


def _logprob(inputs: Inputs) -> Tensor:
    logprobs = token_logprob(inputs.student_hidden, inputs.student_head, inputs.token_ids)
    assert isinstance(logprobs, Tensor)
    return (logprobs * inputs.weights).sum()


def _policy(inputs: Inputs) -> Tensor:
    return fused_policy_loss(
        inputs.student_hidden, inputs.student_head, inputs.token_ids, advantage=inputs.weights, clip=(0.2, 0.28)
    ).loss


OURS: dict[str, Op] = {
    "reverse": _divergence("reverse"),
    "forward": _divergence("forward"),
    "jsd": _divergence("jsd"),
    "skew_reverse": _divergence("skew_reverse"),
    "reverse lean": _divergence("reverse", "lean"),
    "logprob": _logprob,
    "policy": _policy,
}
EAGER: dict[str, Op] = {
    "reverse": eager.reverse_kl,
    "forward": eager.forward_kl,
    "jsd": eager.jsd,
    "logprob": eager.logprob,
    "policy": eager.logprob,
}


def products(name: str, *, trained_head: bool, backward: bool) -> tuple[int, int]:
    """(student, teacher) products of [N, D] x [D, V] size below which ``name`` cannot go without storing [N, V]."""
    teacher = 0 if name in ("logprob", "policy") else 1
    if not backward:
        return 1, teacher
    recomputed = 1 if name == "logprob" and trained_head else 0
    return 2 + trained_head + recomputed, teacher
