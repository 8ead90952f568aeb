"""A divergence of another package (job/objectives.py) over the whole vocabulary, computed in parts of the tokens.

Logits of a part are computed again in the backward pass: memory holds [n, V] of one part, never of all tokens. The
kernels' own divergences need no such passes and are several times faster.
"""

import torch
from mopd_kernels.heads import Head
from mopd_kernels.reference import logits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.objectives import Divergence, DivergenceTerm

PART = 1 << 24
"""Number of logits of one model in memory at once."""


def plugin_divergence(
    kind: Divergence, term: DivergenceTerm, hidden: Tensor, head: Head, states: Tensor, teacher: Head
) -> Tensor:
    """Compute the divergence of each token: [N] f32, differentiable in hidden [N, Ds] and in the student's head.

    states: [N, Dt] hidden states of the teacher.
    Raises MismatchError when the divergence returns anything but one number per row.
    """
    vocabulary = min(len(head.weight), len(teacher.weight))

    def logprobs(rows: Tensor, of: Head) -> Tensor:
        wide = Head(of.weight.float(), None if of.bias is None else of.bias.float(), of.softcap, of.logit_scale)
        return logits(rows.float(), wide, temperature=term.temperature, vocab_size=vocabulary).log_softmax(-1)

    def part(own: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            scored = logprobs(other, teacher)
        row_values = kind.rows(logprobs(own, head), scored, beta=term.beta, alpha=term.alpha)
        if row_values.shape != own.shape[:1]:
            raise MismatchError(
                f"divergence {term.kind!r} gave shape {list(row_values.shape)}, expected {[len(own)]}: one number a row"
            )
        return row_values.float()

    size = max(1, PART // vocabulary)
    parts = zip(torch.split(hidden, size), torch.split(states, size), strict=True)
    rows = [checkpoint(part, own, other, use_reentrant=False) for own, other in parts]
    return torch.cat([hidden.new_zeros(0, dtype=torch.float32), *rows])
