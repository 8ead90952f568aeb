"""Divergences for a term of an objective: those that mopd_kernels computes, and other packages'.

Another package offers one as an entry point of `mopd.divergences`, or it is named `package.module:Name` as
`divergence.kind`. The trainer calls it on a part of the tokens at a time (train/plugin_divergence.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, get_args

from mopd_kernels.forms import Kind

from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import UnknownNameError

if TYPE_CHECKING:
    from torch import Tensor

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Those that mopd_kernels computes, with gradients of their own and from a stored top-k too."""


class Divergence(ABC):
    """A distance between two next-token distributions; made without arguments."""

    @abstractmethod
    def rows(self, student: Tensor, teacher: Tensor, *, beta: float, alpha: float) -> Tensor:
        """[n] nat, each from its own row only, differentiable with respect to `student`.

        student, teacher: [n, V] log-probs in float32 over the tokens that both know, at the term's temperature. beta,
        alpha: settings of the term. Called again in the backward pass, so that no [N, V] is kept.
        """


def divergence_kind(name: str) -> Divergence:
    """A divergence of another package. Raises UnknownNameError."""
    found: Any = find_plugin("mopd.divergences", name, dict.fromkeys(KINDS))
    if not (isinstance(found, type) and issubclass(found, Divergence)):
        raise UnknownNameError(f"divergence {name!r} is no class derived from {__name__}.Divergence")
    return found()
