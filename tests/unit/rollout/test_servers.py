"""A scoring and sampling server that answers anything: what is no use is named, what can pass is asked again.

The server is a real HTTP server of this process; the client is what jobs use.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane.errors import DeadlineError, EngineError, MismatchError
from mopd_dataplane.models import http_client
from mopd_dataplane.models.hf import weights_digest
from mopd_dataplane.models.vllm_server import VllmServer
from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.vllm_server import ServerEngine
from mopd_dataplane.score.vllm_logprobs import ServerLogprobs

IDS = np.array([5, 6, 7, 8], np.int64)


@dataclass
class Misbehaving:
    """An HTTP server. `answers` maps a path to what is done with a request for it."""

    folder: str
    answers: dict[str, Callable[[BaseHTTPRequestHandler, int], None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    url: str = ""

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        count = self.counts[path] = self.counts.get(path, 0) + 1
        length = int(handler.headers.get("Content-Length") or 0)
        handler.body = json.loads(handler.rfile.read(length) or b"null")  # type: ignore[attr-defined]
        if path in self.answers:
            self.answers[path](handler, count)
        elif path == "/v1/models":
            send(handler, {"data": [{"id": "m", "root": self.folder, "max_model_len": 128}]})
        else:
            send(handler, {"detail": "Not Found"}, status=404)


def send(handler: BaseHTTPRequestHandler, body: Any, *, status: int = 200) -> None:
    """A whole reply: JSON of a value, or bytes as they are."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw)


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Misbehaving]:
    """A server that serves the tiny model's folder and has no development endpoints."""
    state = Misbehaving(str(tiny_model))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state.handle(self)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{running.server_address[1]}/v1"
    yield state
    running.shutdown()
    running.server_close()


def rows(*logprobs: Any) -> list[Any]:
    """prompt_logprobs of a completion over IDS."""
    said = [
        {str(token): {"rank": 1, "logprob": value}} for token, value in zip(IDS[1:].tolist(), logprobs, strict=True)
    ]
    return [None, *said]


