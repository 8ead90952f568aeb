"""A long text read by a transformers model in segments: each sees the keys and values of those before it.

One pass over a text takes memory for the states of all its tokens inside every layer, and a sliding window takes a mask
of the text's square. Segments take the cache of keys and values, of which layers with a window store that alone, and
the states and the mask of one segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from mopd_dataplane.models.architecture import text_decoder
from mopd_dataplane.models.hf import embedding_weight, hidden_states
from mopd_dataplane.models.layer_types import LayerTypes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

LONGEST_PASS = 65_536
"""Tokens of the longest text that is read in one pass where that needs no mask."""
MASK_CELLS = 1 << 26
"""Cells of the largest mask, or of the scores of all heads with plain attention: five bytes each, since torch turns
booleans into numbers."""
_SHORTEST, _LONGEST = 64, 8192
"""Tokens of a segment."""
_CHECKED, _CHECKED_WINDOW = 48, 1024
"""Tokens of the text that is read both ways beyond a window, and the longest window that it goes past."""
_ALIKE = 1e-2
"""Largest relative difference of the states of the two ways: products of other shapes round differently."""


class Segments:
    """Reads texts with one model; made once for each."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        types = LayerTypes(model.config)
        kinds = set(types.windows) if not types.has_states else {""}
        self._window = types.longest_window
        self._is_full = "full_attention" in kinds
        self._can_read = kinds <= {"full_attention", "sliding_attention"}
        self._is_checked = False
        heads = int(getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None) or 1)
        self._is_plain = model.config._attn_implementation == "eager"
        self._cells = MASK_CELLS // (heads if self._is_plain else 1)

    def is_better(self, tokens: int) -> bool:
        """Check if a text of this length should be read in segments, and if the model can."""
        longest = min(LONGEST_PASS, int(self._cells**0.5)) if self._window or self._is_plain else LONGEST_PASS
        if tokens <= longest or not self._can_read:
            return False
        if not self._is_checked:
            self._is_checked, self._can_read = True, self._reads_alike()
        return self._can_read

    def length(self, tokens: int) -> int:
        """Return the tokens of a segment of a text of this length: as many as MASK_CELLS allows, and no more than its
        window where every layer has one."""
        if self._is_full:
            return max(_SHORTEST, min(_LONGEST, self._cells // tokens))
        length = min(_LONGEST, max(self._window, _CHECKED_WINDOW))
        while length > _SHORTEST and length * (length + self._window) > self._cells:
            length //= 2
        return length

    def states(self, ids: Tensor) -> Tensor:
        """Compute the states [T, D] of one text [T] after the final norm, as hf.hidden_states does."""
        states: Tensor | None = None
        first = 0
        for part in self._parts(ids, self.length(len(ids))):
            if states is None:
                states = part.new_empty(len(ids), part.shape[1])
            states[first : first + len(part)] = part
            first += len(part)
        assert states is not None
        return states

    def _parts(self, ids: Tensor, length: int) -> Iterator[Tensor]:
        cache = DynamicCache(config=self._model.config)
        reads = text_decoder(self._model)
        for first in range(0, len(ids), length):
            part = ids[None, first : first + length]
            places = torch.arange(first, first + part.shape[1], device=ids.device)[None]
            output = reads(input_ids=part, position_ids=places, past_key_values=cache, use_cache=True)
            yield output.last_hidden_state[0]

    def _reads_alike(self) -> bool:
        """Read a short text in segments and at once, beyond its window if that is not long. A model whose own code
        fails with a cache, or computes something else, is read in one pass."""
        model = self._model
        length = _CHECKED + (self._window if self._window <= _CHECKED_WINDOW else 0)
        ids = (torch.arange(length, device=model.device) * 7919 + 11) % len(embedding_weight(model))
        try:
            parts = torch.cat(list(self._parts(ids, _CHECKED // 3))).float()
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
            return False
        whole = hidden_states(model, ids[None])[0].float()
        return bool((parts - whole).norm() <= _ALIKE * whole.norm())
