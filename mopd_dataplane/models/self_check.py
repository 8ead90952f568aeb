"""Self-check: compares the sampler, a teacher or the trainer with transformers' plain pass over the same text.

The plain pass reads one sequence alone, with plain attention, without a cache, and lets the model compute its own
logits. Everything that this package does differently (slots, masks, fused attention, its own LM head) must give the
same numbers; a model that fails is refused before anything is sampled or scored with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.base.memory import available_memory, is_out_of_memory
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models.adapter_files import weights_folder
from mopd_dataplane.models.architecture import context_length
from mopd_dataplane.models.devices import free_memory
from mopd_dataplane.models.hf import embedding_weight, hidden_states, lm_head
from mopd_dataplane.models.layer_types import LayerTypes

if TYPE_CHECKING:
    from mopd_kernels.heads import Head
    from transformers import PreTrainedModel

BANDS = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest mean difference of log-probs over the likeliest tokens, in nat. Correct float32 models of two layers stay
below 1e-5 and deep ones below 1e-4; a bfloat16 logit of 16 to 32 is rounded by up to 0.06. A lost window, softcap or
sink moves it by 0.3 nat and more."""
LARGEST_BAND = max(BANDS.values())
"""Band of a dtype without one of its own."""
_LIKELIEST = 32
"""Number of tokens compared at each position, the likeliest ones; log-probs of improbable tokens are mostly
rounding."""
_FEWEST, _FEWEST_PAST_WINDOW = 128, 512
"""Tokens that every model reads, and those with windows that they may pass."""
_FLOPS, _FLOPS_ON_DEVICE = 2.5e11, 2.5e14
"""Arithmetic of a check, in FLOP: a few seconds of two cores, so that a sampler, three teachers and a trainer take less
than half a minute (docs/models.md)."""
LONGEST_ON_HOST, _FLOPS_ON_HOST = 2048, 2e13
"""Length in tokens of the longest text of a plain pass on the host beside an engine of another process, and its
arithmetic in FLOP: half a minute on a server's CPU."""
_SHORT = 24
"""Length of the text that checks a scorer or trainer, in tokens."""


@dataclass(frozen=True)
class SelfCheck:
    """Result of a self-check that a model has passed, or that could not be made."""

    model: str
    """Class of the model, and its type in brackets."""
    dtype: str
    gap: float | None
    """Mean difference of log-probs in nat; None where the model's own logits are not finite, or the model does not fit
    into memory."""
    band: float
    """Largest mean difference that is allowed in the dtype, in nat."""
    tokens: int = 0
    """Length of the longest text that was read, in tokens; 0 where that was not recorded."""


def band_of(dtype: torch.dtype | str) -> float:
    """Return the largest mean difference of log-probs, in nat, that is allowed in a dtype, given itself or by name."""
    return BANDS.get(getattr(torch, dtype) if isinstance(dtype, str) else dtype, LARGEST_BAND)


def texts_to_check(prompts: Sequence[NDArray[Any]], longest: int) -> list[NDArray[np.int64]]:
    """Choose the texts [tokens] that the self-checks of a job read: its first prompt, and the longest one with made-up
    tokens behind it, up to `longest` tokens. prompts: [P] token ids of each; none gives no text."""
    if not prompts:
        return []
    long = max((prompt for prompt in prompts if len(prompt) <= longest), key=len, default=prompts[0])
    return [np.asarray(prompts[0], np.int64), np.concatenate([long, _made_up(max(0, longest - len(long)))])]


def check_text(model: PreTrainedModel, length: int) -> Tensor:
    """Return token ids [length] without an obvious pattern, the same ones every time."""
    return _readable(model, _made_up(length))


def affordable_texts(model: PreTrainedModel, texts: Sequence[NDArray[np.int64]]) -> list[Tensor]:
    """Put texts of a job on the model's device, each up to what the model reads and a self-check affords."""
    longest = min(affordable_tokens(model), context_length(model.config))
    return [_readable(model, text[:longest]) for text in texts]


