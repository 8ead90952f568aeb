"""The states that predict given tokens, many sequences in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from mopd_dataplane.models import hf


@torch.no_grad()
def predicting_states(
    model: PreTrainedModel, sequences: Sequence[NDArray[np.int64]], predicted: Sequence[NDArray[np.int64]]
) -> Tensor:
    """[sum of M, D] final-norm state before each predicted token, sequence after sequence.

    predicted: [M] positions in each sequence. Rows are padded on the right: under causal attention no real token sees
    the padding, so no mask is needed.
    """
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
    states = hf.hidden_states(model, ids.to(model.device)).flatten(0, 1)
    predictors = np.concatenate([row * width + positions - 1 for row, positions in enumerate(predicted)])
    return states[torch.from_numpy(predictors).to(states.device)]
