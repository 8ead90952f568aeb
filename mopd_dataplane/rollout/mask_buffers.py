"""Sampling masks of an engine's step, and of a sample that is being written."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.sampling_masks import SamplingMasks


def sampling_masks_of(inside: NDArray[np.bool_], asked: NDArray[np.bool_]) -> SamplingMasks:
    """Sampling masks of the rows that are `asked` for [B]; inside [B, V]: the tokens that each row may draw."""
    kept = inside & asked[:, None]
    sizes = kept.sum(axis=1, dtype=np.int32)
    uncut = sizes == inside.shape[1]
    kept[uncut], sizes[uncut] = False, 0
    return SamplingMasks(sizes, np.nonzero(kept)[1].astype(np.int32))


@dataclass(slots=True)
class PartialMasks:
    """Sampling masks of one sample's own tokens, in their order.

    A set is logged before the step that draws from it, so the newest may be of a token that was never logged; when
    the token is drawn again, its set comes again and replaces it.
    """

    sizes: array[int] = field(default_factory=lambda: array("i"))
    ids: array[int] = field(default_factory=lambda: array("i"))
    drawn: int = 0
    """Tokens that have drawn from their set."""

    def put(self, ordinal: int, ids: NDArray[np.integer]) -> None:
        """The set of the sample's own token of that ordinal. Raises ValueError when it is not one that comes next."""
        if not self.drawn <= ordinal <= len(self.sizes):
            raise ValueError(f"sampling mask of token {ordinal}, {self.drawn} tokens and {len(self.sizes)} sets so far")
        if dropped := sum(self.sizes[ordinal:]):
            del self.ids[-dropped:]
        del self.sizes[ordinal:]
        self.sizes.append(len(ids))
        self.ids.frombytes(ids.astype(np.int32).tobytes())

    def take(self, tokens: int) -> None:
        """The next tokens were drawn. Raises ValueError when the set of one is missing."""
        if self.drawn + tokens > len(self.sizes):
            raise ValueError(f"token {self.drawn + tokens - 1} has no sampling mask, {len(self.sizes)} sets so far")
        self.drawn += tokens

    def __len__(self) -> int:
        """Sets, with those that no token has drawn from yet."""
        return len(self.sizes)

    def first(self, count: int) -> SamplingMasks:
        """The first `count` sets (a copy)."""
        sizes = np.array(self.sizes[:count], np.int32)
        return SamplingMasks(sizes, np.array(self.ids[: int(sizes.sum())], np.int32))