def _made_up(length: int) -> NDArray[np.int64]:
    return np.arange(length, dtype=np.int64) * 7919 + 11


def _readable(model: PreTrainedModel, ids: NDArray[np.int64]) -> Tensor:
    """Token ids on the model's device, those beyond its vocabulary replaced by others."""
    return torch.from_numpy(ids % len(embedding_weight(model))).to(model.device)


def affordable_tokens(model: PreTrainedModel) -> int:
    """Return the length of the longest text, in tokens, that a self-check reads beside one half as long: twice, within
    seconds, and with plain attention and its logits in an eighth of the free memory."""
    device = model.device.type
    flops = _FLOPS if device == "cpu" else _FLOPS_ON_DEVICE
    free = available_memory() if device == "cpu" else free_memory(str(model.device))
    config = model.config.get_text_config()
    scores = 3 * 4 * int(getattr(config, "num_attention_heads", None) or 1)  # and masked, and their softmax; float32
    logits = 2 * 4 * len(embedding_weight(model))
    # Bytes of n tokens: scores * n^2 + logits * n.
    by_memory = (math.sqrt(logits**2 + scores * free / 2) - logits) / (2 * scores)
    fewest = _FEWEST_PAST_WINDOW if LayerTypes(model.config).longest_window else _FEWEST
    return max(fewest, int(min(flops / (6 * model.num_parameters()), by_memory)))


def affordable_on_host(parameters: int) -> int:
    """Return the length of the longest text, in tokens, that a model of this size reads on the CPU to check an engine
    of another process."""
    return max(64, min(LONGEST_ON_HOST, int(_FLOPS_ON_HOST / (2 * parameters))))


def fits_into_memory(folder: Path, device: str = "cpu") -> bool:
    """Check if a model of a folder can be loaded beside what is in memory: twice its files, since float32 takes two of
    bfloat16."""
    files = {file for part in {folder, weights_folder(folder)} for file in part.glob("*.safetensors")}
    free = available_memory() if device == "cpu" else free_memory(device)
    return 2 * sum(file.stat().st_size for file in files) <= free


@torch.no_grad()
def plain_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Compute the logits of one sequence [T] by the model's own forward pass with plain attention: [T, V] float32."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    try:
        if attention != "eager":
            model.set_attn_implementation("eager")
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    finally:
        if attention != "eager":
            model.set_attn_implementation(attention)
        model.train(training)
    return logits


def require_same_logits(ours: Tensor, plain: Tensor, *, part: str, model: PreTrainedModel) -> SelfCheck:
    """Compare logits [T, V] with those of the plain pass.

    Raises MismatchError when the difference is above the band of the model's dtype. A model whose own logits are not
    finite is not judged: sampling, scoring and training report that with the sample in which it happens.
    """
    name, dtype = f"{type(model).__name__} ({model.config.model_type})", str(model.dtype).removeprefix("torch.")
    band = band_of(model.dtype)
    if not bool(plain.isfinite().all()):
        return SelfCheck(name, dtype, None, band, len(plain))
    likeliest = plain.topk(min(_LIKELIEST, plain.shape[1])).indices
    gaps = (ours.float().log_softmax(-1) - plain.log_softmax(-1)).gather(1, likeliest).abs().mean(1)
    gap = float(gaps.mean())
    if not gap <= band:  # also true for a gap of NaN
        first = int((~(gaps <= band)).nonzero()[0]) if (~(gaps <= band)).any() else 0
        raise MismatchError(
            f"{part} does not compute what {name} computes by itself: "
            f"log-probs differ by {gap:.3g} nat in the mean, from token {first} of the compared ones on, and "
            f"{band:g} is allowed in {dtype}. Nothing was written; use another "
            'model, or engine.kind = "vllm" and score.engine = "vllm"'
        )
    return SelfCheck(name, dtype, gap, band, len(plain))


