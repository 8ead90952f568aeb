"""Router replay: the experts of each token are recorded while it is decoded, and used again in training.

transformers' routers choose with one `topk` over their experts, and weigh by the scores of the chosen ones. That call
is observed, or answered with recorded ids: scores, normalisation and gradients stay the router's own.

Axes: N tokens, E layers with experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mopd_dataplane.errors import MismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NONE = -1
"""Marks expert ids that were not recorded: there the router chooses."""


class Routing:
    """The routers of a model, in layer order."""

    def __init__(self, routers: Iterable[nn.Module]) -> None:
        self._routers = [_Router(module) for module in routers]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routing | None:
        """Wrap a model's routers. Returns None when it has none whose top-k can be observed."""
        routers = [
            m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter") and hasattr(m, "weight")
        ]
        return cls(routers) if routers else None

    def chosen(self) -> Tensor:
        """Return the expert ids of the newest forward pass: [N, E * k] int16. Raises MismatchError when a router chose
        none."""
        return torch.cat([router.chosen() for router in self._routers], dim=1).to(torch.int16)

    def replay(self, ids: Tensor | None) -> None:
        """Use ids [N, E * k] in the forward passes from now on; None ends it. Where an id is NONE, the router chooses.

        The ids also serve the recomputation of checkpointed layers. Raises MismatchError for another E * k.
        """
        widths = [router.width for router in self._routers]
        if ids is not None and ids.shape[1] != sum(widths):
            raise MismatchError(
                f"samples have {ids.shape[1]} expert ids a token, the student chooses {sum(widths)} in {len(widths)} "
                "layers; train the model that sampled, or drop the samples"
            )
        parts = [None] * len(widths) if ids is None else ids.split(widths, dim=1)
        for router, part in zip(self._routers, parts, strict=True):
            router.replayed = part


class _Router(TorchFunctionMode):
    """One router: as a mode inside its forward pass, it answers every topk over [N, experts]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.replayed: Tensor | None = None
        self._ids: Tensor | None = None
        self._name = type(module).__name__
        self._experts = len(module.weight)  # type: ignore[arg-type]
        self.width = int(module.top_k)  # type: ignore[arg-type]
        self._forward = module.forward
        module.forward = self._watch

    def chosen(self) -> Tensor:
        """Return the ids of the newest pass: [N, k]."""
        if self._ids is None:
            raise MismatchError(
                f"{self._name} does not choose its experts with one topk, so they cannot be recorded; take "
                '"experts" out of rollout.record'
            )
        return self._ids

    def _watch(self, *args: Any, **kwargs: Any) -> Any:
        self._ids = None
        with self:
            said = self._forward(*args, **kwargs)
        if self.replayed is not None:
            self.chosen()  # raises if the router never called topk
        return said

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2 or args[0].shape[1] != self._experts:
            return own
        if self.replayed is None:
            self._ids = own.indices
            return own
        ids = self.replayed.to(args[0].device, torch.int64)
        self._ids = torch.where(ids == NONE, own.indices, ids)
        return torch.return_types.topk((args[0].gather(1, self._ids), self._ids))  # type: ignore[attr-defined]
