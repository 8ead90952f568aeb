"""Teachers that are adapters on one base: the base is loaded once, with all adapters, of which one is active at a
time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.models import adapters
from mopd_dataplane.score.readers import HfReader

if TYPE_CHECKING:
    from mopd_kernels.heads import Head
    from transformers import PreTrainedModel


class AdaptedBase:
    """A base and the adapters that were read into it. They stay as long as it does: one is some hundredths."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._names: dict[str, str] = {}
        self._acting = ""
        self.switches = 0
        """Times another adapter began to act."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """Teachers whose adapters are in memory."""
        return tuple(self._names)

    def reader(self, teacher: str, folder: Path) -> AdapterReader:
        """A teacher, its adapter read unless it is here. Raises MismatchError when that does not fit the base."""
        if teacher not in self._names:
            name = f"teacher{len(self._names)}"
            self._acting = ""
            adapters.attach(self.model, folder, name)
            self._names[teacher] = name
        return AdapterReader(self, teacher)

    def act(self, teacher: str) -> None:
        """Make a teacher's adapter the active one."""
        if teacher != self._acting:
            adapters.activate(self.model, self._names[teacher])
            self._acting = teacher
            self.switches += 1

    def close(self) -> None:
        """Nothing outlives the object."""


class AdapterReader(HfReader):
    """One of the teachers on a base; its adapter is made active for each call."""

    def __init__(self, base: AdaptedBase, teacher: str) -> None:
        super().__init__(base.model)
        self._base = base
        self._teacher = teacher

    def act(self) -> None:
        """Make this teacher's adapter the active one in `model`."""
        self._base.act(self._teacher)

    @property
    def head(self) -> Head:
        """The base's head, with what the adapter adds to it."""
        self.act()
        return super().head

    def predicting_states(
        self, sequences: Sequence[NDArray[np.int64]], predicted: Sequence[NDArray[np.int64]]
    ) -> Tensor:
        """See Reader."""
        self.act()
        return super().predicting_states(sequences, predicted)