def completion(prompt_logprobs: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": prompt_logprobs}]}


def always(body: Any, status: int = 200) -> Callable[[BaseHTTPRequestHandler, int], None]:
    return lambda handler, _: send(handler, body, status=status)


GOOD = completion(rows(-1.0, -2.0, -3.0))
USELESS: list[tuple[str, Any, str]] = [
    ("not JSON", b"<html><body>502 Bad Gateway</body></html>", "<html>.*it is not JSON"),
    ("an empty body", b"", "it is not JSON"),
    ("half a body", b'{"choices": [{"prompt_logpr', "it is not JSON"),
    ("bytes", b"\xff\xfe\x00", "it is not JSON"),
    ("null", None, "cannot be used"),
    ("a list", [], "cannot be used"),
    ("a number", 7, "cannot be used"),
    ("an object of another kind", {"object": "error"}, "KeyError: 'choices'"),
    ("no choices", {"choices": []}, "IndexError"),
    ("choices that are null", {"choices": None}, "cannot be used"),
    ("a choice without log-probs", {"choices": [{"text": "a"}]}, "KeyError: 'prompt_logprobs'"),
    ("log-probs that are null", completion(None), "'prompt_logprobs' is null"),
    ("no rows", completion([]), "has 0 rows for 4 tokens"),
    ("fewer rows than tokens", completion(rows(-1.0, -2.0, -3.0)[:3]), "has 3 rows for 4 tokens"),
    ("more rows than tokens", completion([*rows(-1.0, -2.0, -3.0), {}]), "has 5 rows for 4 tokens"),
    ("a row that is null", completion([None, None, *rows(-1.0, -2.0, -3.0)[2:]]), r"'prompt_logprobs\[1\]' is None"),
    ("a row that is a list", completion([None, [1.0], *rows(-1.0, -2.0, -3.0)[2:]]), r"'prompt_logprobs\[1\]' is \[1"),
    ("a row of numbers", completion([None, {"6": -1.0}, *rows(-1.0, -2.0, -3.0)[2:]]), "cannot be used"),
    ("a row without ranks", completion([None, {"6": {"logprob": -1}}, *rows(-1.0, -2.0, -3.0)[2:]]), "'rank'"),
    ("ids that are words", completion([None, {"a": {"rank": 1, "logprob": -1}}, {}, {}]), "ValueError"),
    ("another token's row", completion([None, {"9": {"rank": 1, "logprob": -1}}, {}, {}]), "where token 6 and its"),
    ("a log-prob above 0", completion(rows(-1.0, 0.7, -3.0)), "of token 7 at position 2 is 0.7, which no log-prob"),
    ("a log-prob of -9999", completion(rows(-1.0, -9999.0, -3.0)), "stands for a probability of 0"),
    ("a log-prob of NaN", completion(rows(-1.0, float("nan"), -3.0)), "is nan, which no log-prob"),
    ("a log-prob of infinity", completion(rows(-1.0, float("inf"), -3.0)), "is inf, which no log-prob"),
    ("a log-prob that is null", completion(rows(-1.0, None, -3.0)), "cannot be used"),
    ("a log-prob that is text", completion(rows(-1.0, "low", -3.0)), "could not convert"),
]


@pytest.mark.parametrize(("body", "said"), [case[1:] for case in USELESS], ids=[case[0] for case in USELESS])
def test_a_reply_of_no_use_is_named_with_what_came(server: Misbehaving, body: Any, said: str) -> None:
    teacher = ServerLogprobs(Path(server.folder), url=server.url)
    server.answers["/v1/completions"] = always(body)
    try:
        with pytest.raises(EngineError, match=said) as refused:
            teacher.read([IDS], 0)
        assert "run" in str(refused.value)
        assert "again" in str(refused.value)
    finally:
        teacher.close()


@pytest.mark.parametrize("status", sorted(http_client.PASSING))
def test_a_failure_that_passes_is_asked_again(server: Misbehaving, status: int) -> None:
    teacher = ServerLogprobs(Path(server.folder), url=server.url)
    server.answers["/v1/completions"] = lambda handler, count: (
        send(handler, {"error": "busy"}, status=status) if count < 3 else send(handler, GOOD)
    )
    [said] = teacher.read([IDS], 0)
    assert said.own.tolist() == [-1.0, -2.0, -3.0]
    assert server.counts["/v1/completions"] == 3
    teacher.close()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_refusal_is_not_asked_again(server: Misbehaving, status: int) -> None:
    teacher = ServerLogprobs(Path(server.folder), url=server.url)
    server.answers["/v1/completions"] = always({"error": "the prompt is too long"}, status)
    with pytest.raises(EngineError, match=rf"answered {status}: .*the prompt is too long"):
        teacher.read([IDS], 0)
    assert server.counts["/v1/completions"] == 1
    teacher.close()


def cut(handler: BaseHTTPRequestHandler, count: int) -> None:
    """Promise a body, send half of it and hang up, twice."""
    if count > 2:
        send(handler, GOOD)
        return
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices"')
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_is_cut_is_asked_again(server: Misbehaving) -> None:
    teacher = ServerLogprobs(Path(server.folder), url=server.url)
    server.answers["/v1/completions"] = cut
    assert len(teacher.read([IDS], 0)) == 1
    teacher.close()


def test_a_failure_that_stays_is_named_with_the_attempts(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "RETRY_S", 1.0)
    teacher = ServerLogprobs(Path(server.folder), url=server.url)
    server.answers["/v1/completions"] = always({"error": "out of memory"}, 500)
    with pytest.raises(EngineError, match=r"answered 500: .*out of memory"):
        teacher.read([IDS], 0)
    assert server.counts["/v1/completions"] >= 2
    teacher.close()
    with pytest.raises(EngineError, match=r"does not answer \(ConnectError.* after \d attempts in"):
        VllmServer("http://127.0.0.1:9/v1")


def dribble(handler: BaseHTTPRequestHandler, _: int) -> None:
    """A body that never ends."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"1\r\n \r\n")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        return


def test_a_body_that_never_ends_meets_the_deadline(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "REQUEST_S", 1.0)
    teacher = ServerLogprobs(Path(server.folder), url=server.url)
    server.answers["/v1/completions"] = dribble
    with pytest.raises(DeadlineError, match="has not ended its reply in 1 s"):
        teacher.read([IDS], 0)
    teacher.close()


def test_a_body_that_is_too_large_is_refused(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MOST_BYTES", 1000)
    teacher = ServerLogprobs(Path(server.folder), url=server.url)
    server.answers["/v1/completions"] = always(b" " * 5000)
    with pytest.raises(EngineError, match="sent more than 1,000 bytes"):
        teacher.read([IDS], 0)
    teacher.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_does_not_wait_for_a_server(server: Misbehaving, number: int) -> None:
    server.answers["/v1/completions"] = dribble
    program = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from mopd_dataplane.score.vllm_logprobs import ServerLogprobs\n"
        "def interrupt(*_):\n"
        "    raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGTERM, interrupt)\n"
        "teacher = ServerLogprobs(Path(sys.argv[1]), url=sys.argv[2])\n"
        "print('asking', flush=True)\n"
        "teacher.read([np.arange(4)] * 20, 0)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, server.folder, server.url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"asking\n"
    time.sleep(1.0)
    os.kill(child.pid, number)
    asked_at = time.monotonic()
    child.wait(20.0)
    assert time.monotonic() - asked_at < 10.0
    child.stdout.close()


def test_a_server_without_development_endpoints_serves_what_it_was_started_with(
    server: Misbehaving, tmp_path: Path
) -> None:
    folder = Path(server.folder)
    served = VllmServer(server.url)
    served.serve(folder, weights_digest(folder), reload=False)
    with pytest.raises(MismatchError, match=r"serves .* this run needs"):
        served.serve(tmp_path, "0" * 64, reload=False)
    with pytest.raises(MismatchError, match="no development endpoints"):
        served.serve(tmp_path, "0" * 64, reload=True)
    served.close()


@pytest.mark.parametrize(
    ("body", "said"),
    [({"data": []}, "serves no model"), ({"models": []}, "KeyError"), ({"data": [1]}, "no list of models"),
     (b"<html>", "it is not JSON")],
)  # fmt: skip
def test_a_list_of_models_of_no_use_is_named(server: Misbehaving, body: Any, said: str) -> None:
    server.answers["/v1/models"] = always(body)
    with pytest.raises(EngineError, match=said):
        VllmServer(server.url)


def stream(*events: Any) -> Callable[[BaseHTTPRequestHandler, int], None]:
    """A completion: the probe's whole reply, then a stream of events."""

    def answer(handler: Any, count: int) -> None:
        if not handler.body.get("stream"):
            send(handler, {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [0.0]}}]})
            return
        raw = b"".join(
            b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            for event in events
        )
        send(handler, raw)

    return answer


