"""The result of a search: samples, as a condition of the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_MATCHES = 10_000
"""Samples from which on a search ends: the first of them in order of commit are its result."""


@dataclass(frozen=True)
class Matches:
    """The samples whose responses match."""

    sample_rows: NDArray[np.int64]
    is_cut: bool
    """Whether there are more than MOST_MATCHES."""
    condition: str
    """SQL that matches them in `mopd query`."""
