"""The epilogue of a product: from ``hidden @ head.T`` to the logits of the softmax.

``x = cap * tanh(scale * (z + bias) / cap) / temperature`` with every part optional, in the order Hugging Face models
apply them (Cohere and Granite scale, Gemma 2 caps). Row kernels do the same in registers.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

LOGIT_FLOOR = -3.0e4
"""Smallest logit; lower ones are raised to it. A bias of -inf then means "forbidden" with a finite, very large reverse
KL."""


class Epilogue(NamedTuple):
    """Map from raw products ``z`` to logits ``x``."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    bias: Tensor | None = None
    """[V], or None."""

    def sliced(self, start: int, stop: int) -> Epilogue:
        """Return this map for vocabulary columns ``start:stop``."""
        return self if self.bias is None else self._replace(bias=self.bias[start:stop])

    def gathered(self, ids: Tensor) -> Epilogue:
        """Return this map for the columns ``ids`` (any shape)."""
        return self if self.bias is None else self._replace(bias=self.bias[ids])

    def apply(self, z: Tensor) -> Tensor:
        """Compute logits of raw products ``z`` [..., V]."""
        x = z if self.bias is None else z + self.bias.to(z.dtype)
        if self.scale != 1.0:
            x = x * self.scale
        if self.softcap is not None:
            x = (x / self.softcap).tanh() * self.softcap
        if self.temperature != 1.0:
            x = x / self.temperature
        return x.clamp(min=LOGIT_FLOOR)

    def of_columns(self, z: Tensor, ids: Tensor) -> Tensor:
        """Compute logits [C, k] of the columns ``ids`` [C, k] of raw products z [C, V]."""
        return self.gathered(ids).apply(z.gather(1, ids))

    def chain(self, x: Tensor) -> Tensor | float:
        """Compute dx/dz at logits ``x`` [..., V]."""
        linear = self.scale / self.temperature
        if self.softcap is None:
            return linear
        return linear * (1.0 - (x * (self.temperature / self.softcap)).square())


class Products(NamedTuple):
    """Raw products of student and teacher over the same columns, each [C, W], with the epilogue of each."""

    zs: Tensor
    zt: Tensor
    student: Epilogue = Epilogue()
    teacher: Epilogue = Epilogue()

    def logits(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return student and teacher logits of the columns ``start:stop``."""
        x = self.student.sliced(start, stop).apply(self.zs[:, start:stop])
        return x, self.teacher.sliced(start, stop).apply(self.zt[:, start:stop])
