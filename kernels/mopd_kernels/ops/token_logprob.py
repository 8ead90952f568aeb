"""Log-probability (and entropy) of sampled tokens from hidden states and a head, differentiable, never [N, V].

Axes: N rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd_kernels.checks import check_hidden, check_rows, check_token_ids, check_weights, common_vocabulary
from mopd_kernels.dispatch import Backend, make_plan
from mopd_kernels.epilogue import Epilogue
from mopd_kernels.heads import Head, as_head, compute_dtype, operand_dtype
from mopd_kernels.rowloss import PassResult, row_loss
from mopd_kernels.sampling_mask import MaskColumns, check_sampling_mask
from mopd_kernels.sweep import Needs, Rows, sweep
from mopd_kernels.teachers import row_segments
from mopd_kernels.torch_rows.softmax import SoftmaxRows

IGNORED = -100
"""Token id of a row to skip, the Hugging Face convention."""


def sampled_columns(z: Tensor, epilogue: Epilogue, ids: Tensor) -> Tensor:
    """Logits [C, k] of the columns ``ids`` [C, k] of raw products z [C, V]."""
    return epilogue.gathered(ids).apply(z.gather(1, ids))


def write_logprob_gradient(
    z: Tensor,
    epilogue: Epilogue,
    rows: SoftmaxRows,
    ids: Tensor,
    logit: Tensor,
    logprob_factor: Tensor,
    entropy_factor: Tensor | None,
    gradient: Tensor,
    kept: MaskColumns | None,
    backend: str,
) -> None:
    """Gradient of ``a log q_y + e Ent`` into ``gradient`` [C, V]; ``logit`` [C] is the sampled token's.

    The sampled column is written by itself, as ``a (1 - q)``: added to ``-a q`` it would cancel in half precision.
    """
    if backend == "triton":
        from mopd_kernels.triton_rows.softmax import softmax_gradient
    else:
        from mopd_kernels.torch_rows.softmax import softmax_gradient

    log_q = rows.log_prob(logit[:, None])[:, 0]
    sampled = -logprob_factor * torch.expm1(log_q)
    if entropy_factor is not None:
        sampled = sampled - entropy_factor * log_q.exp() * (log_q + rows.entropy)
    softmax_gradient(z, epilogue, rows, -logprob_factor, entropy_factor, gradient)
    if kept is not None:
        kept.narrow(gradient)
    gradient.scatter_(1, ids[:, None], (sampled * epilogue.chain(logit)).to(gradient.dtype)[:, None])


def token_logprob(
    hidden: Tensor,
    head: Tensor | Head,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    sampling_mask: Tensor | None = None,
    return_entropy: bool = False,
    entropy_gradient: bool = True,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logit_rows: int | None = None,
    grad_rows: int | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of ``token_ids`` under ``softmax(hidden @ head.T / temperature)``.

    Args: hidden: [N, D] final hidden states; row i predicts token_ids[i]. head: [V', D], or a :class:`Head`; trained
    when it requires grad. ``vocab_size`` keeps only its first tokens. token_ids: [N] integer, 0 <= id < V, or -100 for
    a row to skip (zeros, no gradient). temperature: divides the logits. sampling_mask: [N, U] ids that the token was
    sampled from, -1 after the last: the softmax of that row is over these columns only, and no other has a gradient. A
    row of -1 is over the whole vocabulary. return_entropy: also return the entropy in nats; both outputs are
    differentiable, unless ``entropy_gradient`` is False: then the entropy costs no pass. bias, softcap, logit_scale:
    what the model does to its logits; the bias may be trained. logit_rows, grad_rows, backend: as in
    :func:`divergence`.

    Returns:
        [N], or ([N], [N]) with the entropy; float32 (float64 for float64 inputs).

    A frozen head takes the gradient in the forward pass; a trained one recomputes the logits (4 products), because
    every row has its own upstream gradient. :func:`fused_policy_loss` knows it and needs 3.

    Raises:
        ValueError: shapes, dtypes, ids or settings that do not fit together.
    """
    count = check_hidden("policy", hidden, head)
    check_rows(count, hidden.device, token_ids=token_ids)
    check_weights(None, temperature)
    model = as_head("policy", head, bias, softcap, logit_scale)
    columns = common_vocabulary(vocab_size, len(model.weight))
    check_token_ids(token_ids, columns, IGNORED)
    sampling_mask = check_sampling_mask(sampling_mask, token_ids, columns, IGNORED)
    dtype = compute_dtype(hidden, model.weight)
    plan = make_plan(
        device=hidden.device, operand=operand_dtype(hidden, model.weight), rows=count, columns=columns,
        backend=backend, logit_rows=logit_rows, grad_rows=grad_rows,
    )  # fmt: skip
    live = (token_ids != IGNORED).to(dtype)
    safe_ids = token_ids.clamp(min=0)

    def run(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        upstream: tuple[Tensor | None, ...] | None,
        needs: Needs,
    ) -> PassResult:
        if plan.backend == "triton":
            from mopd_kernels.triton_rows.softmax import softmax_rows
        else:
            from mopd_kernels.torch_rows.softmax import softmax_rows

        given = upstream or (None,)
        logprob_factor = live if given[0] is None and upstream is None else live * _or_zero(given[0], live)
        entropy_factor = None
        if return_entropy and entropy_gradient and upstream is not None and given[1] is not None:
            entropy_factor = live * given[1].to(dtype)
        logprob, entropy = torch.zeros_like(live), torch.zeros_like(live)
        epilogue = model.epilogue(columns, temperature)

        def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
            found = softmax_rows(z, epilogue)
            kept = None if sampling_mask is None else MaskColumns.of(sampling_mask[rows])
            if kept is not None:
                found = kept.softmax(found, z, epilogue)
            ids = safe_ids[rows]
            logit = sampled_columns(z, epilogue, ids[:, None])[:, 0]
            logprob[rows] = found.log_prob(logit[:, None])[:, 0] * live[rows]
            entropy[rows] = found.entropy * live[rows]
            if gradient is not None:
                e = None if entropy_factor is None else entropy_factor[rows]
                write_logprob_gradient(
                    z, epilogue, found, ids, logit, logprob_factor[rows], e, gradient, kept, plan.backend
                )

        segments = [rows for _, rows in row_segments(count, None, live, hidden.device)]
        gradients = sweep(hidden, weight, bias, columns=columns, segments=segments, plan=plan, needs=needs, step=step)
        outputs = (logprob, entropy) if return_entropy and entropy_gradient else (logprob,)
        return PassResult(outputs, () if entropy_gradient else (entropy,), gradients)

    outputs = 2 if return_entropy and entropy_gradient else 1
    result = row_loss(hidden, model.weight, model.bias, run, summed=False, outputs=outputs)
    return (result[0], result[1]) if return_entropy else result[0]


def _or_zero(upstream: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if upstream is None else upstream.to(like.dtype)
