"""Readers turn token ids into hidden states: a transformers model in this process, or vLLM (see vllm_states.py).

States are always those that the LM head reads, after the final norm; the head is applied in this process.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from mopd_kernels.heads import Head
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from mopd_dataplane.models import hf
from mopd_dataplane.score.model_input import IntArrays


class Reader(Protocol):
    """One teacher, ready to read."""

    @property
    def head(self) -> Head:
        """LM head, which turns its states into logits."""

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """[sum of M, D] final-norm state before each predicted token, sequence after sequence.

        predicted: [M] positions in each sequence.
        """

    def close(self) -> None:
        """Free what the teacher holds."""


class HfReader:
    """A transformers model in this process."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    def head(self) -> Head:
        """The model's own head."""
        return hf.lm_head(self.model)

    @torch.no_grad()
    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """See Reader; all sequences in one pass, in rows padded on the right: under causal attention no real token sees
        the padding, so no mask is needed."""
        ids = pad_sequence([torch.from_numpy(tokens) for tokens in sequences], batch_first=True)
        states = hf.hidden_states(self.model, ids.to(self.model.device)).flatten(0, 1)
        predictors = np.concatenate([row * ids.shape[1] + positions - 1 for row, positions in enumerate(predicted)])
        return states[torch.from_numpy(predictors).to(states.device)]

    def close(self) -> None:
        """Nothing outlives the object."""
