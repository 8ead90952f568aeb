"""Tokens that arrive on their own: repeated prefixes, early ends, silence; and their order."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from mopd_dataplane.errors import DeadlineError, EngineError, InputError
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.models.vllm_server import VllmServer
from mopd_dataplane.rollout.engines import call_timeout
from mopd_dataplane.rollout.engines.engine import GOING, LENGTH, STOP, Request, StepOutput, check_answered
from mopd_dataplane.rollout.engines.sampler_arguments import SamplerArguments
from mopd_dataplane.rollout.engines.streaming import Streams, native_seed
from mopd_dataplane.rollout.engines.vllm import VllmEngine

EOS = 2


def request(*prefix: int, budget: int = 10, uid: str = "a") -> Request:
    return Request(
        uid=uid, prompt_ids=np.array([5, 6], np.int32), prefix_ids=np.array(prefix, np.int32), key=7,
        max_new_tokens=budget,
    )  # fmt: skip


@pytest.fixture
def streams(tiny_model: Path) -> Streams:
    """Three slots."""
    return Streams(3, load_tokenizer(tiny_model), [EOS])


def test_tokens_come_out_one_a_slot_in_order(streams: Streams) -> None:
    first, second = streams.open(2, request(), again=0), streams.open(0, request(uid="b"), again=0)
    streams.arrive(first.name, [10, 11], [-1.0, -2.0])
    streams.arrive(second.name, [12], [-3.0])
    output, ended = streams.step()
    assert (output.slots.tolist(), output.token_ids.tolist(), ended) == ([2, 0], [10, 12], [])
    assert streams.ready
    output, _ = streams.step()
    assert (output.slots.tolist(), output.positions.tolist(), output.logprobs.tolist()) == ([2], [1], [-2.0])
    assert not streams.ready


def test_a_repeated_prefix_is_the_check_and_never_new(streams: Streams) -> None:
    stream = streams.open(1, request(20, EOS, 22), again=2)
    streams.arrive(stream.name, [EOS], [-0.5])
    assert not stream.is_rescored
    streams.arrive(stream.name, [22, 30], [-0.25, -1.5])
    assert stream.rescored == [-0.5, -0.25]
    output, _ = streams.step()
    assert (output.positions.tolist(), output.token_ids.tolist()) == ([3], [30])


def test_an_engine_that_cannot_repeat_is_refused(streams: Streams) -> None:
    stream = streams.open(1, request(20, 21), again=2)
    with pytest.raises(EngineError, match="had to repeat token 20 of sample a and said 9"):
        streams.arrive(stream.name, [9], [-1.0])
    with pytest.raises(EngineError, match="before it had repeated 2 tokens"):
        streams.end(stream.name)


@pytest.mark.parametrize(("token", "budget", "ending"), [(EOS, 10, STOP), (9, 1, LENGTH), (9, 2, GOING)])
def test_how_a_sample_ends(streams: Streams, token: int, budget: int, ending: int) -> None:
    stream = streams.open(1, request(budget=budget), again=0)
    streams.arrive(stream.name, [token], [-1.0])
    output, ended = streams.step()
    assert output.finished.tolist() == [ending]
    assert ended == ([stream.name] if ending else [])
    assert (1 in streams) == (not ending)
    streams.arrive(stream.name, [8], [-1.0])
    assert streams.ready == (not ending), "what a finished request still says is dropped"


def test_a_sample_that_ends_too_early_or_says_nothing(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = streams.open(1, request(), again=0)
    streams.arrive(stream.name, [9], [-1.0])
    streams.end(stream.name)
    assert streams.ready
    streams.step()
    with pytest.raises(EngineError, match="ended sample a at response position 1 of at most 10"):
        _ = streams.ready
    streams.close(1)
    streams.open(1, request(uid="silent"), again=0)
    monkeypatch.setattr(call_timeout, "DEADLINE_S", -1.0)
    with pytest.raises(DeadlineError, match="slot 1"):
        _ = streams.ready


def test_a_slot_is_taken_once(streams: Streams) -> None:
    streams.open(1, request(), again=0)
    for slot in (1, 3):
        with pytest.raises(EngineError, match="is not free"):
            streams.open(slot, request(), again=0)


def step_of(slots: list[int], positions: list[int]) -> StepOutput:
    rows = len(slots)
    return StepOutput(
        np.array(slots), np.array(positions, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.float32),
        np.zeros(rows, np.uint8),
    )  # fmt: skip


def test_only_an_engine_in_lockstep_must_answer_for_every_slot() -> None:
    due = np.array([4, -1, 7], np.int32)
    check_answered(step_of([2], [7]), due, lockstep=False)
    wrong = [
        ([2], [7], True),
        ([], [], False),
        ([2, 2], [7, 7], False),
        ([2], [8], False),
        ([1], [-1], False),
        ([9], [0], False),
    ]
    for slots, positions, lockstep in wrong:
        with pytest.raises(EngineError, match="expected"):
            check_answered(step_of(slots, positions), due, lockstep=lockstep)


def test_a_ticket_survives_the_journey() -> None:
    sample_request = Request(
        uid="a", prompt_ids=np.array([5], np.int32), prefix_ids=np.array([8, 9, 10], np.int32), key=2**128 - 1,
        temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=9,
    )  # fmt: skip
    arguments = SamplerArguments.of(sample_request, [9, 10])
    assert (arguments.first, arguments.again) == (1, (9, 10))
    assert SamplerArguments.read(arguments.as_arguments()) == arguments
    assert SamplerArguments.read({"other": 1}) is None
    assert SamplerArguments.read(None) is None
    wrong = {"mopd_first": -1, "mopd_top_p": 0.0, "mopd_again": None, "mopd_sample_key": "zz"}
    for key, value in wrong.items():
        with pytest.raises(ValueError, match="arguments of the keyed sampler"):
            SamplerArguments.read(arguments.as_arguments() | {key: value})
    with pytest.raises(ValueError, match=r"sampler 'dice/9'; this build draws with grouped-gumbel/1, gumbel/1"):
        SamplerArguments.read(arguments.as_arguments() | {"mopd_sampler": "dice/9"})


def test_a_seed_is_never_drawn_from_twice() -> None:
    seeds = {native_seed(request(*range(length))) for length in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_without_vllm_the_extra_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"train,vllm"):
        VllmEngine(tiny_model, slots=1)
    with pytest.raises(InputError, match=r"dataplane\[server\]"):
        VllmServer("http://127.0.0.1:9/v1")


def test_an_impossible_url_is_refused() -> None:
    with pytest.raises(InputError, match="API root"):
        VllmServer("127.0.0.1:8000")


@pytest.mark.parametrize(
    ("raw_engine", "problem"),
    [
        ({"kind": "vllm", "reload": True}, "give its url"),
        ({"kind": "vllm", "url": "http://127.0.0.1:1/v1", "options": {"seed": 1}}, "a vLLM that the job starts"),
    ],
)
def test_settings_that_contradict_each_other(raw_engine: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        sections.Engine.model_validate(raw_engine)
