"""Sampling masks on their way from the sampler through the log into samples, whatever interrupts it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import make_requests

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.log.framing import MAX_BODY
from mopd_dataplane.base.sampling_masks import SamplingMasks, sampling_masks_of
from mopd_dataplane.errors import EngineError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.engines.engine import Request, StepOutput
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.sampling import SAMPLERS, Distribution
from mopd_dataplane.rollout.log import log_records, recovery
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.partial_sample import PartialMasks
from mopd_dataplane.testing.toy_engine import ToyEngine

sys.path.insert(0, str(Path(__file__).parents[2] / "faults"))

from story import story

RECORD = sections.Rollout(max_new_tokens=40, top_p=0.8, top_k=6, record=("sampling_mask",))


class Died(BaseException):
    """Stands for SIGKILL inside one process."""


def sets(sample: Sample) -> list[list[int]]:
    """Ids each own token was drawn from."""
    assert sample.sampling_mask_sizes is not None
    assert sample.sampling_mask_ids is not None
    ends = np.cumsum(sample.sampling_mask_sizes).tolist()
    return [sample.sampling_mask_ids[a:b].tolist() for a, b in itertools.pairwise([0, *ends])]


def content(samples: dict[str, Sample]) -> dict[str, tuple[list[int], list[list[int]]]]:
    return {uid: (sample.tokens.tolist(), sets(sample)) for uid, sample in samples.items()}


@pytest.mark.parametrize("kind", SAMPLERS.values())
def test_a_kept_set_is_what_the_distribution_leaves(kind: type[Distribution]) -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]] * 3, np.float32))
    inside = kind.of(logits, np.ones(3), np.array([4, 2, 2]), np.array([1.0, 1.0, 0.3])).kept()
    masks = sampling_masks_of(inside, np.array([True, True, True]))
    assert (masks.sizes.tolist(), masks.ids.tolist()) == ([0, 2, 1], [0, 1, 0]), "nothing cut is a set of size 0"
    masks = sampling_masks_of(inside, np.array([False, False, True]))
    assert (masks.sizes.tolist(), masks.ids.tolist()) == ([0, 0, 1], [0])
    assert masks.holds(np.array([3, 3, 0], np.int32)).all()
    assert masks.holds(np.array([3, 3, 1], np.int32)).tolist() == [True, True, False]


def test_the_toy_and_the_real_engine_say_what_they_drew_from(
    roll: Callable[..., Any], shelf: Any, tiny_model: Path
) -> None:
    roll(shelf, rollout=RECORD)
    assert len(shelf.samples) == 20
    for sample in shelf.samples.values():
        drawn = sample.tokens[sample.prompt_len :].tolist()
        assert all(token in masks and 1 <= len(masks) <= 6 for token, masks in zip(drawn, sets(sample), strict=True))

    engine = HfEngine(tiny_model, slots=3)
    asking = [
        Request(**{**_fields(r), "sampling_mask": i != 1}) for i, r in enumerate(make_requests(3, top_k=7, top_p=0.6))
    ]
    engine.admit(list(enumerate(asking)))
    output = engine.step()
    assert output.masks is not None
    assert output.masks.fits(output.slots != 1)
    assert output.masks.holds(output.token_ids).all()
    assert 1 <= output.masks.sizes.max() <= 7


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Request.__dataclass_fields__}


@pytest.mark.parametrize(("point", "every"), [("wal.append", 31), ("wal.appended", 29), ("rollout.step", 9)])
def test_a_sample_that_died_anywhere_goes_on_with_the_same_sets(
    roll: Callable[..., Any], shelf: Any, tmp_path: Path, point: str, every: int
) -> None:
    """Deaths at the point again and again: between a step's sampling masks and the step too."""
    whole = type(shelf)()
    roll(whole, rollout=RECORD, home=tmp_path / "whole")
    visits = itertools.count(1)

    def die(name: str) -> None:
        if name == point and next(visits) % every == 0:
            raise Died

    deaths = alone = 0
    while len(shelf.samples) < 20:
        fault_points.observe(die)
        try:
            roll(shelf, rollout=RECORD)
        except Died:
            deaths += 1
        finally:
            fault_points.observe(None)
        partials = recovery.recover(tmp_path / "wal" / "student" / "engine-0").ledger.partials.values()
        alone += any(len(partial.masks) > partial.masks.drawn for partial in partials)
    assert deaths > 3
    assert content(shelf.samples) == content(whole.samples)
    if point == "wal.appended":
        assert alone, "some death left sampling masks without their step"


