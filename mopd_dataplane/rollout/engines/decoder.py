"""One model that decodes rows side by side: caches keys and values of every row, computes logits of its next token.

When a row finishes, the last row takes its place; a new sequence starts in the row after the last (slot_cache.py).

Axes: N rows, T columns of a prefill block, D hidden width, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.base.memory import is_out_of_memory
from mopd_dataplane.errors import MismatchError, MopdError
from mopd_dataplane.models.adapter_files import base_folder, is_adapter
from mopd_dataplane.models.architecture import context_length, text_decoder
from mopd_dataplane.models.hf import lm_head, load_model, weights_digest
from mopd_dataplane.models.layer_types import LayerTypes
from mopd_dataplane.models.router_replay import Routing
from mopd_dataplane.models.self_check import (
    SelfCheck,
    affordable_texts,
    affordable_tokens,
    check_text,
    plain_logits,
    require_same_logits,
)
from mopd_dataplane.rollout.engines.slot_cache import SlotCache

_CACHE = "past_key_values"
"""Name of the cache in a model's forward pass; Mamba's models call it cache_params."""
_CHECK_TOKENS = 32
"""Length in tokens of the self-check's longer text for a model without windows."""
_CHECK_STEPS = 4
"""Number of tokens of the self-check's texts that are decoded step by step."""


