"""Benchmark of loading from an object store that is far away: epochs with and without the node's cache."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.load.client import LoaderClient
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window

ENDPOINT = "AWS_ENDPOINT_URL"
TEACHERS = ("adder", "speller")
SIGNALS = ("logprob",)
LONGEST = 32_768
"""Tokens of the longest sample, and of a pack."""
EPOCHS = 2
DEADLINE_S = 300.0
REQUEST_S = 120.0
"""Longest time of a request behind the delay, in seconds."""


def measure(uri: str, samples: int, *, delays_ms: Sequence[float], folder: Path | None = None) -> list[dict[str, Any]]:
    """Make a store of `samples` samples at an empty URI and load it twice, each time in another order.

    Every request is delayed by each of `delays_ms` in turn. Returns a row for each epoch: without a cache, with an
    empty one (cold) and with one that has everything (warm), in the same loader process and in a new one.
    Raises InputError unless AWS_ENDPOINT_URL names an http server.
    """
    endpoint = os.environ.get(ENDPOINT, "")
    if not endpoint.startswith("http://"):
        raise InputError(
            f"{ENDPOINT} is {endpoint!r}: requests to an http:// server alone can be delayed; set {ENDPOINT} to one"
        )
    _make(uri, samples)
    rows: list[dict[str, Any]] = []
    for delay_ms in delays_ms:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-far-") as scratch, _far(endpoint, delay_ms) as far:
            spec = LoadSpec(stage=STAGE, signals=SIGNALS, cache_dir=scratch, deadline_s=DEADLINE_S)
            without = spec.model_copy(update={"cache_bytes": 0})
            runs = (("no cache", without), ("empty cache", spec), ("full cache, new process", spec))
            for name, own in runs:
                for epoch, figures in enumerate(_epochs(uri, Path(scratch) / "l.sock", own, far)):
                    rows.append({"delay_ms": delay_ms, "loader": name, "epoch": epoch + 1, **figures})
    return rows


class Traffic:
    """Requests that went through the delay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"requests": 0, "GETs of files": 0, "bytes": 0}

    def add(self, **counts: int) -> None:
        """Count a request."""
        with self._lock:
            for name, number in counts.items():
                self._counts[name] += number

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts


def _make(uri: str, samples: int) -> None:
    store = make_store(uri, lengths_of(samples, longest=LONGEST), teachers=TEACHERS, signals=SIGNALS)  # type: ignore[arg-type]
    for window in range(EPOCHS):
        plan = build_window(
            plan_columns(store, TEACHERS), sections.Plan(batch_samples=64, pack_tokens=LONGEST), seed=window,
            stage=STAGE, window=window, snapshot=store.snapshot(), teachers=list(TEACHERS),
        )  # fmt: skip
        store.add_plan(plan)


def _epochs(uri: str, socket: Path, spec: LoadSpec, traffic: Traffic) -> Iterator[dict[str, Any]]:
    """Yield the figures of each epoch of one loader process."""
    with start_server(uri, socket, spec), LoaderClient(socket, views="numpy", deadline_s=DEADLINE_S) as client:
        for window in range(EPOCHS):
            traffic.take()
            begin, tokens = time.perf_counter(), 0
            for batch in client.batches(STAGE, window):
                tokens += sum(len(pack.tokens) for pack in batch.packs)
                batch.release()
            yield {"seconds": round(time.perf_counter() - begin, 2), "tokens": tokens, **traffic.take()}


@contextmanager
def _far(endpoint: str, delay_ms: float) -> Iterator[Traffic]:
    """Delay every request to a server by so many milliseconds, for processes that are started meanwhile."""
    traffic = Traffic()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        timeout = REQUEST_S
        upstream: HTTPConnection | None = None

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(delay_ms / 1000)
            if self.upstream is None:
                self.upstream = HTTPConnection(endpoint.removeprefix("http://"), timeout=REQUEST_S)
            self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                self.upstream.putheader(name, value)
            self.upstream.endheaders(body)
            reply = self.upstream.getresponse()
            content = reply.read()
            is_file = self.command == "GET" and "?" not in self.path
            traffic.add(**{"requests": 1, "GETs of files": int(is_file), "bytes": len(content)})
            self.send_response(reply.status, reply.reason)
            for name, value in reply.headers.items():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", reply.headers.get("Content-Length", str(len(content))))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            """Print nothing: a loader that ends cuts its connections."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ[ENDPOINT] = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield traffic
    finally:
        os.environ[ENDPOINT] = endpoint
        server.shutdown()
        server.server_close()
