"""Readers turn token ids into hidden states: a transformers model in this process, or vLLM (see vllm_states.py).

States are always those that the LM head reads, after the final norm; the head is applied in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from mopd_kernels.heads import Head
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from mopd_dataplane.models import hf
from mopd_dataplane.score.states import predicting_states


class Reader(Protocol):
    """One teacher, ready to read."""

    @property
    def head(self) -> Head:
        """LM head, which turns its states into logits."""

    def predicting_states(
        self, sequences: Sequence[NDArray[np.int64]], predicted: Sequence[NDArray[np.int64]]
    ) -> Tensor:
        """[sum of M, D] final-norm state before each predicted token [M], sequence after sequence."""

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

    def predicting_states(
        self, sequences: Sequence[NDArray[np.int64]], predicted: Sequence[NDArray[np.int64]]
    ) -> Tensor:
        """See Reader; all sequences in one pass."""
        return predicting_states(self.model, sequences, predicted)

    def close(self) -> None:
        """Nothing outlives the object."""