class Decoder:
    """A stock transformers causal LM on one device.

    Raises UnknownNameError without weights, MismatchError for an unsupported architecture.
    """

    def __init__(self, folder: Path, *, rows: int, dtype: str, device: str) -> None:
        self.model = load_model(folder, dtype=dtype, device=device)
        self._device = device
        with self._own_code():
            self.layer_types = LayerTypes(self.model.config)
            self.layer_types.require_decodable()
            self._reads = text_decoder(self.model)
            taken = inspect.signature(self._reads.forward).parameters
            self._cache_name = "cache_params" if "past_key_values" not in taken and "cache_params" in taken else _CACHE
            self._routing = Routing.of(self.model)
        self._base = base_folder(folder) if is_adapter(folder) else None
        self.context_length = context_length(self.model.config)
        self.digest = weights_digest(folder)
        with self._own_code():
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
        """Replace the adapter on the loaded base. Returns False when the folder is no adapter on this base.

        Raises MismatchError when the adapter does not fit the base; the old one then stays active.
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
        """Clear the cache of all rows."""
        self.cache = SlotCache(self.layer_types, rows)
        if self.layer_types.has_states:  # the shapes of states are unknown until something was read
            everything = torch.arange(rows, device=self._device)
            with torch.inference_mode(), self._own_code():
                self.cache.fill(everything[:1], self._read(torch.zeros(1, 1, dtype=torch.int64))[1])
                self.cache.reset_states(everything)

    def routes(self) -> NDArray[np.int16]:
        """Return the expert ids of the newest pass: [tokens, W], W over all layers. Raises MismatchError without
        routers."""
        if self._routing is None:
            raise MismatchError(
                f'{type(self.model).__name__} has no router that can be read; take "experts" out of rollout.record'
            )
        return self._routing.chosen().cpu().numpy()

    def prefill(self, rows: Sequence[int], block: NDArray[np.int64], lengths: Sequence[int]) -> Tensor:
        """Read right-padded sequences [N, T], of `lengths` [N] tokens, into rows. Returns their states [N, T, D].

        Padding is on the right, so causal attention alone hides it from every real token. A recurrent layer would carry
        it on in its state, so models with one read sequence by sequence.
        """
        targets = torch.tensor(rows, device=self._device)
        ids = torch.from_numpy(block)
        with self._own_code():
            if not self.layer_types.has_states:
                states, cache = self._read(ids)
                self.cache.fill(targets, cache)
                return states
            self.cache.reset_states(targets)
            parts = []
            for row, own, length in zip(targets.split(1), ids.split(1), lengths, strict=True):
                if length:
                    states, cache = self._read(own[:, :length])
                    self.cache.fill(row, cache)
                    parts.append(torch.nn.functional.pad(states, (0, 0, 0, block.shape[1] - length)))
                else:
                    parts.append(torch.zeros(1, block.shape[1], self._head_weight.shape[1], device=self._device))
            return torch.cat(parts)

    def _read(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Read sequences [N, T] from their beginning. Returns states [N, T, D] and the cache of that pass."""
        cache = self.layer_types.prefill_cache()
        output = self._reads(input_ids=ids.to(self._device), use_cache=True, **{self._cache_name: cache})
        return output.last_hidden_state, cache

    def forward(self, last: NDArray[np.int64], columns: NDArray[np.int64]) -> Tensor:
        """Compute the logits [N, V] after the tokens `last` [N], which are at `columns` [N] of the first N rows."""
        places = torch.from_numpy(columns).to(self._device)
        with self._own_code():
            states = self._reads(
                input_ids=torch.from_numpy(last[:, None]).to(self._device),
                position_ids=places[:, None],
                attention_mask=self._as_attention_takes_it(self.cache.place(places, int(columns.max()) + 1)),
                use_cache=True,
                **{self._cache_name: self.cache},
            ).last_hidden_state
            return self.logits(states[:, 0])

    @torch.inference_mode()
    def check(self, texts: Sequence[NDArray[np.int64]] = ()) -> SelfCheck:
        """Decode the last tokens of texts side by side and compare with the plain pass of each alone. Clears the cache.

        texts: of a job, each read as far as is affordable; without any, two are made up, one of them longer than every
        window, unless that takes too long or too much memory.
        Raises MismatchError above the band of the dtype (self_check.py).
        """
        own = [text for text in affordable_texts(self.model, texts) if len(text) > _CHECK_STEPS]
        return self._check(own or self._made_up_texts())

    def _made_up_texts(self) -> list[Tensor]:
        past = self.layer_types.longest_window + 2 * _CHECK_STEPS
        length = max(_CHECK_TOKENS, past if past <= affordable_tokens(self.model) else 0)
        length = min(self.context_length, length)
        ids = check_text(self.model, length)
        return [ids, ids[: max(_CHECK_STEPS + 1, length // 2)]]

    def _check(self, texts: Sequence[Tensor]) -> SelfCheck:
        read = [len(text) - _CHECK_STEPS for text in texts]
        block = np.zeros((len(texts), max(read)), np.int64)
        for row, text in zip(block, texts, strict=True):
            row[: len(text) - _CHECK_STEPS] = text[:-_CHECK_STEPS].cpu().numpy()
        slots = self.cache.rows
        self.clear(len(texts))  # columns of every slot would take memory for texts that only two of them read
        self.prefill(range(len(texts)), block, read)
        steps = []
        for step in range(_CHECK_STEPS):
            last = np.array([int(text[count + step]) for text, count in zip(texts, read, strict=True)])
            steps.append(self.forward(last, np.array(read) + step))
        with self._own_code():
            plain = [plain_logits(self.model, text)[-_CHECK_STEPS:] for text in texts]
        ours = torch.stack(steps, 1).flatten(0, 1)
        passed = require_same_logits(ours, torch.cat(plain), part="The built-in sampler", model=self.model)
        self.clear(slots)
        return replace(passed, tokens=max(len(text) for text in texts))

    def _as_attention_takes_it(self, mask: Any) -> Any:
        """Convert boolean masks of visible columns to the form of the model's attention: plain attention adds them to
        scores."""
        if isinstance(mask, dict):
            return {name: self._as_attention_takes_it(own) for name, own in mask.items()}
        if mask is None or self.model.config._attn_implementation != "eager":
            return mask
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros_like(mask, dtype=self.model.dtype).masked_fill(~mask, lowest)

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        """Turn any error of a model's own code into a MismatchError that names the model."""
        try:
            yield
        except Exception as error:
            if isinstance(error, MopdError) or is_out_of_memory(error):
                raise
            raise MismatchError(
                f"{type(self.model).__name__} ({self.model.config.model_type}) cannot be decoded by the built-in "
                f'sampler: {type(error).__name__}: {error!s:.300}; set engine.kind = "vllm", or use another model'
            ) from error

    def logits(self, states: Tensor) -> Tensor:
        """Compute the float32 logits [N, V] of states [N, D] on their device, scaled and capped as the architecture
        does."""
        if states.device.type == "cpu":  # few rows by many: a third faster with the large matrix on the left
            logits = (self._head_weight @ states.float().T).T.contiguous()
        else:
            logits = states.float() @ self._head_weight.T
        if self._head_bias is not None:
            logits += self._head_bias
        logits *= self._logit_scale
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits
