"""Teachers that are adapters on one base: the base is loaded once, and one adapter is active at a time.

In this process the factors of all adapters are in memory, outside the model. The model has one allocated adapter for
each shape, into which the factors are copied: a model with a hundred adapters takes seconds to switch, since peft walks
through all of them. A vLLM started here is one engine, with a LoRA request for each adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mopd_kernels.heads import Head
from torch import Tensor

from mopd_dataplane.models import adapters, hf
from mopd_dataplane.models.adapter_files import touches_head
from mopd_dataplane.models.vllm_adapters import HEAD, VllmAdapters
from mopd_dataplane.score.readers import HfReader, IntArrays
from mopd_dataplane.score.vllm_logprobs import SequenceLogprobs, VllmLogprobs
from mopd_dataplane.score.vllm_states import ExtractingReader, VllmReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdaptedBase:
    """A base and its adapters. They stay in memory as long as the object, since one takes some hundredths of the
    base."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._rooms: dict[str, str] = {}
        """Shape of an adapter → name of the allocated adapter in the model."""
        self._factors: dict[str, tuple[str, dict[str, Tensor]]] = {}
        """Teacher → name of its allocated adapter, and its factors."""
        self._numbers = itertools.count()
        self._active_room = ""
        self._active = ""
        self.switches = 0
        """Number of times that another adapter became active."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """Teachers whose adapters are in memory."""
        return tuple(self._factors)

    def reader(self, teacher: str, folder: Path) -> AdapterReader:
        """Return the reader of a teacher, loading its adapter if needed. Raises MismatchError when it does not fit the
        base."""
        if teacher not in self._factors:
            room = self._room(folder)
            self._factors[teacher] = room, adapters.read_factors(self.model, folder, room)
        return AdapterReader(self, teacher)

    def _room(self, folder: Path) -> str:
        """Return the name of the allocated adapter for a folder's adapter, allocating it for the first one of its
        shape."""
        shape = adapters.shape_of(folder)
        if shape not in self._rooms:
            self._active_room = self._active = ""
            name = f"room{next(self._numbers)}"  # never used again, even if the adapter does not fit
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
        """Do nothing: the model is freed with the object."""


class AdapterReader(HfReader):
    """One of the teachers on a base; each call activates its adapter first."""

    def __init__(self, base: AdaptedBase, teacher: str) -> None:
        super().__init__(base.model)
        self._base = base
        self._teacher = teacher

    def act(self) -> None:
        """Make this teacher's adapter the active one in `model`."""
        self._base.act(self._teacher)

    @property
    def head(self) -> Head:
        """The base's head, with the adapter's change."""
        self.act()
        return super().head

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        self.act()
        return super().predicting_states(sequences, predicted)


class VllmAdaptedBase:
    """A vLLM with a base, which runs every teacher on it.

    shared: the reader of the base, whose vLLM can load the adapters (vllm_adapters.room_for).
    """

    def __init__(self, shared: VllmReader | ExtractingReader | VllmLogprobs) -> None:
        self.shared = shared
        self._adapters = VllmAdapters(shared.engine, apart=(HEAD,))
        self._acting = ""
        self._readers: dict[str, VllmAdapterReader | VllmAdapterLogprobs] = {}
        self.switches = 0
        """Number of times that another adapter became active."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """Teachers whose readers were requested."""
        return tuple(self._readers)

    def reader(self, teacher: str, folder: Path) -> VllmAdapterReader | VllmAdapterLogprobs:
        """Return the reader of a teacher; its adapter is loaded into vLLM at its first use."""
        if teacher not in self._readers:
            act = partial(self._act, teacher, folder)
            if isinstance(self.shared, VllmLogprobs):
                self._readers[teacher] = VllmAdapterLogprobs(self.shared, act)
            else:
                self._readers[teacher] = VllmAdapterReader(self.shared, act, folder)
        return self._readers[teacher]

    def _act(self, teacher: str, folder: Path) -> None:
        """Use a teacher's adapter from now on. Raises MismatchError when vLLM cannot apply it."""
        if teacher != self._acting:
            self.shared.adapter = self._adapters.request(folder, hf.weights_digest(folder))
            self._acting = teacher
            self.switches += 1

    def close(self) -> None:
        """End vLLM's process."""
        self.shared.close()


class VllmAdapterReader:
    """One of the teachers on a base, as a Reader. The head, with the adapter's change, is in this process."""

    def __init__(self, shared: VllmReader | ExtractingReader, act: Callable[[], None], folder: Path) -> None:
        """Load the head. act: activates the teacher's adapter in vLLM."""
        self._shared = shared
        self._act = act
        self.head: Head = shared.head
        if touches_head(folder):
            self.head = hf.load_head(folder, dtype="float32", device=str(self.head.weight.device))

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        self._act()
        return self._shared.predicting_states(sequences, predicted)

    def close(self) -> None:
        """Do nothing: the base is still in use."""


class VllmAdapterLogprobs:
    """One of the teachers on a base, as a LogprobReader."""

    def __init__(self, shared: VllmLogprobs, act: Callable[[], None]) -> None:
        self._shared = shared
        self._act = act
        self.vocab_size = shared.vocab_size

    def read(self, sequences: IntArrays, k: int) -> list[SequenceLogprobs]:
        self._act()
        return self._shared.read(sequences, k)

    def close(self) -> None:
        """Do nothing: the base is still in use."""
