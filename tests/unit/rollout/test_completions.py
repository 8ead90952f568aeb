"""Streams of a server that says what no server should."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mopd_dataplane.rollout.engines.vllm_server import Completions


class Says(BaseHTTPRequestHandler):
    """Answers every request with one event: what the body's prompt is."""

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {event}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def streams() -> Iterator[Completions]:
    server = HTTPServer(("127.0.0.1", 0), Says)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    completions = Completions(f"http://127.0.0.1:{server.server_port}", {}, most=2)
    yield completions
    completions.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (
            '{"choices": [{"token_ids": [1e400], "logprobs": {"token_logprobs": [-1.0]}}]}',
            "Input should be a finite number",
        ),
        ("[" * 100_000 + "]" * 100_000, "recursion limit exceeded"),
        ('{"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}]}', "2 tokens and 1 log-probs"),
        ('{"choices": 7}', "choices: Input should be a valid array (found 7)"),
        ("{", "EOF while parsing an object"),
        ('{"error": "out of memory"}', "out of memory"),
        ('{"error": {"message": "out of memory", "code": 500}}', "out of memory"),
        ('{"choices": [{"token_ids": [1], "logprobs": null}]}', "1 tokens and 0 log-probs"),
        ('{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [null]}}]}', "token 1 has log-prob None"),
        ('{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [0.5]}}]}', "log-prob 0.5, above 0"),
        ('{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1e5]}}]}', "sign for an impossible token"),
        ('{"choices": [{"token_ids": [-1], "logprobs": {"token_logprobs": [-1.0]}}]}', "greater than or equal to 0"),
    ],
)
def test_whatever_a_server_says_ends_its_stream_with_an_error(streams: Completions, event: str, error: str) -> None:
    streams.start("a", {"prompt": event})
    chunk = streams.said.get(timeout=30)
    assert chunk.name == "a"
    assert error in chunk.error
