"""One model that decodes rows side by side: keys and values of every row, logits of its next token.

Column c of a row of the cache is absolute position c of its sequence, so rows need no padding and no shifting: a
finished row is overwritten by the last one, and a new sequence starts in the row behind.

Axes: N rows, T columns of a prefill block, D hidden width, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models.adapter_files import base_folder, is_adapter
from mopd_dataplane.models.hf import lm_head, load_model, weights_digest
from mopd_dataplane.models.router_replay import Routing

_GROWTH = 64
"""Columns of the cache are added in multiples of this."""


class Decoder:
    """A stock transformers causal LM on one device.

    Raises UnknownNameError without weights, MismatchError for an unsupported architecture.
    """

    def __init__(self, folder: Path, *, rows: int, dtype: str, device: str) -> None:
        self.model = load_model(folder, dtype=dtype, device=device)
        config = self.model.config
        sliding = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
        if sliding:
            raise MismatchError(f"{folder}: layers of type {sorted(sliding)} are not supported; use full attention")
        self._device = device
        self._routing = Routing.of(self.model)
        self._base = base_folder(folder) if is_adapter(folder) else None
        self.context_length = int(config.max_position_embeddings)
        self.digest = weights_digest(folder)
        self._take_head()
        self.clear(rows)

    def _take_head(self) -> None:
        head = lm_head(self.model)
        self._head_weight = head.weight.detach().float()
        self._head_bias = None if head.bias is None else head.bias.detach().float()
        self._logit_scale = head.logit_scale
        self._softcap = head.softcap
        self.vocab_size = len(head.weight)

    def swap_adapter(self, folder: Path) -> bool:
        """Take another adapter on the base that is here; False when the folder holds anything else.

        Raises MismatchError when the adapter does not fit the base; the old one then still acts.
        """
        if self._base is None or not is_adapter(folder) or base_folder(folder) != self._base:
            return False
        from mopd_dataplane.models.adapters import replace_adapter

        digest = weights_digest(folder)
        if digest != self.digest:
            replace_adapter(self.model, folder)
            self.digest = digest
            self._take_head()
        return True

    def clear(self, rows: int) -> None:
        """Forget all keys and values."""
        self.cache = SlotCache(int(self.model.config.num_hidden_layers), rows)

    def routes(self) -> NDArray[np.int16]:
        """[tokens, W] expert ids of the newest pass, W over all layers. Raises MismatchError without routers."""
        if self._routing is None:
            raise MismatchError(
                f'{type(self.model).__name__} has no router that can be read; take "experts" out of rollout.record'
            )
        return self._routing.chosen().cpu().numpy()

    def prefill(self, rows: Sequence[int], block: NDArray[np.int64]) -> Tensor:
        """Read right-padded sequences [N, T] into rows; their states [N, T, D]."""
        # Padding is on the right, so causal attention alone keeps it out of every real token's sight.
        cache = DynamicCache(config=self.model.config)
        inputs = torch.from_numpy(block).to(self._device)
        states: Tensor = self.model.base_model(
            input_ids=inputs, past_key_values=cache, use_cache=True
        ).last_hidden_state
        self.cache.fill(torch.tensor(rows, device=self._device), cache)
        return states

    def forward(self, last: NDArray[np.int64], columns: NDArray[np.int64]) -> Tensor:
        """[N, V] logits behind the tokens `last` [N], which stand at `columns` [N] of the first N rows."""
        places = torch.from_numpy(columns).to(self._device)
        states = self.model.base_model(
            input_ids=torch.from_numpy(last[:, None]).to(self._device),
            position_ids=places[:, None],
            attention_mask=self.cache.place(places, int(columns.max()) + 1),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return self.logits(states[:, 0])

    def logits(self, states: Tensor) -> Tensor:
        """[N, V] float32 logits of states [N, D] on their device, as the architecture scales and caps them."""
        if states.device.type == "cpu":  # few rows against many: a third faster with the large matrix on the left
            logits = (self._head_weight @ states.float().T).T.contiguous()
        else:
            logits = states.float() @ self._head_weight.T
        if self._head_bias is not None:
            logits += self._head_bias
        logits *= self._logit_scale
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits


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
