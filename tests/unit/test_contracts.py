"""What is built in passes the contract suites that plug-in authors run; what breaks a contract fails them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import TINY

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.interchange.formats import FORMATS
from mopd_dataplane.interchange.rows import Row
from mopd_dataplane.job import sections
from mopd_dataplane.job.objectives import Objective, Term
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.rollout.engines.engine import StepOutput
from mopd_dataplane.rollout.engines.kinds import engine_kind
from mopd_dataplane.score.signal_kinds import SIGNALS, TokenSignal, signal_kind
from mopd_dataplane.testing import check_engine, check_importer, check_objective, check_signal
from mopd_dataplane.testing.toy_engine import ToyEngine


def test_the_hugging_face_engine_keeps_the_contract(tmp_path: Path) -> None:
    folder = make_student(sections.Student(config=TINY), tmp_path / "tiny", seed=3)
    settings = sections.Engine(slots=3, device="cpu")
    check_engine(engine_kind("hf").open(folder, 0, settings, dtype="float32", mixed_teacher=None))


def test_the_toy_engine_keeps_the_contract() -> None:
    check_engine(ToyEngine(slots=3))


class _Forgets(ToyEngine):
    """Continues a prefix from its start."""

    def admit(self, requests: Any) -> Any:
        super().admit([(slot, replace(request, prefix_ids=np.zeros(0, np.int32))) for slot, request in requests])
        return {slot: np.zeros(0, np.float32) for slot, request in requests if len(request.prefix_ids)}


class _Neighbours(ToyEngine):
    """Draws by slot."""

    def step(self) -> StepOutput:
        output = super().step()
        return replace(output, logprobs=output.logprobs - output.slots.astype(np.float32))


@pytest.mark.parametrize("broken", [_Forgets, _Neighbours])
def test_an_engine_that_breaks_the_contract_is_found(broken: type[ToyEngine]) -> None:
    with pytest.raises(AssertionError):
        check_engine(broken(slots=3))


@pytest.mark.parametrize(
    "declared",
    [
        {"policy_gradient": {}},
        {"policy_gradient": {"clip": [0.2, 0.2], "correction": "icepop"}},
        {"policy_gradient": {"baseline": "hidden"}},
        {"divergence": {"kind": "reverse"}},
        {"divergence": {"kind": "jsd", "signal": "topk"}},
        {"divergence": {"kind": "forward", "topk_agreement": 3}},
        {"cross_entropy": {"normaliser": "sequence"}},
        {"policy_gradient": {}, "divergence": {"kind": "skew_reverse"}, "cross_entropy": {}},
    ],
    ids=str,
)
def test_every_built_in_term_keeps_the_contract(declared: dict[str, Any]) -> None:
    check_objective(Objective(**declared))


class _Mean(Term):
    """Divides by the tokens of its micro-batch."""

    def token_loss(self, hidden: Any, head: Any, batch: Any, **_: Any) -> tuple[Any, dict[str, Any]]:
        return hidden.square().sum(-1) / len(hidden), {}


class _Constant(Term):
    """Depends on nothing."""

    def token_loss(self, hidden: Any, head: Any, batch: Any, **_: Any) -> tuple[Any, dict[str, Any]]:
        return torch.ones(len(hidden)), {}


class _Scalar(Term):
    """Sums itself."""

    def token_loss(self, hidden: Any, head: Any, batch: Any, **_: Any) -> tuple[Any, dict[str, Any]]:
        return hidden.square().sum(), {}


@pytest.mark.parametrize(
    ("broken", "said"), [(_Mean, "two micro-batches"), (_Constant, "does not|grad"), (_Scalar, "one value a token")]
)
def test_a_term_that_breaks_the_contract_is_found(
    broken: type[Term], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mopd_dataplane.job.objectives.find_plugin", lambda *_: broken)
    with pytest.raises((AssertionError, RuntimeError), match=said):
        check_objective(Objective(terms={"broken": {}}))


@pytest.mark.parametrize("name", SIGNALS)
def test_every_built_in_signal_keeps_the_contract(name: str) -> None:
    check_signal(signal_kind(name, {}))


class _Ranks(TokenSignal):
    """Depends on the rows beside its own."""

    def values(self, states: Any, head: Any, targets: Any, *, temperature: float) -> Any:
        return states.sum(-1).argsort().argsort().float()


class _Squares(TokenSignal):
    """Changes what others read."""

    def values(self, states: Any, head: Any, targets: Any, *, temperature: float) -> Any:
        return states.mul_(2).sum(-1)


class _Wide(TokenSignal):
    """Says a vector for each token."""

    def values(self, states: Any, head: Any, targets: Any, *, temperature: float) -> Any:
        return states


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_Ranks("rank"), "with the samples beside it"),
        (_Squares("square"), "states were changed"),
        (_Wide("wide"), "one for each trained token"),
        (_Ranks("teacher_logprobs"), "is not a field"),
        (_Ranks("Rank"), "begins with a letter"),
    ],
)
def test_a_signal_that_breaks_the_contract_is_found(broken: TokenSignal, said: str) -> None:
    with pytest.raises((AssertionError, MismatchError), match=said):
        check_signal(broken)


ROWS: dict[str, dict[str, Any]] = {
    "verl": {"input": "3 + 4 =", "output": " 7", "gts": "7", "score": 1.0, "step": 5},
    "trl": {"step": 2, "prompt": "ab", "completion": "c", "exact_match": 1.0},
    "prime-rl": {
        "env_name": "tools", "reward": 0.25,
        "trajectory": [{"tokens": {"prompt_ids": [1], "completion_ids": [2], "completion_logprobs": [-0.5]}}],
    },
    "tinker": {"transitions": [{"ob": [1, 2], "ac": {"tokens": [3], "maybe_logprobs": [-0.1]}, "reward": 0.5}]},
    "skyrl": {"input_prompt": "a", "output_response": "b", "score": [0.0, 1.0], "stop_reason": "stop"},
    "verifiers": {
        "traces": [
            {
                "nodes": [
                    {"message": {"role": "user", "content": "a"}, "token_ids": [1], "mask": [False]},
                    {"parent": 0, "message": {"role": "assistant", "content": "b"}, "sampled": True, "token_ids": [2],
                     "mask": [True], "logprobs": [-0.5]},
                ]
            }
        ]
    },
    "openai": {
        "messages": [{"role": "user", "content": "a"}],
        "choices": [{"message": {"role": "assistant", "content": "b"}}],
    },
    "sft": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "plain": {"prompt": "a", "response": "b", "reward": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_importer_keeps_the_contract(name: str) -> None:
    check_importer(FORMATS[name], [ROWS[name]])


def _guesses(fields: dict[str, Any], location: str) -> Iterator[Row]:
    yield Row(location=location, prompt=str(fields.get("ask")), response="")


def _stumbles(fields: dict[str, Any], location: str) -> Iterator[Row]:
    yield Row(location=location, prompt=fields["ask"], response="")


def _loses(fields: dict[str, Any], location: str) -> Iterator[Row]:
    yield Row(location="", prompt="", response="")


@pytest.mark.parametrize(
    ("reader", "said"), [(_guesses, "as if it were whole"), (_stumbles, "KeyError"), (_loses, "place is")]
)
def test_an_importer_that_breaks_the_contract_is_found(reader: Callable[..., Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_importer(reader, [{"ask": "a"}])
