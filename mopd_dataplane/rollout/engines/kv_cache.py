"""A key/value cache with one row per live sequence, every row at its own length.

Column c of a row is absolute position c of its sequence, so rows need no padding and no shifting: a finished row is
overwritten by the last one, and a new sequence starts in the row behind.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 64
"""Columns are added in multiples of this."""


class SlotCache(Cache):
    """Cache of all layers. `place` says where the next forward pass writes; the layers follow."""

    def __init__(self, layers: int, rows: int) -> None:
        self.rows = rows
        self.columns = torch.zeros(0, dtype=torch.long)
        """[n] column that each row of the coming forward pass writes"""
        self.width = 0
        """Columns that the coming forward pass reads."""
        self._slots = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slots))

    def place(self, columns: Tensor, width: int) -> Tensor:
        """Announce a decode step of n rows, the furthest into column `width` - 1; returns its attention mask, bool
        [n, 1, 1, width]."""
        self.columns = columns
        self.width = width
        return (torch.arange(self.width, device=columns.device) <= columns[:, None])[:, None, None, :]

    def fill(self, rows: Tensor, prefill: Cache) -> None:
        """Copy the keys and values of a prefill pass over right-padded sequences into rows."""
        for layer, source in zip(self._slots, prefill.layers, strict=True):
            layer.fill(rows, source.keys, source.values)  # type: ignore[union-attr,arg-type]

    def move(self, source: int, target: int, width: int) -> None:
        """Copy the first `width` columns of one row over another."""
        for layer in self._slots:
            layer.keys[target, :, :width] = layer.keys[source, :, :width]
            layer.values[target, :, :width] = layer.values[source, :, :width]

    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        both = [tensor[0, :, :1] for layer in self._slots for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in both)

    def take(self, lengths: Sequence[int]) -> dict[str, Tensor]:
        """Keys and values of the first rows on the CPU: one row behind the other, [heads, sum(lengths), head_dim]."""
        taken = {}
        for index, layer in enumerate(self._slots):
            for name, rows in (("keys", layer.keys), ("values", layer.values)):
                parts = [rows[row, :, :length] for row, length in enumerate(lengths)]
                taken[f"{name}.{index}"] = torch.cat(parts, dim=1).cpu()
        return taken

    def put(self, lengths: Sequence[int], taken: dict[str, Tensor], device: str) -> None:
        """Write what `take` gave into the first rows."""
        for index, layer in enumerate(self._slots):
            keys, values = (taken[f"{name}.{index}"].to(device) for name in ("keys", "values"))
            parts = zip(keys.split(list(lengths), dim=1), values.split(list(lengths), dim=1), strict=True)
            for row, (its_keys, its_values) in enumerate(parts):
                layer.fill(torch.tensor([row], device=device), its_keys[None], its_values[None])


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """[rows, heads, columns, head_dim] keys and values of one layer."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per row, return the columns read."""
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
        """Nothing to prepare: columns are reserved when they are written."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns read, and the offset of the first."""
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        """Columns read by the current pass."""
        return self._cache.width

    def get_max_length(self) -> int:
        """-1: rows grow as needed."""
        return -1
