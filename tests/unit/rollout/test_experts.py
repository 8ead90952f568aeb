"""Experts of every token: as the engine chose them, through the log, whatever interrupts it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import TINY, Preempted, make_requests

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.log.framing import MAX_BODY
from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import hidden_states, load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.models.router_replay import Routing
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.engines.engine import Request, Routes, StepOutput
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.log import log_records, recovery
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.partial_sample import SampleSpec
from mopd_dataplane.rollout.runner import SAVED
from mopd_dataplane.testing.toy_engine import ToyEngine

RECORD = sections.Rollout(max_new_tokens=16, record=("experts",))
MOE = TINY | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDTH = 2 * 2
"""Expert ids of a token: two layers, two experts each."""


class Died(BaseException):
    """Stands for SIGKILL inside one process."""


class Spoken(ToyEngine):
    """A toy engine that says expert ids which follow from the tokens it has read."""

    def __init__(self) -> None:
        super().__init__(slots=4)
        self._said: dict[int, int] = {}

    def admit(self, requests: Any) -> Any:
        self._said |= {slot: 0 for slot, _ in requests}
        return super().admit(requests)

    def step(self) -> StepOutput:
        read = {
            slot: [*request.prompt_ids.tolist(), *response]
            for slot, (request, response) in self._live.items()
        }  # fmt: skip
        output = super().step()
        fresh = [np.array(read[slot][self._said[slot] :]) for slot in output.slots.tolist()]
        self._said |= {slot: len(ids) for slot, ids in read.items()}
        ids = np.concatenate(fresh)[:, None] * 10 + np.arange(WIDTH)
        counts = np.array([len(ids) for ids in fresh], np.int32)
        columns = (output.slots, output.positions, output.token_ids, output.logprobs, output.finished)
        return StepOutput(*columns, routes=Routes(counts, ids.astype(np.int16)))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random mixture of experts."""
    return make_student(sections.Student(config=MOE), tmp_path_factory.mktemp("moe") / "tiny", seed=3)


def routed_by_one_pass(folder: Path, tokens: np.ndarray) -> np.ndarray:
    model = load_model(folder)
    routing = Routing.of(model)
    assert routing is not None
    with torch.no_grad():
        hidden_states(model, torch.from_numpy(tokens.astype(np.int64))[None])
    return routing.chosen().numpy()


def test_the_engine_says_what_its_model_chose_for_prompt_and_response(
    roll: Callable[..., Any], shelf: Any, mixture: Path
) -> None:
    """Samples of unequal length, refilled slots: against one forward pass over each whole sample."""
    engine = HfEngine(mixture, slots=3)
    roll(shelf, rollout=RECORD, engine=engine, count=7, render=lambda p: [ord(c) % 90 + 4 for c in p.text * 2])
    assert len(shelf.samples) == 7
    same = total = 0
    for sample in shelf.samples.values():
        assert sample.experts is not None
        assert sample.experts.shape == (len(sample.tokens) - 1, WIDTH)
        expected = routed_by_one_pass(mixture, sample.tokens)[:-1]
        same += int((sample.experts == expected).all(axis=1).sum())
        total += len(expected)
    assert same == total, "float32 chooses the same experts in batches of another shape, but for a tie"


def test_requests_that_do_not_ask_get_nothing(mixture: Path) -> None:
    engine = HfEngine(mixture, slots=3)
    fields = [{n: getattr(r, n) for n in Request.__dataclass_fields__} for r in make_requests(3)]
    engine.admit([(slot, Request(**{**own, "experts": slot == 1})) for slot, own in enumerate(fields)])
    for step in range(2):
        routes = engine.step().routes
        assert routes is not None
        prompt = len(fields[1]["prompt_ids"])
        counts = dict(zip(range(3), [0, prompt if step == 0 else 1, 0], strict=True))
        assert sorted(routes.counts.tolist()) == sorted(counts.values())
        assert routes.ids.shape == (sum(counts.values()), WIDTH)


def experts_of(samples: dict[str, Sample]) -> dict[str, tuple[list[int], list[list[int]]]]:
    return {u: (s.tokens.tolist(), s.experts.tolist()) for u, s in samples.items() if s.experts is not None}


@pytest.mark.parametrize(("point", "every"), [("wal.append", 17), ("wal.appended", 17), ("rollout.step", 7)])
def test_a_sample_that_died_anywhere_goes_on_with_the_same_experts(
    roll: Callable[..., Any], shelf: Any, tmp_path: Path, point: str, every: int
) -> None:
    visits = itertools.count(1)

    def die(name: str) -> None:
        if name == point and next(visits) % every == 0:
            raise Died

    deaths = ahead = 0
    while len(shelf.samples) < 20:
        fault_points.observe(die)
        try:
            roll(shelf, rollout=RECORD, engine=Spoken())
        except Died:
            deaths += 1
        finally:
            fault_points.observe(None)
        partials = recovery.recover(tmp_path / "wal" / "student" / "engine-0").ledger.partials.values()
        ahead += any(partial.routed > len(partial.experts) for partial in partials)
    assert deaths > 3
    for tokens, experts in experts_of(shelf.samples).values():
        assert experts == [[token * 10 + column for column in range(WIDTH)] for token in tokens[:-1]]
    assert len(experts_of(shelf.samples)) == 20
    if point == "wal.appended":
        assert ahead, "some death left experts of a step without the step"


