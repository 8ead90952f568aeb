"""Cache of every live row of a decoder: keys and values of its tokens, and the states of recurrent layers.

Column c of a row is absolute position c of its sequence, so rows need no padding and no shifting. Layers with a sliding
window or chunks cache all columns too: the mask of a step hides the columns that a token must not see. Layers with
linear attention, convolutions or state-space recurrences have one state for each row, which each step overwrites.

Axes: N live rows, T columns, D hidden width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from mopd_dataplane.models.layer_types import BOTH, RECURRENT, LayerTypes

_GROWTH = 64
"""The number of columns grows in multiples of this."""


class SlotCache(Cache):
    """Cache of all layers. `place` sets where the next forward pass writes; the layers follow."""

    def __init__(self, types: LayerTypes, rows: int) -> None:
        self.rows = rows
        self.columns = torch.zeros(0, dtype=torch.long)
        """[N] column that the next forward pass writes in each row"""
        self.width = 0
        """Number of columns that the next forward pass reads."""
        self._types = types
        layers: list[Any] = []
        for name, states in zip(types.names, types.states_of_layers, strict=True):
            layer: Any
            if name in RECURRENT:
                layer = _StateSlots(self, states)
            else:
                layer = _BothSlots(self, states) if name in BOTH else _AttentionSlots(self)
            layers.append(layer)
        self._attention = [layer for layer in layers if isinstance(layer, _AttentionSlots)]
        self._states = [layer for layer in layers if isinstance(layer, _StateSlots)]
        super().__init__(layers=layers)

    def place(self, columns: Tensor, width: int) -> Any:
        """Prepare a decode step of N rows, the longest of which writes column `width` - 1. Returns its masks, see
        LayerTypes.masks."""
        self.columns = columns
        self.width = width
        for layer in self._states:
            layer.select(len(columns))
        return self._types.masks(columns, width)

    def fill(self, rows: Tensor, prefill: Cache) -> None:
        """Copy the cache of a prefill pass over right-padded sequences into rows."""
        for layer, source in zip(self.layers, prefill.layers, strict=True):
            if isinstance(layer, _AttentionSlots):
                layer.fill(rows, source.keys, source.values)  # type: ignore[union-attr,arg-type]
            if isinstance(layer, _StateSlots):
                layer.fill_states(rows, source)

    def reset_states(self, rows: Tensor) -> None:
        """Set the states of rows to those before the first token."""
        for layer in self._states:
            layer.reset_rows(rows)

    def move(self, source: int, target: int, width: int) -> None:
        """Copy the first `width` columns of one row over another, and its states."""
        for layer in self._attention:
            layer.keys[target, :, :width] = layer.keys[source, :, :width]
            layer.values[target, :, :width] = layer.values[source, :, :width]
        for states in self._states:
            states.move(source, target)

    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values over all layers."""
        both = [tensor[0, :, :1] for layer in self._attention for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in both)

    def take(self, lengths: Sequence[int]) -> dict[str, Tensor]:
        """Return keys and values of the first rows on the CPU, row after row: [heads, sum(lengths), head_dim]."""
        taken = {}
        for index, layer in enumerate(self._attention):
            for name, rows in (("keys", layer.keys), ("values", layer.values)):
                parts = [rows[row, :, :length] for row, length in enumerate(lengths)]
                taken[f"{name}.{index}"] = torch.cat(parts, dim=1).cpu()
        return taken

    def put(self, lengths: Sequence[int], taken: dict[str, Tensor], device: str) -> None:
        """Write the result of `take` into the first rows."""
        for index, layer in enumerate(self._attention):
            keys, values = (taken[f"{name}.{index}"].to(device) for name in ("keys", "values"))
            parts = zip(keys.split(list(lengths), dim=1), values.split(list(lengths), dim=1), strict=True)
            for row, (its_keys, its_values) in enumerate(parts):
                layer.fill(torch.tensor([row], device=device), its_keys[None], its_values[None])


class _AttentionSlots(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer: [rows, heads, columns, head_dim]."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per row. Returns the columns to read."""
        cache = self._cache
        self._reserve(cache.width, key_states, value_states)
        count = len(key_states)
        rows = torch.arange(count, device=key_states.device)
        self.keys[rows, :, cache.columns] = key_states[:, :, 0]
        self.values[rows, :, cache.columns] = value_states[:, :, 0]
        return self.keys[:count, :, : cache.width], self.values[:count, :, : cache.width]

    def fill(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write a block [n, heads, width, head_dim] into the first columns of rows."""
        width = keys.shape[2]
        self._reserve(width, keys, values)
        self.keys[rows, :, :width] = keys
        self.values[rows, :, :width] = values

    def _reserve(self, width: int, keys: Tensor, values: Tensor) -> None:
        if not self.is_initialized:
            self.keys = keys.new_zeros(self._cache.rows, keys.shape[1], 0, keys.shape[3])
            self.values = values.new_zeros(self._cache.rows, values.shape[1], 0, values.shape[3])
            self.is_initialized = True
        missing = width - self.keys.shape[2]
        if missing > 0:
            more = -(-max(missing, self.keys.shape[2] // 2) // _GROWTH) * _GROWTH
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, more))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, more))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: columns are reserved when they are written."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns to read, and the offset of the first."""
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        """Return the number of columns that the current pass reads."""
        return self._cache.width

    def get_max_length(self) -> int:
        """Return -1: rows grow as needed."""
        return -1


class _StateSlots(LinearAttentionLayer):
    """States of one recurrent layer, one for each row; the model sees views of the live rows."""

    def __init__(self, cache: SlotCache, states: int) -> None:
        LinearAttentionLayer.__init__(self, states)  # type: ignore[no-untyped-call]
        self._rows = cache.rows
        self._stored: dict[tuple[str, int], Tensor] = {}
        """[rows, …] states by (`conv_states` or `recurrent_states`, index within the layer)."""

    def fill_states(self, rows: Tensor, source: Any) -> None:
        """Copy the states of a prefill pass over unpadded sequences."""
        for kind in ("conv_states", "recurrent_states"):
            for index, state in getattr(source, kind).items():
                if state is not None:
                    if (kind, index) not in self._stored:
                        self._stored[kind, index] = state.new_zeros(self._rows, *state.shape[1:])
                    self._stored[kind, index][rows] = state

    def select(self, count: int) -> None:
        """Show the states of the first `count` rows to the next forward pass, which overwrites them."""
        for (kind, index), stored in self._stored.items():
            getattr(self, kind)[index] = stored[:count]
            getattr(self, f"is_{kind}_initialized")[index] = True
            self.has_previous_state[index] = True
            if kind == "conv_states":
                self.conv_kernel_size[index] = stored.shape[-1]
                self.dtype, self.device = stored.dtype, stored.device  # type: ignore[assignment]

    def reset_rows(self, rows: Tensor) -> None:
        for stored in self._stored.values():
            stored[rows] = 0

    def move(self, source: int, target: int) -> None:
        for stored in self._stored.values():
            stored[target] = stored[source]


class _BothSlots(_StateSlots, _AttentionSlots):  # type: ignore[override]
    """A layer with a recurrent state beside its attention."""

    def __init__(self, cache: SlotCache, states: int) -> None:
        _AttentionSlots.__init__(self, cache)
        _StateSlots.__init__(self, cache, states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: states and columns are reserved when they are written."""
