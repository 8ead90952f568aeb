"""The k largest log-probabilities of every row: what a scoring pass stores of a teacher.

Axes: N rows, D hidden width, V vocabulary, k stored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mopd_kernels.checks import check_hidden, check_weights, common_vocabulary
from mopd_kernels.dispatch import Backend, make_plan
from mopd_kernels.heads import Head, as_head, compute_dtype, operand_dtype
from mopd_kernels.ops.token_logprob import sampled_columns
from mopd_kernels.sweep import Needs, Rows, sweep


def topk_logprobs(
    hidden: Tensor,
    head: Tensor | Head,
    k: int,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logit_rows: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Ids [N, k] int64 and log-probs [N, k], largest first, normalised over the full vocabulary. No gradient.

    Arguments as in :func:`token_logprob`. Raises ValueError for shapes or settings that do not fit together.
    """
    count = check_hidden("teacher", hidden, head)
    check_weights(None, temperature)
    model = as_head("teacher", head, bias, softcap, logit_scale)
    columns = common_vocabulary(vocab_size, len(model.weight))
    if not 1 <= k <= columns:
        raise ValueError(f"k must lie in 1 .. {columns} (the vocabulary), got {k}")
    plan = make_plan(
        device=hidden.device,
        operand=operand_dtype(hidden, model.weight),
        rows=count,
        columns=columns,
        backend=backend,
        logit_rows=logit_rows,
    )
    if plan.backend == "triton":
        from mopd_kernels.triton_rows.softmax import softmax_rows
    else:
        from mopd_kernels.torch_rows.softmax import softmax_rows

    epilogue = model.epilogue(columns, temperature)
    monotone = model.bias is None and model.logit_scale > 0
    ids = torch.zeros(count, k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.zeros(count, k, dtype=compute_dtype(hidden, model.weight), device=hidden.device)

    def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
        found = softmax_rows(z, epilogue)
        # Scale, softcap and temperature keep the order of the raw products; a bias does not.
        ids[rows] = (z if monotone else epilogue.apply(z)).topk(k, dim=1).indices
        logprobs[rows] = found.log_prob(sampled_columns(z, epilogue, ids[rows]))

    sweep(
        hidden,
        model.weight,
        None,
        columns=columns,
        segments=[slice(0, count)] if count else [],
        plan=plan,
        needs=Needs(),
        step=step,
    )
    return ids, logprobs
