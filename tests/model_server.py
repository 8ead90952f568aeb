"""A real HTTP server that answers as a stock `vllm serve FOLDER` does, with the numbers of a transformers model; each
of its answers can be replaced by what no server should send."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mopd_dataplane.models import hf

Misbehave = Callable[["Handler", Any], bool]
"""Called with the connection and the good answer; returns whether it has answered instead."""


class Handler(BaseHTTPRequestHandler):
    """One connection. The server's `misbehave` may answer in its place."""

    protocol_version = "HTTP/1.1"
    server: ModelServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null"))

    def _answer(self, body: Any) -> None:
        self.server.asked.append((self.path, body))
        reply = self.server.reply(self.path, body)
        if self.server.misbehave is not None and self.server.misbehave(self, reply):
            return
        if reply is None:
            self.send(b'{"detail":"Not Found"}', status=404)
        elif isinstance(reply, list):
            self._stream(reply)
        elif "status" in reply:
            self.send(json.dumps(reply).encode(), status=reply["status"])
        else:
            self.send(json.dumps(reply).encode())

    def send(self, content: bytes, *, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        """A complete answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def begin_chunked(self) -> None:
        """The headers of an answer of unknown length."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def cut(self) -> None:
        """End the connection as a server that dies does."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _stream(self, events: list[Any]) -> None:
        self.begin_chunked()
        for event in [*map(json.dumps, events), "[DONE]"]:
            self.send_chunk(f"data: {event}\n\n".encode())
        self.send_chunk(b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


DEVELOPMENT = ("/server_info", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache")


class ModelServer(ThreadingHTTPServer):
    """Serves the model of a folder; with a weight version also vLLM's development endpoints."""

    daemon_threads = True

    def __init__(self, folder: Path, *, name: str = "", context: int = 256, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.context = folder, context
        self.name = name or str(folder)
        self.weight_version = ""
        """Name of the weights, as a server with development endpoints has one."""
        self.misbehave: Misbehave | None = None
        self.asked: list[tuple[str, Any]] = []
        """(path, body) of every request."""
        self.refused_fields: dict[str, Any] = {}
        """Fields, and values of fields, that a completion must not have; None for every value."""
        self.names_ids = True
        """Whether `return_tokens_as_token_ids` has an effect, as in vLLM."""
        self._load(folder)
        self._one_at_a_time = threading.Lock()

    def _load(self, folder: Path) -> None:
        self.model = hf.load_model(folder, dtype="float32")
        self.tokenizer = hf.load_tokenizer(folder)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def exchange_weights(self, folder: Path) -> None:
        """Serve other weights under the same name, as a server that was started anew."""
        self._load(folder)

    def handle_error(self, request: Any, address: Any) -> None:
        """Connections that the client cuts are no news."""

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up the host's name
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def reply(self, path: str, body: Any) -> Any:
        """The good answer: an object, the events of a stream, or None for what is not there."""
        if path == "/v1/models":
            root = str(self.folder)
            return {"data": [{"id": self.name, "root": root, "max_model_len": self.context, "object": "model"}]}
        if path == "/weight_info" and self.weight_version:
            return {"weight_version": self.weight_version}
        if self.weight_version and path.partition("?")[0] in DEVELOPMENT:
            return self._develop(path, body)
        if path == "/tokenize":
            return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False), "count": 1}
        if path == "/generate":
            return self._generate(body)
        if path != "/v1/completions":
            return None
        if "prompt_logprobs" in body:
            rows = self._read(body["prompt"], body["prompt_logprobs"])
            return {"id": "cmpl-1", "choices": [{"index": 0, "text": "a", "prompt_logprobs": [None, *rows]}]}
        if body.get("echo"):
            return self._echo(body)
        tokens = self._decode(body)
        if not body["stream"]:
            return {"choices": [_choice(*zip(*tokens, strict=True))]}
        return [{"choices": [_choice([token], [value])]} for token, value in tokens]

    def _develop(self, path: str, body: Any) -> Any:
        """Development endpoints, with which a client loads weights and names them."""
        if path == "/update_weight_version":
            self.weight_version = body["new_version"]
        elif path == "/collective_rpc":
            self._load(Path(body["kwargs"]["weights_path"]))
        return {"vllm_config": {}, "success": True}

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        """[T, V] of every position of a text."""
        with self._one_at_a_time, torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits.double(), dim=-1).numpy()

    def _read(self, ids: list[int], k: int) -> list[dict[str, Any]]:
        rows = []
        for token, values in zip(ids[1:], self.logprobs(ids), strict=False):
            order = np.argsort(-values)
            ranks = {int(other): rank for rank, other in enumerate(order[:k].tolist(), 1)}
            ranks.setdefault(token, int((values >= values[token]).sum()))
            rows.append({
                str(other): {"logprob": float(values[other]), "rank": rank, "decoded_token": "x"}
                for other, rank in ranks.items()
            })  # fmt: skip
        return rows

    def _echo(self, body: Any) -> Any:
        """The prompt and the generated token in the form of OpenAI's completions API."""
        for name, value in self.refused_fields.items():
            if name in body and value in (None, body[name]):
                return {"status": 400, "message": f"{name} is not supported"}
        ids = body["prompt"]
        if isinstance(ids, str):
            ids = self.tokenizer.encode(ids, add_special_tokens=False)
        values = self.logprobs(ids)
        by_id = self.names_ids and body.get("return_tokens_as_token_ids")

        def name(token: int) -> str:
            return f"token_id:{token}" if by_id else str(self.tokenizer.decode([token]))

        generated = [int(values[-1].argmax())][: body["max_tokens"]]
        tokens = [*ids, *generated]
        tops: list[dict[str, float] | None] = [None]
        for own, row in zip(tokens[1:], values, strict=False):
            likeliest = [own, *np.argsort(-row)[: body["logprobs"]].tolist()]
            tops.append({name(int(token)): float(row[token]) for token in likeliest})
        own_values = [float(row[token]) for token, row in zip(tokens[1:], values, strict=False)]
        logprobs = {
            "text_offset": [0] * len(tokens), "tokens": list(map(name, tokens)), "token_logprobs": [None, *own_values],
            "top_logprobs": tops,
        }  # fmt: skip
        return {"id": "cmpl-1", "choices": [{"index": 0, "text": "", "logprobs": logprobs}]}

    def _generate(self, body: Any) -> Any:
        """The answer of SGLang's own API, as its source computes it: rows from `logprob_start_len` on, the first of
        them empty; a list of chosen ids, which is refused outside the vocabulary; the generated token apart."""
        ids = body.get("input_ids") or self.tokenizer.encode(body["text"], add_special_tokens=False)
        start, chosen = body["logprob_start_len"], body.get("token_ids_logprob") or []
        values = self.logprobs(ids)
        if start >= len(ids) or any(not 0 <= token < values.shape[1] for token in [*ids, *chosen]):
            return {"status": 400, "error": {"message": "logprob_start_len or token_ids_logprob is out of range"}}

        def entries(row: NDArray[np.float64], tokens: list[int]) -> list[list[Any]]:
            return [[float(row[token]), token, None] for token in tokens]

        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "completion_tokens": body["sampling_params"]["max_new_tokens"],
        }
        own = [entries(values[position - 1], [ids[position]])[0] for position in range(start + 1, len(ids))]
        meta["input_token_logprobs"] = [[None, ids[start], None], *own]
        last = [int(values[-1].argmax())][: meta["completion_tokens"]]
        meta["output_token_logprobs"] = entries(values[-1], last)
        if k := body["top_logprobs_num"]:
            rows = [entries(row, np.argsort(-row)[:k].tolist()) for row in values[start:]]
            meta["input_top_logprobs"], meta["output_top_logprobs"] = [None, *rows[:-1]], rows[-1:][: len(last)]
        if chosen:
            rows = [entries(row, chosen) for row in values[start:]]
            meta["input_token_ids_logprobs"] = [None, *rows[:-1]]
            meta["output_token_ids_logprobs"] = rows[-1:][: len(last)]
        return {"text": self.tokenizer.decode(last), "meta_info": meta}

    def _decode(self, body: Any) -> list[tuple[int, float]]:
        """Tokens drawn by the request's seed, with their log-probs."""
        chance = np.random.default_rng(body.get("seed", 0))
        ids, drawn = list(body["prompt"]), []
        for _ in range(body["max_tokens"]):
            values = self.logprobs(ids)[-1]
            token = int(values.argmax()) if body["top_k"] == 1 else int(chance.choice(len(values), p=np.exp(values)))
            drawn.append((token, float(values[token])))
            ids.append(token)
        return drawn