class Forgetful(ToyEngine):
    """Draws as it should and says something else of its sampling masks from the third step on."""

    def __init__(self, change: Callable[[SamplingMasks], SamplingMasks | None]) -> None:
        super().__init__(slots=4)
        self._change = change
        self._steps = 0

    def step(self) -> StepOutput:
        output = super().step()
        self._steps += 1
        if self._steps < 3 or output.masks is None:
            return output
        columns = (output.slots, output.positions, output.token_ids, output.logprobs, output.finished)
        return StepOutput(*columns, self._change(output.masks))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda masks: None, "gives no sampling masks"),
        (lambda masks: SamplingMasks(masks.sizes[1:], masks.ids), "gives no sampling masks"),
        (lambda masks: SamplingMasks(masks.sizes, masks.ids + 50), "which its sampling mask does not hold"),
    ],
)
def test_an_engine_that_says_nothing_or_nonsense_is_stopped_before_anything_is_logged(
    roll: Callable[..., Any],
    shelf: Any,
    tmp_path: Path,
    change: Callable[[SamplingMasks], SamplingMasks | None],
    problem: str,
) -> None:
    with pytest.raises(EngineError, match=problem):
        roll(shelf, rollout=RECORD, engine=Forgetful(change))
    partials = recovery.recover(tmp_path / "wal" / "student" / "engine-0").ledger.partials.values()
    assert all(len(partial.masks) == partial.masks.drawn for partial in partials)
    roll(shelf, rollout=RECORD)
    assert len(shelf.samples) == 20


def test_a_set_that_comes_again_replaces_the_one_without_a_token() -> None:
    masks = PartialMasks()
    masks.put(0, np.array([1, 2]))
    masks.put(0, np.array([3]))
    masks.take(1)
    masks.put(1, np.array([4, 5]))
    masks.put(2, np.array([], np.int32))
    masks.put(1, np.array([6]))
    masks.take(1)
    assert (masks.first(2).sizes.tolist(), masks.first(2).ids.tolist()) == ([1, 1], [3, 6])
    with pytest.raises(ValueError, match="token 2 has no sampling mask, 2 sets so far"):
        masks.take(1)
    for ordinal in (1, 3):
        with pytest.raises(ValueError, match=f"sampling mask of token {ordinal}, 2 tokens and 2 sets"):
            masks.put(ordinal, np.array([1]))


def test_a_checkpoint_carries_every_set_also_one_whose_step_is_still_to_come() -> None:
    ledger = Ledger()
    for message in story(3, 60):
        ledger.apply(message)
        copy = Ledger()
        for carried in ledger.checkpoint():
            copy.apply(log_records.decode(carried.kind, carried.encode()))
        assert copy.partials == ledger.partials
    waiting = [partial for partial in ledger.partials.values() if len(partial.masks) > partial.masks.drawn > 0]
    assert waiting, "the story ends between sampling masks and their step"


def test_large_steps_are_cut_into_records_that_fit() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 40_000, 30).astype(np.int32)
    masks = SamplingMasks(sizes, rng.integers(0, 1 << 17, int(sizes.sum())).astype(np.int32))
    handles, ordinals = rng.integers(0, 99, (2, 30)).astype(np.uint32)
    said = [log_records.decode(m.kind, m.encode()) for m in log_records.SamplingMask.records(handles, ordinals, masks)]
    assert len(said) > 5
    assert max(len(message.encode()) for message in said) < MAX_BODY
    np.testing.assert_array_equal(np.concatenate([m.handles for m in said]), handles)
    np.testing.assert_array_equal(np.concatenate([m.ordinals for m in said]), ordinals)
    np.testing.assert_array_equal(np.concatenate([m.masks.sizes for m in said]), sizes)
    np.testing.assert_array_equal(np.concatenate([m.masks.ids for m in said]), masks.ids)
    with pytest.raises(ValueError, match="sampling-mask body holds"):
        log_records.decode(log_records.SamplingMask.kind, said[0].encode()[:-4])


def test_recording_needs_a_bound() -> None:
    with pytest.raises(ValueError, match=r"set top_k to 1 \.\. 65536, found 0"):
        sections.Rollout(top_p=0.9, record=("sampling_mask",))
