"""Log-probability (and entropy) of sampled tokens from hidden states and a head, differentiable, never [N, V].

Axes: N rows, D hidden width, V' tokens of the head, V of them in use, U ids of the largest sampling mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from mopd_kernels.checks import check_rows, check_token_ids
from mopd_kernels.dispatch import row_functions
from mopd_kernels.heads import Head
from mopd_kernels.ops.operands import HeadOptions, Operands, operands_of
from mopd_kernels.rowloss import PassResult, Upstream, row_loss
from mopd_kernels.sampling_mask import MaskColumns, check_sampling_mask
from mopd_kernels.sweep import Needs, Rows, sweep
from mopd_kernels.teachers import live_rows
from mopd_kernels.torch_rows.softmax import SoftmaxRows

IGNORED = -100
"""Token id of a row to skip, the Hugging Face convention."""


class ChunkOfTokens(NamedTuple):
    """The sampled tokens of a chunk of rows, with the logits from which they were sampled."""

    z: Tensor
    """[C, V] raw products"""
    softmax: SoftmaxRows
    in_mask: MaskColumns | None
    ids: Tensor
    """[C]"""
    logit: Tensor
    """[C] of the sampled token"""
    logprob: Tensor
    """[C] of the sampled token"""


@dataclass(frozen=True)
class SampledTokens:
    """One token of every row, with one model's head."""

    model: Operands
    ids: Tensor
    """[N] int64, 0 for a row to skip"""
    live: Tensor
    """[N] bool, false for a row to skip"""
    sampling_mask: Tensor | None

    @classmethod
    def of(cls, model: Operands, token_ids: Tensor, sampling_mask: Tensor | None) -> SampledTokens:
        """Check token ids and masks. Raises ValueError if they do not fit the model."""
        check_rows(model.rows, model.device, token_ids=token_ids)
        check_token_ids(token_ids, model.plan.columns, IGNORED)
        mask = check_sampling_mask(sampling_mask, token_ids, model.plan.columns, IGNORED)
        return cls(model, token_ids.clamp(min=0), token_ids != IGNORED, mask)

    def of_rows(self, rows: Rows, z: Tensor) -> ChunkOfTokens:
        """Return the tokens of one chunk, from its raw products z [C, V]."""
        epilogue = self.model.epilogue
        softmax_rows: SoftmaxRows = row_functions(self.model.plan.backend, "softmax").softmax_rows(z, epilogue)
        mask_columns = None if self.sampling_mask is None else MaskColumns.of(self.sampling_mask[rows])
        if mask_columns is not None:
            softmax_rows = mask_columns.softmax(softmax_rows, z, epilogue)
        ids = self.ids[rows]
        logit = epilogue.of_columns(z, ids[:, None])[:, 0]
        return ChunkOfTokens(z, softmax_rows, mask_columns, ids, logit, softmax_rows.log_prob(logit[:, None])[:, 0])

    def write_gradient(
        self, chunk: ChunkOfTokens, logprob_factor: Tensor, entropy_factor: Tensor | None, gradient: Tensor
    ) -> None:
        """Write the gradient of ``a log q_y + e Ent`` into ``gradient`` [C, V].

        The sampled column is written by itself, as ``a (1 - q)``: added to ``-a q`` it would cancel in half precision.
        """
        epilogue, log_q = self.model.epilogue, chunk.logprob
        sampled = -logprob_factor * torch.expm1(log_q)
        if entropy_factor is not None:
            sampled = sampled - entropy_factor * log_q.exp() * (log_q + chunk.softmax.entropy)
        row_functions(self.model.plan.backend, "softmax").softmax_gradient(
            chunk.z, epilogue, chunk.softmax, -logprob_factor, entropy_factor, gradient
        )
        if chunk.in_mask is not None:
            chunk.in_mask.narrow(gradient)
        sampled = (sampled * epilogue.chain(chunk.logit)).to(gradient.dtype)
        gradient.scatter_(1, chunk.ids[:, None], sampled[:, None])


def token_logprob(
    hidden: Tensor,
    head: Tensor | Head,
    token_ids: Tensor,
    *,
    sampling_mask: Tensor | None = None,
    return_entropy: bool = False,
    entropy_gradient: bool = True,
    **options: Unpack[HeadOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of ``token_ids`` under ``softmax(hidden @ head.T / temperature)``.

    Args: hidden: [N, D] final hidden states; row i predicts token_ids[i]. head: [V', D], or a :class:`Head`; trained
    when it requires grad. token_ids: [N] integer, 0 <= id < V, or -100 for a row to skip (zeros, no gradient).
    sampling_mask: [N, U] ids that the token was sampled from, -1 after the last: the softmax of that row is over these
    columns only, and no other has a gradient. A row of -1 is over the whole vocabulary. return_entropy: also return the
    entropy in nats; both outputs are differentiable, unless ``entropy_gradient`` is False: then the entropy costs no
    pass. options: :class:`HeadOptions`.

    Returns:
        [N], or ([N], [N]) with the entropy; float32 (float64 for float64 inputs).

    A frozen head takes the gradient in the forward pass; a trained one recomputes the logits (4 products), because
    every row has its own upstream gradient. :func:`fused_policy_loss` knows it while the logits exist, and needs 3.

    Raises:
        ValueError: shapes, dtypes, ids or settings that do not fit together.
    """
    model = operands_of("token_logprob", "policy", hidden, head, options)
    tokens = SampledTokens.of(model, token_ids, sampling_mask)
    live = tokens.live.to(model.dtype)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, upstream: Upstream, needs: Needs) -> PassResult:
        logprob_factor, entropy_factor = live, None
        if upstream is not None:
            logprob_factor = torch.zeros_like(live) if upstream[0] is None else live * upstream[0].to(model.dtype)
            if return_entropy and entropy_gradient and upstream[1] is not None:
                entropy_factor = live * upstream[1].to(model.dtype)
        logprob, entropy = model.zeros(), model.zeros()

        def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
            chunk = tokens.of_rows(rows, z)
            logprob[rows] = chunk.logprob * live[rows]
            entropy[rows] = chunk.softmax.entropy * live[rows]
            if gradient is not None:
                e = None if entropy_factor is None else entropy_factor[rows]
                tokens.write_gradient(chunk, logprob_factor[rows], e, gradient)

        gradients = sweep(hidden, weight, bias, segments=live_rows(live), plan=model.plan, needs=needs, step=step)
        outputs = (logprob, entropy) if return_entropy and entropy_gradient else (logprob,)
        return PassResult(outputs, () if entropy_gradient else (entropy,), gradients)

    outputs = 2 if return_entropy and entropy_gradient else 1
    result = row_loss(hidden, model.head.weight, model.head.bias, run, summed=False, outputs=outputs)
    return (result[0], result[1]) if return_entropy else result[0]