@pytest.mark.parametrize("kv_bytes", [1 << 30, 0])
def test_a_polite_stop_loses_none_with_and_without_saved_keys(
    roll: Callable[..., Any], shelf: Any, mixture: Path, tmp_path: Path, kv_bytes: int
) -> None:
    """Against one forward pass over each whole sample; sampling masks come along."""
    record = sections.Rollout(max_new_tokens=16, top_k=8, record=("sampling_mask", "experts"))
    settings: dict[str, Any] = {
        "rollout": record, "count": 10, "wal": sections.Wal(kv_bytes=kv_bytes),
        "render": lambda prompt: [ord(c) % 90 + 4 for c in prompt.text],
    }  # fmt: skip
    for at in (3, 5, 0):
        engine = Preempted(mixture, at=at, slots=4)
        if at:
            with pytest.raises(KeyboardInterrupt):
                roll(shelf, engine=engine, **settings)
            assert (tmp_path / "wal" / "student" / "engine-0" / SAVED).exists() == (kv_bytes > 0)
        else:
            assert roll(shelf, engine=engine, **settings).resumed > 0
    assert len(shelf.samples) == 10
    for sample in shelf.samples.values():
        assert sample.experts is not None
        np.testing.assert_array_equal(sample.experts, routed_by_one_pass(mixture, sample.tokens)[:-1])
        assert sample.sampling_mask_sizes is not None
        assert sample.sampling_mask_sizes.tolist() == [8] * sample.loss_tokens


class Silent(Spoken):
    """Says the experts of one token too few from the third step on."""

    _steps = 0

    def step(self) -> StepOutput:
        output = super().step()
        self._steps += 1
        if self._steps < 3 or output.routes is None:
            return output
        columns = (output.slots, output.positions, output.token_ids, output.logprobs, output.finished)
        counts = output.routes.counts.copy()
        counts[0] -= 1
        return StepOutput(*columns, routes=Routes(counts, output.routes.ids[1:]))


@pytest.mark.parametrize("engine", [lambda: ToyEngine(slots=4), Silent])
def test_an_engine_that_does_not_say_is_stopped_before_anything_is_logged(
    roll: Callable[..., Any], shelf: Any, engine: Callable[[], ToyEngine]
) -> None:
    with pytest.raises(EngineError, match="gives no expert ids"):
        roll(shelf, rollout=RECORD, engine=engine())
    roll(shelf, rollout=RECORD, engine=Spoken())
    assert len(shelf.samples) == 20


def test_a_model_without_routers_is_refused(roll: Callable[..., Any], shelf: Any, tiny_model: Path) -> None:
    with pytest.raises(MismatchError, match="Qwen3ForCausalLM has no router that can be read"):
        roll(shelf, rollout=RECORD, engine=HfEngine(tiny_model, slots=2), render=lambda prompt: [5, 6, 7])


def _opened(ledger: Ledger) -> None:
    spec = SampleSpec(
        uid="0" * 32, prompt_id="p", group_id="g", group_index=0, iteration=0, domain="d", effort="", stage="r",
        writer="w", writer_seq=0, policy="p", temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9, stop=(),
        tokenizer="t", prompt_ids=(1, 2, 3), experts=True,
    )  # fmt: skip
    for handle in range(2):
        ledger.apply(log_records.Open(handle, spec))
        ledger.apply(log_records.Span(handle, 0, 0, "v"))


def routed(handles: list[int], positions: list[int], width: int = 3) -> log_records.Routed:
    ids = np.arange(len(handles) * width, dtype=np.int16).reshape(-1, width)
    return log_records.Routed(np.array(handles, np.uint32), np.array(positions, np.uint32), ids)


def test_a_record_may_say_again_what_is_known_and_never_skip() -> None:
    ledger = Ledger()
    _opened(ledger)
    ledger.apply(routed([0, 0, 1, 1, 1], [0, 1, 0, 1, 2]))
    ledger.apply(routed([0, 0, 0], [0, 1, 2]))
    ledger.apply(routed([0], [1]))
    partial = ledger.partials[0]
    assert partial.routed == 3
    assert np.frombuffer(partial.routes, np.int16).reshape(3, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for wrong in (routed([0], [4]), routed([0, 0], [3, 5]), routed([0], [3], width=4)):
        with pytest.raises(ValueError, match="3 tokens of 3 ids so far"):
            ledger.apply(wrong)
    copy = Ledger()
    for message in ledger.checkpoint():
        copy.apply(log_records.decode(message.kind, message.encode()))
    assert copy.partials == ledger.partials


def test_a_token_is_not_drawn_before_its_experts_are_known() -> None:
    ledger = Ledger()
    _opened(ledger)
    ledger.apply(routed([0, 0], [0, 1]))
    one = np.ones(1, np.uint32)
    step = log_records.Step(0 * one, 0 * one, one, np.zeros(1, np.float32), np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="token 0 was drawn of unknown experts"):
        ledger.apply(step)


def test_a_long_prompt_is_cut_into_records_that_fit() -> None:
    handles, positions = np.zeros(9000, np.uint32), np.arange(9000, dtype=np.uint32)
    ids = np.arange(9000 * 384, dtype=np.int64).reshape(9000, 384).astype(np.int16)
    said = [log_records.decode(m.kind, m.encode()) for m in log_records.Routed.records(handles, positions, ids)]
    assert max(len(message.encode()) for message in said) < MAX_BODY
    np.testing.assert_array_equal(np.concatenate([message.ids for message in said]), ids)
    np.testing.assert_array_equal(np.concatenate([message.positions for message in said]), positions)
