"""A team's own server, by URL: the same tokens as every other engine, the right weights or none, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import TOLERANCE, Shelf, assert_same, decode, make_requests
from serving import Server, serving

from mopd_dataplane.errors import EngineError, InputError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models.vllm_replies import Completions
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.engine import Engine, Request, StepOutput
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.vllm import SAMPLER, VllmEngine
from mopd_dataplane.rollout.engines.vllm_sampler import KeyedSampler
from mopd_dataplane.rollout.engines.vllm_server import ServerEngine
from mopd_dataplane.rollout.runner import RolloutReport, RolloutTask, run_rollout


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path]) -> Iterator[Server]:
    """A server that runs this package's sampler."""
    with serving(models[0], "--logits-processors", SAMPLER, "--logprobs-mode", "processed_logits") as running:
        yield running


@pytest.fixture(scope="module")
def plain_server(models: tuple[Path, Path]) -> Iterator[Server]:
    """A server as most teams have it."""
    with serving(models[0]) as running:
        yield running


def test_the_sampler_is_named_by_its_path() -> None:
    assert f"{KeyedSampler.__module__}:{KeyedSampler.__qualname__}" == SAMPLER


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}], ids=["plain", "cut"])
def test_tokens_and_logprobs_are_those_of_the_hugging_face_engine(
    server: Server, models: tuple[Path, Path], settings: dict[str, Any]
) -> None:
    engine = ServerEngine(models[0], url=server.url, slots=6)
    requests = make_requests(16, **settings)
    ours, theirs = decode(engine, requests), decode(HfEngine(models[0], slots=4), requests)
    assert_same(ours, theirs)
    engine.close()


def test_a_prefix_is_repeated_and_continued(server: Server, models: tuple[Path, Path]) -> None:
    engine = ServerEngine(models[0], url=server.url, slots=6)
    requests = make_requests(8)
    whole = decode(engine, requests)
    request = next(request for request in requests if len(whole[request.uid][0]) > 22)
    tokens, logprobs, _ = whole[request.uid]
    prefix = np.array(tokens[:20], np.int32)
    resumed = Request(uid="again", prompt_ids=request.prompt_ids, prefix_ids=prefix, key=request.key, max_new_tokens=30)
    np.testing.assert_allclose(engine.admit([(2, resumed)])[2], logprobs[4:20], atol=TOLERANCE)
    output = engine.step()
    assert (output.positions.tolist(), output.token_ids.tolist()) == ([20], [tokens[20]])
    engine.release(2)
    engine.close()


def test_other_weights_are_refused_or_loaded(server: Server, models: tuple[Path, Path]) -> None:
    with pytest.raises(MismatchError, match=r"update_weight_version.*engine\.reload"):
        ServerEngine(models[1], url=server.url, slots=4)
    requests = make_requests(16, longest=400, max_new_tokens=8)
    engine = ServerEngine(models[0], url=server.url, slots=4, reload=True)
    first = decode(engine, requests)
    engine.load_policy(models[1], 1)
    assert_same(decode(engine, requests), decode(HfEngine(models[1], slots=4), requests))
    with pytest.raises(MismatchError, match=engine.policy_digest):
        ServerEngine(models[0], url=server.url, slots=4)
    engine.load_policy(models[0], 0)
    assert decode(engine, requests)["0"][0] == first["0"][0]
    engine.close()


def test_a_server_without_the_sampler_is_found_out(plain_server: Server, models: tuple[Path, Path]) -> None:
    with pytest.raises(MismatchError, match=r"--logits-processors .*KeyedSampler"):
        ServerEngine(models[0], url=plain_server.url, slots=4)


def test_a_plain_server_draws_by_seed(plain_server: Server, models: tuple[Path, Path]) -> None:
    engine = ServerEngine(models[0], url=plain_server.url, slots=4, noise="seeded")
    assert not engine.samplers
    requests = make_requests(8)
    answers = decode(engine, requests)
    assert {uid: answer[0] for uid, answer in decode(engine, requests).items()} == {
        uid: answer[0] for uid, answer in answers.items()
    }
    for request in requests:
        tokens, logprobs, _ = answers[request.uid]
        reference = HfEngine(models[0], slots=1)
        scoring_request = Request(
            uid="reference",
            prompt_ids=request.prompt_ids,
            prefix_ids=np.array(tokens, np.int32),
            key=0,
            max_new_tokens=64,
        )
        np.testing.assert_allclose(reference.admit([(0, scoring_request)])[0], logprobs[-16:], atol=TOLERANCE)
    with pytest.raises(MismatchError, match="--logprobs-mode processed_logprobs"):
        engine.admit([(0, make_requests(1, temperature=0.7)[0])])
    engine.admit([(0, requests[0])])  # what is refused takes no slot
    engine.close()


def test_an_address_where_nobody_answers(models: tuple[Path, Path]) -> None:
    with pytest.raises(EngineError, match="does not answer"):
        ServerEngine(models[0], url="http://127.0.0.1:9/v1", slots=1)
    with pytest.raises(InputError, match="API root"):
        ServerEngine(models[0], url="http://127.0.0.1:9", slots=1)


def test_the_key_is_sent_and_never_printed(
    plain_server: Server, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret-key")
    engine = ServerEngine(models[0], url=plain_server.url, slots=1, noise="seeded")
    assert engine._server.headers == {"Authorization": "Bearer s3cret-key"}
    with pytest.raises(EngineError) as caught:
        engine._server.completion({"model": "nowhere", "prompt": [1]}, Completions, "an answer of no model")
    assert "s3cret" not in str(caught.value)
    engine.close()


def roll(engine: Engine, render: Callable[[str], list[int]], shelf: Shelf, home: Path) -> RolloutReport:
    """16 prompts of up to 40 tokens."""
    prompts = [Prompt(prompt_id=f"p{i}", domain="sums", text=f"{i} + {7 * i} =") for i in range(16)]
    return run_rollout(
        engine,
        prompts,
        RolloutTask(
            stage="student",
            iteration=0,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=40),
            wal=sections.Wal(),
            wal_dir=home,
            render=lambda prompt: render(prompt.text),
        ),
        commit=shelf.commit,
        skip_uids=set(shelf.samples),
    )


def test_a_killed_server_costs_no_token(
    server: Server, keyed: VllmEngine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The server dies in the middle; vLLM on this machine finishes the samples with the same noise. Runs last."""
    shelf, whole = Shelf(), Shelf()
    render = keyed.tokenizer.encode
    engine = ServerEngine(models[0], url=server.url, slots=6)
    stepped, left = engine.step, 12

    def step() -> StepOutput:
        nonlocal left
        left -= 1
        if left == 0:
            server.kill()
        return stepped()

    engine.step = step  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="run again to continue"):
        roll(engine, render, shelf, tmp_path / "log")
    engine.close()
    report = roll(keyed, render, shelf, tmp_path / "log")
    assert report.resumed == 6
    assert report.max_drift < TOLERANCE
    roll(keyed, render, whole, tmp_path / "whole")
    assert {uid: sample.tokens.tolist() for uid, sample in shelf.samples.items()} == {
        uid: sample.tokens.tolist() for uid, sample in whole.samples.items()
    }
