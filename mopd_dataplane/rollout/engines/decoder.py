"""One model that decodes rows side by side: keys and values of every row, logits of its next token.

Axes: N rows, T columns of a prefill block, D hidden width, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models.adapter_files import base_folder, is_adapter
from mopd_dataplane.models.hf import lm_head, load_model, weights_digest
from mopd_dataplane.models.router_replay import Routing
from mopd_dataplane.rollout.engines.kv_cache import SlotCache


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
        ids: NDArray[np.int16] = self._routing.chosen().cpu().numpy()
        return ids

    def prefill(self, rows: Sequence[int], block: NDArray[np.int64]) -> torch.Tensor:
        """Read right-padded sequences [N, T] into rows; their states [N, T, D]."""
        # Padding is on the right, so causal attention alone keeps it out of every real token's sight.
        cache = DynamicCache(config=self.model.config)
        inputs = torch.from_numpy(block).to(self._device)
        states: torch.Tensor = self.model.base_model(
            input_ids=inputs, past_key_values=cache, use_cache=True
        ).last_hidden_state
        self.cache.fill(torch.tensor(rows, device=self._device), cache)
        return states

    def forward(self, last: NDArray[np.int64], columns: NDArray[np.int64]) -> torch.Tensor:
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

    def logits(self, states: torch.Tensor) -> torch.Tensor:
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
