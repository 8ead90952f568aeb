"""Sampling from a running server: a stock one is taken by its folder, short failures pass, and a stop does not wait."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from advice import advises
from decoding import TINY, TOLERANCE, Shelf, decode, make_requests
from model_server import Handler, Misbehave, ModelServer, changes, cuts_before, fails, sends, serve_model

from mopd_dataplane.base import http_client
from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import weights_digest
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.rollout.engines import call_timeout
from mopd_dataplane.rollout.engines.engine import HasIdentity
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.vllm_server import ServerEngine
from mopd_dataplane.rollout.rollout_report import RolloutReport
from mopd_dataplane.run.steps.server_identity import TOLERANCE as TOLERATED

PROMPT_S = 20.0
"""A stop takes seconds on this machine, however busy; the server would be waited for ten minutes."""


@pytest.fixture
def server(tiny_model: Path) -> Iterator[ModelServer]:
    with serve_model(tiny_model, context=512) as running:
        yield running


@pytest.fixture
def engine(server: ModelServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerEngine]:
    monkeypatch.setattr(http_client, "_PAUSE_S", 0.05)
    engine = ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded")
    yield engine
    engine.close()


def silent_stream(connection: Handler, reply: Any) -> bool:
    """Headers of a stream, then nothing."""
    if not isinstance(reply, list):
        return False
    connection.begin_chunked()
    time.sleep(60)
    return True


def test_a_stock_server_samples_with_the_folder_that_it_was_started_with(
    engine: ServerEngine, server: ModelServer, tiny_model: Path
) -> None:
    assert not any(path == "/update_weight_version" for path, _ in server.asked)
    requests = make_requests(2, max_new_tokens=6)
    tokens, logprobs, _ = decode(engine, requests)["1"]
    values = server.logprobs([*requests[1].prompt_ids.tolist(), *tokens])
    first = len(requests[1].prompt_ids) - 1
    np.testing.assert_allclose(logprobs, [values[first + i, token] for i, token in enumerate(tokens)], atol=TOLERANCE)
    assert engine.policy_digest == HfEngine(tiny_model, slots=1).policy_digest


def test_a_server_that_does_not_name_its_weights_has_a_fingerprint(
    engine: ServerEngine, server: ModelServer, tiny_model: Path, tmp_path: Path
) -> None:
    assert isinstance(engine, HasIdentity)
    before = engine.identity()
    assert before is not None
    server.exchange_weights(make_student(sections.Student(config=TINY), tmp_path / "other", seed=8))
    now = engine.identity()
    assert now is not None
    assert now.name == before.name
    assert now.difference(before) > TOLERATED
    server.weight_version = engine.policy_digest
    named = ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded")
    assert named.identity() is None, "it says itself which weights it has"
    named.close()


def test_a_stock_server_of_another_folder_is_refused(server: ModelServer, tiny_model: Path) -> None:
    server.folder = Path("/models/another")
    with pytest.raises(MismatchError, match=r"serves '/models/another' \(weight version unknown\)"):
        ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded")
    with advises("VLLM_SERVER_DEV_MODE=1, on an address that only this run can reach"):
        ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded", reload=True)
    server.weight_version = "another"  # as a server of that mode has one
    ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded", reload=True).close()
    assert server.weight_version == weights_digest(tiny_model)


@pytest.mark.parametrize("how", [sends(b"busy", status=429), sends(b"", status=500), cuts_before])
def test_a_stream_that_does_not_begin_is_tried_again(engine: ServerEngine, server: ModelServer, how: Any) -> None:
    requests = make_requests(2, max_new_tokens=4)
    whole = decode(engine, requests)
    server.misbehave = fails(3, how)
    assert decode(engine, requests) == whole


def cuts_stream(after: int) -> Any:
    """Send the first events of a stream, then end the connection."""

    def misbehave(connection: Handler, reply: Any) -> bool:
        if not isinstance(reply, list):
            return False
        connection.begin_chunked()
        for event in reply[:after]:
            connection.send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        connection.cut()
        return True

    return misbehave


@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_stream_that_is_cut_goes_on_behind_the_tokens_that_came(
    engine: ServerEngine, server: ModelServer, after: int
) -> None:
    requests = make_requests(2, max_new_tokens=8)
    whole = decode(engine, requests)
    request_count = len(server.asked)
    server.misbehave = fails(2, cuts_stream(after))
    cut = decode(engine, requests)
    for request in requests:
        tokens, logprobs, ending = cut[request.uid]
        assert tokens[:after] == whole[request.uid][0][:after]
        assert ending == whole[request.uid][2] or len(tokens) != len(whole[request.uid][0])
        values = server.logprobs([*request.prompt_ids.tolist(), *tokens])
        first = len(request.prompt_ids) - 1
        np.testing.assert_allclose(
            logprobs, [values[first + position, token] for position, token in enumerate(tokens)], atol=TOLERANCE
        )
    continued = [body["prompt"] for _, body in server.asked[request_count:] if body and body.get("stream")]
    assert len(continued) >= 2


def test_a_stream_that_is_always_cut_ends_the_run_with_its_tokens_kept(
    engine: ServerEngine, server: ModelServer, tiny_model: Path
) -> None:
    requests = make_requests(1, max_new_tokens=20)
    server.misbehave = cuts_stream(1)
    with advises(" times; every logged token is kept") as refused:
        decode(engine, requests)
    assert "was cut 6 times" in str(refused.value)
    server.misbehave = None
    again = ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded")
    assert decode(again, requests)
    again.close()


def test_a_server_that_was_looked_after_goes_on(
    server: ModelServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(1, max_new_tokens=4)

    def answers() -> Any:
        engine = ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded")
        try:
            return decode(engine, requests)
        finally:
            server.misbehave = None
            engine.close()

    def from_the_stream_on(how: Misbehave) -> Misbehave:
        return lambda connection, reply: isinstance(reply, list) and how(connection, reply)

    whole = answers()
    server.misbehave = from_the_stream_on(sends(b"no such thing", status=404))
    with advises(" broke off a completion ("):
        answers()
    with monkeypatch.context() as impatient:
        impatient.setattr(call_timeout, "DEADLINE_S", 0.3)
        server.misbehave = silent_stream
        with advises(" has said nothing for "):
            answers()
    assert answers() == whole


def test_a_server_without_this_packages_sampler_draws_with_its_own(server: ModelServer, tiny_model: Path) -> None:
    with advises(' and this package installed, or set engine.noise = "seeded"'):
        ServerEngine(tiny_model, url=server.url, slots=2, noise="keyed")
    ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded").close()


def test_a_new_token_that_is_impossible_is_refused(engine: ServerEngine, server: ModelServer) -> None:
    event = b'data: {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-9999.0]}}]}\n\n'
    server.misbehave = sends(event)
    with pytest.raises(EngineError, match=r"token 5 of sample 0 with log-prob -9999, its sign for an impossible token"):
        decode(engine, make_requests(1))


@pytest.mark.parametrize("reply", [{"choices": [{"token_ids": []}]}, {"choices": [{"token_ids": [4]}]}])
def test_a_probe_without_a_token_is_refused(server: ModelServer, tiny_model: Path, reply: Any) -> None:
    server.misbehave = lambda connection, good: "choices" in (good or {}) and changes(lambda _: reply)(connection, good)
    with pytest.raises(EngineError, match=r"choices\.0 has no token id with its log-prob"):
        ServerEngine(tiny_model, url=server.url, slots=2, noise="seeded")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_rollout_whose_server_is_silent(
    engine: ServerEngine,
    server: ModelServer,
    shelf: Shelf,
    roll: Callable[..., RolloutReport],
    number: signal.Signals,
) -> None:
    server.misbehave = silent_stream
    began = time.monotonic()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(KeyboardInterrupt, match="continue"):
        roll(shelf, engine=engine, count=2)
    assert time.monotonic() - began < PROMPT_S
    server.misbehave = None
    again = ServerEngine(server.folder, url=server.url, slots=2, noise="seeded")
    assert roll(shelf, engine=again, count=2).samples == 2
    again.close()
