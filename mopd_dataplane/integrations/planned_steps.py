"""The optimizer steps that a store has planned for a stage, as an iterable dataset of torch."""

from collections.abc import Iterator, Sequence

from torch.utils.data import IterableDataset

from mopd_dataplane.errors import InputError
from mopd_dataplane.load.client import LoadedBatch
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.load.stream import BatchStream
from mopd_dataplane.load.windows import window_plan
from mopd_dataplane.store.dataset import Store


class PlannedSteps(IterableDataset[dict[str, LoadedBatch]]):
    """{"step": a batch} for every planned step, in order; a batch is valid until the next one is asked for.

    The loader process starts with the first iteration and ends with `close`. Iterating again begins at the first step.
    """

    def __init__(self, store: Store, spec: LoadSpec, windows: Sequence[int] | None = None) -> None:
        """windows: those to read; None reads all that are planned at this time. Raises InputError when there are
        none, and what window_plan raises."""
        planned = store.plans(spec.stage)
        chosen = list(planned if windows is None else windows)
        if not chosen or not set(chosen) <= set(planned):
            raise InputError(
                f"{store.uri}: stage {spec.stage!r} has planned windows {planned}, asked for {chosen or 'all'}; plan "
                "them first: mopd plan JOB"
            )
        self._uri, self._spec, self._windows = store.uri, spec, chosen
        self._steps = sum(len(plan.step_starts) - 1 for window in chosen if (plan := window_plan(store, spec, window)))
        self._stream: BatchStream | None = None

    def __len__(self) -> int:
        """Optimizer steps of one pass."""
        return self._steps

    def __iter__(self) -> Iterator[dict[str, LoadedBatch]]:
        """Every step once. Raises what BatchStream raises."""
        if self._stream is None:
            self._stream = BatchStream(self._uri, self._spec, windows=self._windows, rank=0, world_size=1)
        self._stream.load_state_dict({"window": self._windows[0], "step": 0})
        for batch in self._stream:
            yield {"step": batch}

    def close(self) -> None:
        """End the loader."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
