"""Readers turn token ids into hidden states: a transformers model in this process, or vLLM (see vllm_states.py).

States are always the input of the LM head, after the final norm. The head is applied in this process, so that
log-probs, top-k and hidden states come from the same kernels, whatever runs the teacher.

A teacher that is ready to score is one reader, or a blend: several readers whose logits are added with weights that sum
to 1. Reverse KL to the blend is the weighted sum of those to its teachers plus a constant (docs/objectives.md;
DeepSeek-V4, arXiv 2606.19348, eq. 29, on one sample). Since logits are linear in states and head, the blend is one head
[V, D_1 + D_2 + …] on states laid side by side, and everything that stores or reads signals sees an ordinary teacher.

Axes: P teacher-prompt tokens, R response tokens, M loss-masked response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from mopd_kernels import Head
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models import hf
from mopd_dataplane.score.segments import Segments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IntArrays = Sequence[NDArray[np.int64]]
"""One array for each sequence, with its token ids or positions in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorable:
    """The fields of a sample that scoring needs."""

    uid: str
    sample_row: int
    prompt_id: str
    prompt_len: int
    tokens: NDArray[np.int32]
    """[P + R] token ids of the student's prompt, then of the response."""
    loss_mask: NDArray[np.uint8]
    """[R]"""
    logprobs: NDArray[np.float32] | None = None
    """[R] log-probs of the sampler; None when the text was not sampled."""
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R] policy version of each response token; used only for the student's top-k."""
    temperature: float = 1.0
    """Temperature of the sampler, at which teacher log-probs are also computed, so that equal models agree. 0 (greedy)
    counts as 1."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A sample's response after the prompt in the form that a model reads."""

    sample: Scorable
    tokens: NDArray[np.int64]
    """[P + R]"""
    loss_positions: NDArray[np.int64]
    """[M] positions in `tokens` of the response tokens that are trained on, where the loss mask is 1."""


class Reader(Protocol):
    """One teacher, ready to compute states."""

    @property
    def head(self) -> Head:
        """LM head of the teacher, which turns its states into logits."""

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """Compute the final-norm state before each token at `predicted` [M], sequence after sequence: [sum of M, D]."""

    def close(self) -> None:
        """Free everything that the teacher holds."""


class HfReader:
    """A transformers model in this process."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = model
        self._segments: Segments | None = None

    @property
    def head(self) -> Head:
        return hf.lm_head(self.model)

    @torch.no_grad()
    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """See Reader. All sequences are in one pass, in rows padded on the right: causal attention hides the padding
        from every real token, so no mask is needed. Long ones are read one by one, in segments (segments.py)."""
        if self._segments is None:
            self._segments = Segments(self.model)
        if self._segments.is_better(max(map(len, sequences))):
            device = self.model.device
            return torch.cat(
                [
                    self._segments.states(torch.from_numpy(tokens).to(device))[torch.from_numpy(places - 1).to(device)]
                    for tokens, places in zip(sequences, predicted, strict=True)
                ]
            )
        ids = pad_sequence([torch.from_numpy(tokens) for tokens in sequences], batch_first=True)
        states = hf.hidden_states(self.model, ids.to(self.model.device)).flatten(0, 1)
        predictors = np.concatenate([row * ids.shape[1] + positions - 1 for row, positions in enumerate(predicted)])
        return states[torch.from_numpy(predictors).to(states.device)]

    def close(self) -> None:
        """Do nothing: the model is freed with the object."""


@dataclass(frozen=True)
class TeacherForward:
    """Teachers that are ready to compute states, and the weight of each."""

    readers: tuple[Reader, ...]
    weights: tuple[float, ...] = (1.0,)

    @cached_property
    def head(self) -> Head:
        """Head [V, sum of D] that turns `states` into logits. Raises MismatchError, see blended_head."""
        return blended_head([reader.head for reader in self.readers], self.weights)

    def states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """Compute the states before each predicted token: [sum of M, sum of D]. See Reader.predicting_states."""
        states = [reader.predicting_states(sequences, predicted) for reader in self.readers]
        return states[0] if len(states) == 1 else torch.cat(states, dim=1)


def blended_head(heads: Sequence[Head], weights: Sequence[float]) -> Head:
    """Join several heads [V, D] into one head [V, sum of D]; a single head is returned unchanged.

    Raises MismatchError when the heads of a blend differ in vocabulary or cap their logits.
    """
    if len(heads) == 1:
        return heads[0]
    rows = sorted({len(head.weight) for head in heads})
    if len(rows) > 1 or any(head.softcap for head in heads):
        raise MismatchError(
            f"teachers of a blend must have one vocabulary size and no softcap: found {rows} tokens and softcaps "
            f"{[head.softcap or 0.0 for head in heads]}; blend teachers of one family"
        )
    scales = [weight * head.logit_scale for weight, head in zip(weights, heads, strict=True)]
    weight = torch.cat([scale * head.weight.detach() for scale, head in zip(scales, heads, strict=True)], dim=1)
    biases = [s * head.bias.detach() for s, head in zip(scales, heads, strict=True) if head.bias is not None]
    return Head(weight, bias=torch.stack(biases).sum(0) if biases else None)
