"""Teachers that are adapters on one base: the base is loaded once, and one adapter is active at a time.

The factors of all adapters are in memory, outside the model. Inside there is room for one of each shape: a model with a
hundred adapters in it takes seconds to switch, since peft walks through all of them.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mopd_dataplane.models import adapters
from mopd_dataplane.score.model_input import IntArrays
from mopd_dataplane.score.readers import HfReader

if TYPE_CHECKING:
    from mopd_kernels.heads import Head
    from transformers import PreTrainedModel


class AdaptedBase:
    """A base and the adapters that were read for it. They stay as long as it does: one is some hundredths of it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._rooms: dict[str, str] = {}
        """Name of the room in the model, by shape of adapter."""
        self._factors: dict[str, tuple[str, dict[str, Tensor]]] = {}
        """Room and factors of each teacher."""
        self._numbers = itertools.count()
        self._active_room = ""
        self._active = ""
        self.switches = 0
        """Times another adapter became active."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """Teachers whose adapters are in memory."""
        return tuple(self._factors)

    def reader(self, teacher: str, folder: Path) -> AdapterReader:
        """A teacher, its adapter read unless it is here. Raises MismatchError when that does not fit the base."""
        if teacher not in self._factors:
            room = self._room(folder)
            self._factors[teacher] = room, adapters.read_factors(self.model, folder, room)
        return AdapterReader(self, teacher)

    def _room(self, folder: Path) -> str:
        """Name of the room for an adapter, which is made for the first of its shape."""
        shape = adapters.shape_of(folder)
        if shape not in self._rooms:
            self._active_room = self._active = ""
            name = f"room{next(self._numbers)}"  # never again, also not where one does not fit
            adapters.make_room(self.model, folder, name)
            self._rooms[shape] = name
        return self._rooms[shape]

    def act(self, teacher: str) -> None:
        """Make a teacher's adapter the active one."""
        if teacher == self._active:
            return
        room, factors = self._factors[teacher]
        adapters.fill(self.model, room, factors)
        if room != self._active_room:
            adapters.activate(self.model, room)
            self._active_room = room
        self._active = teacher
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

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """See Reader."""
        self.act()
        return super().predicting_states(sequences, predicted)
