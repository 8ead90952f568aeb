"""A log is continued with the sampler it was begun with; new samples get the newest, and each says which."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import TOLERANCE, decode, make_requests

from mopd_dataplane.base import fault_points
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.sampling import FIRST_SAMPLER, OWN_NOISE, SAMPLER, SAMPLERS
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.partial_sample import SampleSpec
from mopd_dataplane.testing.toy_engine import ToyEngine


class Died(BaseException):
    """Stands for SIGKILL inside one process."""


def engine_of(*samplers: str) -> ToyEngine:
    engine = ToyEngine(slots=4)
    engine.samplers = samplers
    return engine


def interrupted(roll: Callable[..., Any], shelf: Any, after: int, **settings: Any) -> None:
    """Begin a rollout and die at a decode step."""
    steps = 0

    def die(point: str) -> None:
        nonlocal steps
        steps += point == "rollout.step"
        if point == "rollout.step" and steps == after:
            raise Died

    fault_points.observe(die)
    try:
        with pytest.raises(Died):
            roll(shelf, **settings)
    finally:
        fault_points.observe(None)


def content(shelf: Any) -> dict[str, tuple[bytes, bytes]]:
    return {uid: (s.tokens.tobytes(), s.logprobs.tobytes()) for uid, s in shelf.samples.items()}


@pytest.mark.parametrize("begun", SAMPLERS)
def test_what_is_begun_with_a_sampler_ends_with_it_bit_by_bit(
    roll: Callable[..., Any], shelf: Any, tmp_path: Path, begun: str
) -> None:
    whole = type(shelf)()
    roll(whole, engine=engine_of(begun), home=tmp_path / "whole")
    interrupted(roll, shelf, 25, engine=engine_of(begun))
    unfinished = 20 - len(shelf.samples)
    report = roll(shelf)
    assert unfinished > 0
    assert report.exact == report.resumed > 0
    by = {sample.sampler for sample in shelf.samples.values() if sample.interruptions}
    assert by == {begun}
    for uid, sample in shelf.samples.items():
        if sample.sampler == begun:
            assert content(shelf)[uid] == content(whole)[uid]
    assert {sample.sampler for sample in shelf.samples.values()} == {begun, SAMPLER}


def test_samplers_draw_other_tokens_of_the_same_noise_key(roll: Callable[..., Any], shelf: Any, tmp_path: Path) -> None:
    other = type(shelf)()
    roll(shelf)
    roll(other, engine=engine_of(FIRST_SAMPLER), home=tmp_path / "other")
    assert content(shelf).keys() == content(other).keys()
    assert content(shelf) != content(other)


@pytest.mark.parametrize("samplers", [(SAMPLER,), ()])
def test_an_engine_without_the_sampler_of_a_sample_continues_it_statistically(
    roll: Callable[..., Any], shelf: Any, samplers: tuple[str, ...]
) -> None:
    interrupted(roll, shelf, 25, engine=engine_of(FIRST_SAMPLER))
    report = roll(shelf, engine=engine_of(*samplers))
    assert report.exact == 0 < report.resumed
    resumed = [sample for sample in shelf.samples.values() if sample.interruptions]
    assert {(sample.resume, sample.sampler) for sample in resumed} == {("statistical", FIRST_SAMPLER)}
    rest = {sample.sampler for sample in shelf.samples.values() if not sample.interruptions}
    assert rest == {FIRST_SAMPLER, samplers[0] if samplers else OWN_NOISE}


def test_a_record_that_names_no_sampler_is_of_the_first() -> None:
    spec = SampleSpec(
        uid="00" * 16, prompt_id="p", group_id="p#1", group_index=0, iteration=1, domain="toy", effort="",
        stage="student", writer="engine-0", writer_seq=0, policy="student", temperature=1.0, top_p=1.0, top_k=0,
        max_new_tokens=9, stop=(), tokenizer="toy", prompt_ids=(1, 2), sampler="x",
    )  # fmt: skip
    body = log_records.Open(3, spec).encode()
    size = int.from_bytes(body[4:8], "little")
    text = json.loads(body[8 : 8 + size])
    assert text.pop("sampler") == "x"
    old = json.dumps(text).encode()
    read = log_records.Open.decode(body[:4] + len(old).to_bytes(4, "little") + old + body[8 + size :])
    assert read.spec.sampler == FIRST_SAMPLER


def test_the_hugging_face_engine_draws_old_and_new_samples_in_one_batch(tiny_model: Path) -> None:
    work = make_requests(8)
    mixed = [replace(r, sampler=FIRST_SAMPLER) if i % 2 else r for i, r in enumerate(work)]
    alone = {}
    for name in SAMPLERS:
        alone[name] = decode(HfEngine(tiny_model, slots=8), [replace(r, sampler=name) for r in work])
    batch_outputs = decode(HfEngine(tiny_model, slots=8), mixed)
    for request in mixed:
        tokens, logprobs, ended = alone[request.sampler][request.uid]
        assert batch_outputs[request.uid][0] == tokens
        assert batch_outputs[request.uid][2] == ended
        np.testing.assert_allclose(batch_outputs[request.uid][1], logprobs, atol=TOLERANCE)
    assert alone[SAMPLER] != alone[FIRST_SAMPLER]