def said(token: Any, logprob: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [logprob]}}]}


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (said(7, 0.7), "log-prob of sampled token 7 is 0.7"),
        (said(7, float("nan")), "is nan"),
        (said(-3, -1.0), "token id -3"),
        (said(7, None), "TypeError"),
        (said("x", -1.0), "ValueError"),
        ({"choices": [{"token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0]}}]}, "2 tokens and 1 log-probs"),
        ({"choices": None}, "TypeError"),
        ({"error": {"message": "out of memory"}}, "out of memory"),
        (b"<html>", "JSONDecodeError"),
    ],
)  # fmt: skip
def test_a_stream_of_no_use_is_named_and_nothing_of_it_is_a_token(server: Misbehaving, event: Any, told: str) -> None:
    server.answers["/v1/completions"] = stream(event)
    engine = ServerEngine(Path(server.folder), url=server.url, slots=1, noise="seeded")
    request = Request(uid="a", prompt_ids=np.array([5], np.int32), key=7, max_new_tokens=4)
    try:
        engine.admit([(0, request)])
        with pytest.raises(EngineError, match=told):
            engine.step()
    finally:
        engine.close()


def test_a_stream_that_is_refused_for_a_while_begins_later(server: Misbehaving) -> None:
    good = stream(said(7, -1.0))
    server.answers["/v1/completions"] = lambda handler, count: (
        send(handler, {"error": "busy"}, status=429) if count in (2, 3) else good(handler, count)
    )
    engine = ServerEngine(Path(server.folder), url=server.url, slots=1, noise="seeded")
    engine.admit([(0, Request(uid="a", prompt_ids=np.array([5], np.int32), key=7, max_new_tokens=4))])
    assert engine.step().token_ids.tolist() == [7]
    engine.close()
