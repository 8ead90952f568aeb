"""Exact distillation losses from hidden states and LM heads, without [N, V] logits.

    divergence         full-vocabulary reverse / forward KL, Jensen-Shannon, skewed KL
    topk_divergence    the same from a teacher stored as top-k log-probs
    topk_logprobs      the k largest log-probs of every row, as a scoring pass stores them
    token_logprob      log-prob and entropy of sampled tokens
    policy_loss        policy-gradient term over packed tokens: advantages, clip, IcePop / TIS / MIS
    fused_policy_loss  token_logprob and policy_loss in one pass
    token_weights      normalisers for packed tokens
    group_masses       sums of exponentials by groups of the vocabulary, from which a sampler draws
    encode, decode     compact bytes for stored hidden states; row_bytes gives the size of a row
    explain            which path a call takes and why
    reference          the definition of every op in a few lines of PyTorch

Names load on first use: ``row_bytes`` and the layouts need no torch.

Axes, in every file: N rows (response tokens), C rows of a chunk, D hidden width (Ds student, Dt teacher), V' tokens of
a head (Vs student, Vt teacher) and V those in use, W columns of a part of V, k stored tokens, U ids of the largest
sampling mask, G groups of a stored row or of the vocabulary, B columns or tokens of one Triton program at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mopd_kernels.layout import CODECS, row_bytes

if TYPE_CHECKING:
    from mopd_kernels import reference
    from mopd_kernels.codecs import LossyCodecWarning, decode, encode
    from mopd_kernels.dispatch import Plan, explain
    from mopd_kernels.heads import Head
    from mopd_kernels.normaliser import token_weights
    from mopd_kernels.ops.divergence import divergence
    from mopd_kernels.ops.fused_policy import PolicyResult, fused_policy_loss
    from mopd_kernels.ops.group_masses import group_masses
    from mopd_kernels.ops.policy import policy_loss
    from mopd_kernels.ops.token_logprob import token_logprob
    from mopd_kernels.ops.topk import topk_divergence
    from mopd_kernels.ops.topk_logprobs import chosen_logprobs, topk_logprobs
    from mopd_kernels.rowstate import RowState, RowStats, finish_row_state, merge_row_states

_HOMES = {
    **dict.fromkeys(("LossyCodecWarning", "decode", "encode"), "codecs"),
    **dict.fromkeys(("Plan", "explain"), "dispatch"),
    "Head": "heads", "token_weights": "normaliser", "divergence": "ops.divergence",
    **dict.fromkeys(("PolicyResult", "fused_policy_loss"), "ops.fused_policy"),
    "group_masses": "ops.group_masses", "policy_loss": "ops.policy", "token_logprob": "ops.token_logprob",
    "topk_divergence": "ops.topk",
    **dict.fromkeys(("chosen_logprobs", "topk_logprobs"), "ops.topk_logprobs"),
    **dict.fromkeys(("RowState", "RowStats", "finish_row_state", "merge_row_states"), "rowstate"),
}  # fmt: skip

__all__ = [
    "CODECS", "Head", "LossyCodecWarning", "Plan", "PolicyResult", "RowState", "RowStats", "chosen_logprobs", "decode",
    "divergence", "encode", "explain", "finish_row_state", "fused_policy_loss", "group_masses", "merge_row_states",
    "policy_loss", "reference", "row_bytes", "token_logprob", "token_weights", "topk_divergence", "topk_logprobs",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "reference":
        return importlib.import_module(f"{__name__}.reference")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
