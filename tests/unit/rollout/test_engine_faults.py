"""An engine that answers wrongly or never: nothing of that step is written, and the next rollout is whole."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from advice import advises
from decoding import content

from mopd_dataplane.errors import EngineError
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.engines.engine import StepOutput
from mopd_dataplane.rollout.log import recovery
from mopd_dataplane.rollout.runner import RolloutReport
from mopd_dataplane.testing.toy_engine import ToyEngine

Roll = Callable[..., RolloutReport]


def test_garbage_from_the_engine_is_refused_unwritten(
    roll: Roll, shelf: Any, tmp_path: Path, reference: dict[str, Sample]
) -> None:
    class Sick(ToyEngine):
        def step(self) -> StepOutput:
            output = super().step()
            if (output.positions > 4).any():
                output.logprobs[-1] = np.nan
            return output

    with pytest.raises(EngineError, match=r"log-prob nan at response position \d+ .* nothing of this step was written"):
        roll(shelf, engine=Sick(slots=8))
    partials = recovery.recover(tmp_path / "wal" / "student" / "engine-0").ledger.partials
    assert all(np.isfinite(partial.logprobs).all() for partial in partials.values())
    roll(shelf)
    assert content(shelf.samples) == content(reference)


@pytest.mark.parametrize("fault", ["no tokens", "a slot twice", "another position"])
def test_a_step_that_is_not_one_token_a_sample_is_refused_unwritten(
    roll: Roll, shelf: Any, reference: dict[str, Sample], fault: str
) -> None:
    """A wrong position used to reach the log, which could then not be recovered."""

    class Sick(ToyEngine):
        def step(self) -> StepOutput:
            output = super().step()
            rows = {"no tokens": slice(0, 0), "a slot twice": [0, *range(len(output.slots))]}.get(fault, slice(None))
            late = int(fault == "another position")
            columns = (output.slots, output.positions + late, output.token_ids, output.logprobs, output.finished)
            return StepOutput(*(column[rows] for column in columns))

    with pytest.raises(EngineError, match=r"the engine returned \d+ tokens for 8 samples; slot \d is at position"):
        roll(shelf, engine=Sick(slots=8))
    roll(shelf)
    assert content(shelf.samples) == content(reference)


@pytest.mark.parametrize("column", ["slots", "positions", "token_ids", "logprobs", "finished"])
@pytest.mark.parametrize("shape", ["a matrix", "one value", "one less", "texts", "a list"])
def test_a_step_whose_columns_have_other_shapes_is_refused_unwritten(
    roll: Roll, shelf: Any, reference: dict[str, Sample], column: str, shape: str
) -> None:
    changes: dict[str, Callable[[Any], Any]] = {
        "a matrix": lambda array: np.stack([array, array], axis=1), "one value": lambda array: array[0],
        "one less": lambda array: array[:-1], "texts": lambda array: array.astype(str), "a list": list,
    }  # fmt: skip

    class Sick(ToyEngine):
        def step(self) -> StepOutput:
            output = super().step()
            return dataclasses.replace(output, **{column: changes[shape](getattr(output, column))})

    with pytest.raises(EngineError, match=r"the engine returned .* as \w+; a numpy array of .* is needed"):
        roll(shelf, engine=Sick(slots=8))
    roll(shelf)
    assert content(shelf.samples) == content(reference)


def test_a_step_in_wider_numbers_is_the_same_step(roll: Roll, shelf: Any, reference: dict[str, Sample]) -> None:
    class Wide(ToyEngine):
        def step(self) -> StepOutput:
            output = super().step()
            whole = (column.astype(np.int64) for column in (output.positions, output.token_ids, output.finished))
            positions, token_ids, finished = whole
            return StepOutput(output.slots, positions, token_ids, output.logprobs.astype(np.float64), finished)

    roll(shelf, engine=Wide(slots=8))
    assert content(shelf.samples) == content(reference)


def test_an_engine_that_never_answers_is_given_up(
    roll: Roll, shelf: Any, reference: dict[str, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(ToyEngine):
        def step(self) -> StepOutput:
            threading.Event().wait(60)
            return super().step()

    monkeypatch.setattr("mopd_dataplane.rollout.engines.call_timeout.DEADLINE_S", 0.2)
    with advises(" s; every logged token is kept: end this process, look at the "):
        roll(shelf, engine=Stuck(slots=8))
    monkeypatch.undo()
    roll(shelf)
    assert content(shelf.samples) == content(reference)
