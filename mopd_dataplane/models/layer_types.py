"""Types of a model's layers: which tokens each type sees, and if it caches keys and values or a state."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from mopd_dataplane.errors import MismatchError

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
RECURRENT = ("linear_attention", "conv", "moe", "mlp")
"""Layers without keys and values; `moe` and `mlp` layers cache nothing at all."""
BOTH = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Layers with a recurrent state and attention → the type of that attention."""


class LayerTypes:
    """How each layer of a model attends."""

    def __init__(self, config: PreTrainedConfig) -> None:
        text = config.get_text_config(decoder=True)
        self.names, arguments = get_layer_types_and_kwargs(text)
        self._arguments: list[dict[str, Any]] = _of_layers(self.names, arguments)
        self._model_type = text.model_type
        self.windows: dict[str, int] = {}
        """Layer type → number of tokens that its attention sees, the token itself included; 0 means all."""
        for name, own in zip(self.names, self._arguments, strict=True):
            if name not in RECURRENT:
                window = int(own.get("sliding_window") or 0)
                self.windows[name] = max(window, self.windows.get(name, 0))

    def require_decodable(self) -> None:
        """Raise MismatchError for layers that the built-in sampler cannot decode."""
        unknown = set(self.names) - {*ATTENTION, *RECURRENT, *BOTH}
        if unknown:
            raise MismatchError(
                f"{self._model_type} has layers of type {sorted(unknown)}, which the built-in sampler cannot decode; "
                f'it takes {", ".join([*ATTENTION, *RECURRENT, *BOTH])}; set engine.kind = "vllm", or use another '
                "model"
            )

    @property
    def has_states(self) -> bool:
        """True if some layer has a state that depends on all earlier tokens."""
        return any(name in BOTH or name in ("linear_attention", "conv") for name in self.names)

    @property
    def states_of_layers(self) -> list[int]:
        """Number of states of each kind that a layer has, for layers with any."""
        return [int(arguments.get("number_of_states") or 1) for arguments in self._arguments]

    @property
    def longest_window(self) -> int:
        """Number of tokens in the widest window or chunk; 0 without any."""
        return max(self.windows.values(), default=0)

    def prefill_cache(self) -> Cache:
        """Return an empty cache for one prefill pass, whose layers store every token."""
        layers: list[Any] = []
        for name, states in zip(self.names, self.states_of_layers, strict=True):
            if name in RECURRENT:
                layers.append(LinearAttentionLayer(states))
            else:
                layers.append(LinearAttentionAndFullAttentionLayer(states) if name in BOTH else DynamicLayer())
        return Cache(layers=layers)

    def masks(self, columns: Tensor, width: int) -> Any:
        """Return the mask of `width` columns for the token at each of `columns` [N]: bool [N, 1, 1, width], true where
        visible.

        It is one mask if all layers agree, otherwise one for each type of layer, as transformers' models expect.
        """
        places = torch.arange(width, device=columns.device)
        seen = places <= columns[:, None]
        masks: dict[str, Tensor | None] = {}
        for name, window in self.windows.items():
            kind = BOTH.get(name, name)
            if kind == "sliding_attention":
                visible = seen & (places > columns[:, None] - window)
            elif kind == "chunked_attention":
                visible = seen & (places // window == columns[:, None] // window)
            else:
                visible = seen
            masks[kind] = masks[name] = visible[:, None, None, :]
        if not masks:
            return None
        if len(masks) == 1 and not self.has_states:
            return next(iter(masks.values()))
        # A single token needs no mask in a recurrent layer: nothing in the row is padding.
        for name in self.names:
            if name not in self.windows or name in BOTH:
                masks["linear_attention" if name in BOTH else name] = None
        return masks


def _of_layers(names: list[str], arguments: list[dict[str, Any]] | dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each layer's cache. Up to 5.18 transformers gives one set for all layers."""
    if isinstance(arguments, list):
        return arguments
    windowed = {"sliding_attention", "chunked_attention", "hybrid_sliding"}
    shared = {name: value for name, value in arguments.items() if name != "sliding_window"}
    return [arguments if name in windowed else shared for name in names]
