"""The input of a teacher: a sample, and its response after the prompt as the teacher reads it.

Axes: P teacher-prompt tokens, R response tokens, M loss-masked response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArrays = Sequence[NDArray[np.int64]]
"""Token ids of several sequences, or positions in each of them; an array for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorable:
    """The fields of a sample that scoring needs."""

    uid: str
    sample_row: int
    prompt_id: str
    prompt_len: int
    tokens: NDArray[np.int32]
    """[P + R] the student's prompt, then the response."""
    loss_mask: NDArray[np.uint8]
    """[R]"""
    logprobs: NDArray[np.float32] | None = None
    """[R] as sampled; None when the text was not sampled."""
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R] policy version of each response token; read for the student's top-k only."""
    temperature: float = 1.0
    """Temperature of the sampler, at which teacher log-probs are taken so that equal models agree; 0 (greedy) is 1."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A sample's response after the prompt as a model reads it."""

    sample: Scorable
    tokens: NDArray[np.int64]
    """[P + R]"""
    masked: NDArray[np.int64]
    """[M] positions of loss-masked tokens in `tokens`."""
