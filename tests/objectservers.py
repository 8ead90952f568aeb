"""Real object stores for the tests: SeaweedFS, which honours preconditions, and `rclone serve s3`, which ignores them.

Servers listen on the loopback interface on free ports, keep their data in a temporary folder, and die with the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Literal

KEY, SECRET = "test-key", "test-secret-4711"
READY_S = 60.0


def program(name: str) -> str:
    """A program that a package put beside the interpreter."""
    executable = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert executable, f"{name} is missing: pip install -e '.[dev]'"
    return executable


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, also 10,000 above each: SeaweedFS takes those for itself."""
    ports: list[int] = []
    candidate = 20_000 + os.getpid() * 97 % 20_000  # tests in several processes start servers at once
    while len(ports) < count:
        candidate += 1
        with socket.socket() as low, socket.socket() as high:
            try:
                low.bind(("127.0.0.1", candidate))
                high.bind(("127.0.0.1", candidate + 10_000))
            except OSError:
                continue
        ports.append(candidate)
    return ports


def make_bucket(server: Server) -> None:
    """SeaweedFS makes a bucket when the first file is put into it."""
    import obstore
    from obstore.store import S3Store

    options = {name.lower(): value for name, value in server.environment.items()}
    obstore.put(S3Store("bucket", config=options, client_options={"allow_http": True}), "made", b"")


class Server:
    """One server process that can be killed, stopped and started again on the same data."""

    def __init__(self, folder: Path, command: list[str], port: int, health: str) -> None:
        self.folder = folder
        self.endpoint = f"http://127.0.0.1:{port}"
        self._command = command
        self._health = health
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a client finds the server and its credentials by."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start and wait until it answers."""
        log = (self.folder / "server.log").open("ab")
        self.process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
            try:
                with urllib.request.urlopen(self.endpoint + self._health, timeout=1):
                    return
            except urllib.error.HTTPError:
                return  # it answers
            except OSError:
                time.sleep(0.1)
        raise AssertionError((self.folder / "server.log").read_text()[-2000:])

    def start_with_bucket(self) -> None:
        """Start a new server that has the bucket "bucket"."""
        self.start()
        make_bucket(self)

    def kill(self) -> None:
        """SIGKILL, as by a power cut of its machine."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None


def seaweedfs(folder: Path) -> Server:
    """A SeaweedFS server on data in `folder`, not started."""
    folder.mkdir(parents=True)
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = free_ports(4)
    command = [
        program("weed"), f"-logdir={folder}", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=40",
        f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
    ]  # fmt: skip
    return Server(folder, command, s3, "/healthz")


def rclone(folder: Path) -> Server:
    """An `rclone serve s3` on data in `folder`, not started. It has one bucket, "bucket"."""
    (folder / "data" / "bucket").mkdir(parents=True)
    (port,) = free_ports(1)
    command = [
        program("rclone"), "serve", "s3", str(folder / "data"), "--addr", f"127.0.0.1:{port}",
        "--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off", "--config", str(folder / "rclone.conf"),
    ]  # fmt: skip
    return Server(folder, command, port, "/")


Mood = Literal["pass", "throttle", "cut", "lose reply"]


@contextmanager
def bad_network(server: Server, mood: Callable[[str, str], Mood]) -> Iterator[str]:
    """A proxy in front of a server; its endpoint.

    mood(method, path) decides on each request: answer 503 SlowDown instead, cut the connection before the server hears
    of it, or cut it after the server has done what was asked.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chosen = mood(self.command, self.path)
            if chosen == "cut":
                self.close_connection = True
                return
            if chosen == "throttle":
                content = b"<Error><Code>SlowDown</Code></Error>"
                self.send_response(503, "Slow Down")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else content)
                return
            upstream = HTTPConnection(server.endpoint.removeprefix("http://"), timeout=30)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            reply = upstream.getresponse()
            content = reply.read()
            if chosen == "lose reply":
                self.close_connection = True
                return
            self.send_response(reply.status, reply.reason)
            for name, value in reply.headers.items():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", reply.headers.get("Content-Length", str(len(content))))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        proxy.server_close()
