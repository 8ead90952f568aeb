"""Log-probabilities of k tokens of every row, the k largest or k given ones, as a scoring pass stores them.

Axes: N rows, D hidden width, V vocabulary, k stored tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from mopd_kernels.checks import check_rows, check_token_ids
from mopd_kernels.dispatch import row_functions
from mopd_kernels.epilogue import Epilogue
from mopd_kernels.heads import Head
from mopd_kernels.ops.operands import HeadOptions, Operands, operands_of
from mopd_kernels.sweep import Needs, Rows, sweep

Choice = Callable[[Rows, Tensor, Epilogue], Tensor]
"""Chooses ids [C, k] of the rows of a chunk from their raw products [C, V]."""


def topk_logprobs(hidden: Tensor, head: Tensor | Head, k: int, **options: Unpack[HeadOptions]) -> tuple[Tensor, Tensor]:
    """Compute the k largest log-probs, [N, k], normalised over the full vocabulary, and their ids [N, k] int64.

    Largest first, without gradient. Options: :class:`HeadOptions`. Raises ValueError for shapes or settings that do not
    fit together.
    """
    model = operands_of("topk_logprobs", "teacher", hidden, head, options)
    if not 1 <= k <= model.plan.columns:
        raise ValueError(f"k must lie in 1 .. {model.plan.columns} (the vocabulary), got {k}")
    monotone = model.head.bias is None and model.head.logit_scale > 0

    def largest(rows: Rows, z: Tensor, epilogue: Epilogue) -> Tensor:
        # Scale, softcap and temperature keep the order of the raw products; a bias does not.
        return (z if monotone else epilogue.apply(z)).topk(k, dim=1).indices

    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs, _ = _logprobs(model, hidden, ids, largest)
    return ids, logprobs


def chosen_logprobs(
    hidden: Tensor, head: Tensor | Head, token_ids: Tensor, **options: Unpack[HeadOptions]
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [N, k] of ``token_ids`` [N, k], normalised over the full vocabulary, and entropy [N]. No
    gradient.

    The ids may be another model's largest, as when a teacher scores the student's top-k. Options: :class:`HeadOptions`.
    Raises ValueError for shapes, ids or settings that do not fit together.
    """
    model = operands_of("chosen_logprobs", "teacher", hidden, head, options)
    check_rows(len(hidden), hidden.device, token_ids=token_ids)
    if token_ids.dim() != 2 or token_ids.shape[1] < 1:
        raise ValueError(f"token_ids must be [N, k], got {list(token_ids.shape)}")
    check_token_ids(token_ids, model.plan.columns)
    ids = token_ids.long()
    return _logprobs(model, hidden, ids, lambda rows, z, epilogue: ids[rows])


def _logprobs(model: Operands, hidden: Tensor, ids: Tensor, choose: Choice) -> tuple[Tensor, Tensor]:
    """Compute log-probs [N, k] of the chosen ids, which are written to ``ids``, and entropy [N]."""
    softmax = row_functions(model.plan.backend, "softmax")
    logprobs = torch.zeros(ids.shape, dtype=model.dtype, device=hidden.device)
    entropy = model.zeros()

    def step(segment: int, rows: Rows, z: Tensor, gradient: Tensor | None) -> None:
        softmax_rows = softmax.softmax_rows(z, model.epilogue)
        ids[rows] = choose(rows, z, model.epilogue)
        logprobs[rows] = softmax_rows.log_prob(model.epilogue.of_columns(z, ids[rows]))
        entropy[rows] = softmax_rows.entropy

    segments: list[Rows] = [slice(0, len(hidden))] if len(hidden) else []
    sweep(hidden, model.head.weight, None, segments=segments, plan=model.plan, needs=Needs(), step=step)
    return logprobs, entropy
