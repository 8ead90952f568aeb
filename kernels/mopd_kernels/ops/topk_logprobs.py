"""Log-probabilities of k tokens of every row, the k largest or k given ones, as a scoring pass stores them.

Axes: N rows, D hidden width, V vocabulary, k stored tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mopd_kernels.checks import check_hidden, check_rows, check_token_ids, check_weights, common_vocabulary
from mopd_kernels.dispatch import Backend, make_plan
from mopd_kernels.epilogue import Epilogue
from mopd_kernels.heads import Head, as_head, compute_dtype, operand_dtype
from mopd_kernels.ops.token_logprob import sampled_columns
from mopd_kernels.sweep import Needs, Rows, sweep

Choice = Callable[[Rows, Tensor, Epilogue], Tensor]
"""Ids [C, k] of the rows of a chunk, from their raw products [C, V]."""


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
    monotone = model.bias is None and model.logit_scale > 0

    def largest(rows: Rows, z: Tensor, epilogue: Epilogue) -> Tensor:
        # Scale, softcap and temperature keep the order of the raw products; a bias does not.
        return (z if monotone else epilogue.apply(z)).topk(k, dim=1).indices

    ids = torch.zeros(count, k, dtype=torch.int64, device=hidden.device)
    logprobs, _ = _logprobs(hidden, model, ids, largest, temperature, columns, logit_rows, backend)
    return ids, logprobs


def chosen_logprobs(
    hidden: Tensor,
    head: Tensor | Head,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logit_rows: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probs [N, k] of ``token_ids`` [N, k], normalised over the full vocabulary, and entropy [N]. No gradient.

    The ids may be another model's largest, as when a teacher is asked about the student's top-k.
    Arguments as in :func:`token_logprob`. Raises ValueError for shapes, ids or settings that do not fit together.
    """
    count = check_hidden("teacher", hidden, head)
    check_rows(count, hidden.device, token_ids=token_ids)
    check_weights(None, temperature)
    if token_ids.dim() != 2 or token_ids.shape[1] < 1:
        raise ValueError(f"token_ids must be [N, k], got {list(token_ids.shape)}")
    model = as_head("teacher", head, bias, softcap, logit_scale)
    columns = common_vocabulary(vocab_size, len(model.weight))
    check_token_ids(token_ids, columns)
    ids = token_ids.long()
    return _logprobs(hidden, model, ids, lambda rows, z, epilogue: ids[rows], temperature, columns, logit_rows, backend)


def _logprobs(
    hidden: Tensor,
    model: Head,
    ids: Tensor,
    choose: Choice,
    temperature: float,
    columns: int,
    logit_rows: int | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Log-probs [N, k] of the chosen ids, which are written to ``ids``, and entropy [N]."""
    count = len(hidden)
    plan = make_plan(
        device=hidden.device, operand=operand_dtype(hidden, model.weight), rows=count, columns=columns,
        backend=backend, logit_rows=logit_rows,
    )  # fmt: skip
    if plan.backend == "triton":
        from mopd_kernels.triton_rows.softmax import softmax_rows
    else:
        from mopd_kernels.torch_rows.softmax import softmax_rows

    epilogue = model.epilogue(columns, temperature)
    dtype = compute_dtype(hidden, model.weight)
    logprobs = torch.zeros(ids.shape, dtype=dtype, device=hidden.device)
    entropy = torch.zeros(count, dtype=dtype, device=hidden.device)

    def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
        found = softmax_rows(z, epilogue)
        ids[rows] = choose(rows, z, epilogue)
        logprobs[rows] = found.log_prob(sampled_columns(z, epilogue, ids[rows]))
        entropy[rows] = found.entropy

    segments: list[Rows] = [slice(0, count)] if count else []
    sweep(hidden, model.weight, None, columns=columns, segments=segments, plan=plan, needs=Needs(), step=step)
    return logprobs, entropy