def _choice(tokens: Any, values: Any) -> dict[str, Any]:
    return {"index": 0, "token_ids": list(tokens), "logprobs": {"token_logprobs": list(values)}}


@contextmanager
def serve_model(folder: Path, **settings: Any) -> Iterator[ModelServer]:
    """A running server; it ends with the block."""
    server = ModelServer(folder, **settings)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def sends(content: bytes, **settings: Any) -> Misbehave:
    """Answer everything with the same bytes."""

    def misbehave(connection: Handler, reply: Any) -> bool:
        connection.send(content, **settings)
        return True

    return misbehave


def changes(change: Callable[[Any], Any]) -> Misbehave:
    """Answer with what `change` makes of the good answer; it may change that in place and return None."""

    def misbehave(connection: Handler, reply: Any) -> bool:
        changed = change(reply)
        connection.send(json.dumps(reply if changed is None else changed).encode())
        return True

    return misbehave


def fails(times: int, how: Misbehave) -> Misbehave:
    """Misbehave for a number of requests, then no more."""
    left = [times]

    def misbehave(connection: Handler, reply: Any) -> bool:
        if not left[0]:
            return False
        left[0] -= 1
        return how(connection, reply)

    return misbehave


def is_silent(connection: Handler, reply: Any) -> bool:
    """Take the request and send nothing."""
    time.sleep(60)
    return True


def never_ends(connection: Handler, reply: Any) -> bool:
    """A body that goes on, slowly."""
    connection.begin_chunked()
    while True:
        connection.send_chunk(b" ")
        time.sleep(0.02)


def is_endless(connection: Handler, reply: Any) -> bool:
    """A body that goes on as fast as it can."""
    connection.begin_chunked()
    while True:
        connection.send_chunk(b" " * 65536)


def cuts_before(connection: Handler, reply: Any) -> bool:
    """End the connection without an answer."""
    connection.cut()
    return True


def cuts_inside(connection: Handler, reply: Any) -> bool:
    """End the connection in the middle of an answer of known length."""
    content = json.dumps(reply).encode()
    connection.send_response(200)
    connection.send_header("Content-Length", str(len(content)))
    connection.end_headers()
    connection.wfile.write(content[: len(content) // 2])
    connection.cut()
    return True


def cuts_chunks(connection: Handler, reply: Any) -> bool:
    """End the connection between two chunks."""
    connection.begin_chunked()
    connection.send_chunk(b'{"choices": [')
    connection.cut()
    return True


def speaks_no_http(connection: Handler, reply: Any) -> bool:
    """Bytes of another protocol."""
    connection.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    connection.close_connection = True
    return True
