"""Sampling masks: the token ids that top-k and top-p left to draw each token from."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingMasks:
    """Sampling masks of B tokens."""

    sizes: NDArray[np.int32]
    """[B] size of each mask; 0 means that nothing was cut: the token was drawn from the whole vocabulary"""
    ids: NDArray[np.int32]
    """[sum of sizes] token ids, mask after mask"""

    def fits(self, needs_mask: NDArray[np.bool_]) -> bool:
        """Check that there is a mask for every row where `needs_mask` [B] is true, and an empty one elsewhere."""
        whole = self.sizes.dtype.kind in "iu" and self.ids.dtype.kind in "iu"
        if not whole or self.sizes.shape != needs_mask.shape or self.ids.ndim != 1 or (self.sizes < 0).any():
            return False
        return len(self.ids) == int(self.sizes[needs_mask].sum()) == int(self.sizes.sum())

    def holds(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return for each token [B] whether it could be drawn from its mask: [B] bool."""
        hits = np.concatenate([[0], np.cumsum(self.ids == np.repeat(tokens, self.sizes))])
        ends = np.cumsum(self.sizes)
        holds: NDArray[np.bool_] = (self.sizes == 0) | (hits[ends] > hits[ends - self.sizes])
        return holds


def sampling_masks_of(inside: NDArray[np.bool_], needs_mask: NDArray[np.bool_]) -> SamplingMasks:
    """Build the masks of the rows where `needs_mask` [B] is true. inside [B, V]: the tokens that each row may draw."""
    chosen = inside & needs_mask[:, None]
    sizes = chosen.sum(axis=1, dtype=np.int32)
    uncut = sizes == inside.shape[1]
    chosen[uncut], sizes[uncut] = False, 0
    return SamplingMasks(sizes, np.nonzero(chosen)[1].astype(np.int32))
