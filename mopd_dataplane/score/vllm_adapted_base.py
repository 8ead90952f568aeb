"""Teachers that are adapters on one base, in a vLLM started here: one engine, and a LoRA request for each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mopd_kernels.heads import Head
from torch import Tensor

from mopd_dataplane.models import hf
from mopd_dataplane.models.adapter_files import touches_head
from mopd_dataplane.models.vllm_adapters import HEAD, VllmAdapters
from mopd_dataplane.score.model_input import IntArrays
from mopd_dataplane.score.vllm_logprobs import SequenceLogprobs, VllmLogprobs
from mopd_dataplane.score.vllm_states import ExtractingReader, VllmReader


class VllmAdaptedBase:
    """vLLM with a base, which reads for every teacher on it.

    shared: reads with the base, whose vLLM has room for the adapters (vllm_adapters.room_for).
    """

    def __init__(self, shared: VllmReader | ExtractingReader | VllmLogprobs) -> None:
        self.shared = shared
        self._adapters = VllmAdapters(shared.engine, apart=(HEAD,))
        self._acting = ""
        self._readers: dict[str, VllmAdapterReader | VllmAdapterLogprobs] = {}
        self.switches = 0
        """Times another adapter began to act."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """Teachers that were asked for."""
        return tuple(self._readers)

    def reader(self, teacher: str, folder: Path) -> VllmAdapterReader | VllmAdapterLogprobs:
        """A teacher; its adapter is given to vLLM when it first reads."""
        if teacher not in self._readers:
            act = partial(self._act, teacher, folder)
            self._readers[teacher] = (
                VllmAdapterLogprobs(self.shared, act)
                if isinstance(self.shared, VllmLogprobs)
                else VllmAdapterReader(self.shared, act, folder)
            )
        return self._readers[teacher]

    def _act(self, teacher: str, folder: Path) -> None:
        """Read with a teacher's adapter from now on. Raises MismatchError when vLLM cannot apply it."""
        if teacher != self._acting:
            self.shared.adapter = self._adapters.request(folder, hf.weights_digest(folder))
            self._acting = teacher
            self.switches += 1

    def close(self) -> None:
        """End vLLM's process."""
        self.shared.close()


class VllmAdapterReader:
    """One of the teachers on a base, as a Reader. The head stays here, with what the adapter adds to it."""

    def __init__(self, shared: VllmReader | ExtractingReader, act: Callable[[], None], folder: Path) -> None:
        """act: gives vLLM the teacher's adapter."""
        self._shared = shared
        self._act = act
        head = shared.head
        self.head: Head = (
            hf.load_head(folder, dtype="float32", device=str(head.weight.device)) if touches_head(folder) else head
        )

    def predicting_states(self, sequences: IntArrays, predicted: IntArrays) -> Tensor:
        """See Reader."""
        self._act()
        return self._shared.predicting_states(sequences, predicted)

    def close(self) -> None:
        """The base outlives it."""


class VllmAdapterLogprobs:
    """One of the teachers on a base, as a LogprobReader."""

    def __init__(self, shared: VllmLogprobs, act: Callable[[], None]) -> None:
        self._shared = shared
        self._act = act
        self.vocab_size = shared.vocab_size

    def read(self, sequences: IntArrays, k: int) -> list[SequenceLogprobs]:
        """See LogprobReader."""
        self._act()
        return self._shared.read(sequences, k)

    def close(self) -> None:
        """The base outlives it."""