def require_same_logprobs(
    gaps: Sequence[tuple[float, int]], model: PreTrainedModel, *, dtype: str, tokens: int, problem: str, advice: str
) -> SelfCheck:
    """Judge an engine of another process by its log-probs beside the plain pass of `model`.

    gaps: difference in nat and position of each token that was compared; without any there is no gap. tokens: length
    of the longest text. problem, advice: beginning and end of the message. Raises MismatchError when the mean
    difference is above the band of the dtype, and names the first position that is.
    """
    name, band = f"{type(model).__name__} ({model.config.model_type})", band_of(dtype)
    if not gaps:
        return SelfCheck(name, dtype, None, band, tokens)
    gap = float(np.mean([gap for gap, _ in gaps]))
    if not gap <= band:  # also true for a gap of NaN
        first = next(position for gap, position in gaps if not gap <= band)
        raise MismatchError(
            f"{problem}: they differ by {gap:.3g} nat in the mean from the plain pass of {name}, first at position "
            f"{first}, and {band:g} is allowed in {dtype}. Nothing was sampled. Likely causes: weights of another "
            f"version, another dtype or attention in the engine; {advice}"
        )
    return SelfCheck(name, dtype, gap, band, tokens)


@torch.no_grad()
def check_forward(model: PreTrainedModel, part: str, texts: Sequence[NDArray[np.int64]] = ()) -> SelfCheck:
    """Check that states and LM head, as scorer and trainer use them, are right, and that no token sees a later one.

    texts: read besides a short one that is made up here, each as far as is affordable (see texts_to_check).
    Raises MismatchError, see require_same_logits; also when the model's own code fails.
    """
    ids = check_text(model, _SHORT)
    training = model.training
    model.eval()
    try:
        plain = plain_logits(model, ids)
        head = lm_head(model)
        logits = _logits(model, ids, head)
        beside = _logits(model, torch.cat([ids[:-1], ids[:1]]), head)
        passed = [require_same_logits(logits, plain, part=part, model=model)]
        for text in affordable_texts(model, texts):
            ours = _logits(model, text, head)
            passed.append(require_same_logits(ours, plain_logits(model, text), part=part, model=model))
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise MismatchError(
            f"{part}: {type(model).__name__} ({model.config.model_type}) cannot read a short text: "
            f"{type(error).__name__}: {error!s:.300}; use another model"
        ) from error
    finally:
        model.train(training)
    if passed[0].gap is not None:
        _require_causal(logits[:-1], beside[:-1], passed[0], part=part)
    return _worst_of(passed)


def _worst_of(passed: Sequence[SelfCheck]) -> SelfCheck:
    """Combine the self-checks of one model on several texts: the largest gap, and the longest text."""
    gaps = [one.gap for one in passed if one.gap is not None]
    gap = max(gaps) if len(gaps) == len(passed) else None
    return replace(passed[0], gap=gap, tokens=max(one.tokens for one in passed))


def _logits(model: PreTrainedModel, ids: Tensor, head: Head) -> Tensor:
    """Compute the logits of one sequence [T] from states and LM head: [T, V] float32."""
    logits = hidden_states(model, ids[None])[0].float() @ head.weight.detach().float().T
    if head.bias is not None:
        logits = logits + head.bias.detach().float()
    logits = logits * head.logit_scale
    return head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits


def _require_causal(logits: Tensor, beside: Tensor, passed: SelfCheck, *, part: str) -> None:
    """Check that two texts that differ only in their last token have the same logits before it. Raises
    MismatchError."""
    likeliest = logits.topk(min(_LIKELIEST, logits.shape[1])).indices
    gap = float((logits.log_softmax(-1) - beside.log_softmax(-1)).gather(1, likeliest).abs().mean())
    if not gap <= passed.band:
        raise MismatchError(
            f"{part}: tokens of {passed.model} see later ones, and log-probs move by {gap:.3g} nat in the mean "
            f"where {passed.band:g} is allowed in {passed.dtype}. It is no causal language model; set is_decoder = "
            "true in its config.json if it was trained as one, or use another model"
        )
