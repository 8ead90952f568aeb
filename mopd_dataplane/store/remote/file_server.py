"""Serves the files of a store on an object store to Lance in the same process, from the node's cache.

Lance has no disk cache and no hook in Python for the bytes that it reads, but it reads from any S3 server. This one
listens on the loopback interface and answers reads only. Its access key is random, and a request must name it: other
users of the machine can connect to the port, but they do not have the key.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import sys
import weakref
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

from mopd_dataplane.errors import InputError, MopdError, ResourceError, UnknownNameError
from mopd_dataplane.store.remote.cached_files import FETCH_S, CachedFiles
from mopd_dataplane.store.remote.objects import CONNECT_S, ObjectFiles
from mopd_dataplane.store.remote.range_cache import RangeCache

HOST = "127.0.0.1"
IDLE_S = 600.0
"""Time without a request after which a connection is closed; Lance opens another one."""
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (FileNotFoundError, 404, "NoSuchKey"),
    (InputError, 403, "AccessDenied"),
    (UnknownNameError, 404, "NoSuchBucket"),
    (ResourceError, 400, "Refused"),
    (MopdError, 504, "NoAnswer"),
)
"""Status and code of the reply to an error of the object store, from which network.py gets the same error back."""


class FileServer:
    """An S3 server of one store that serves reads from a cache."""

    def __init__(self, files: ObjectFiles, cache: RangeCache) -> None:
        """Start to serve, in threads of this process, until `close` or until this object is gone."""
        address = urlsplit(files.uri)
        self.uri = f"s3://{address.netloc}{address.path}"
        """URI under which Lance opens what is served."""
        key = secrets.token_hex(16)
        cached = CachedFiles(files, cache)
        handler = type("Handler", (_Handler,), {"files": cached, "key": key, "root": f"/{self.uri[5:]}/"})
        server = _Server((HOST, 0), handler)
        Thread(target=server.serve_forever, name="file-server", daemon=True).start()
        endpoint = f"http://{HOST}:{server.server_address[1]}"
        self.storage_options = {  # all that the environment could set instead
            "aws_endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "aws_access_key_id": key,
            "aws_secret_access_key": secrets.token_hex(16),
            "aws_region": "us-east-1",
            "aws_virtual_hosted_style_request": "false",
            "aws_skip_signature": "false",
            "aws_s3_express": "false",
            "allow_http": "true",
            "client_max_retries": "0",  # ObjectFiles has retried
            "connect_timeout": f"{CONNECT_S}s",
            "timeout": f"{FETCH_S:.0f}s",
        }
        _bypass_proxies()
        self.close = weakref.finalize(self, _stop, server, cached)
        """Stop serving."""
        self.close.atexit = False  # its threads end with the process


def _bypass_proxies() -> None:
    """Let HTTP clients of this process reach the server directly, and not through a proxy of the environment."""
    names = ("NO_PROXY", "no_proxy")
    lists = [os.environ.get(name) or os.environ.get(other, "") for name, other in (names, names[::-1])]
    for name, hosts in zip(names, lists, strict=True):
        if HOST not in hosts.split(","):
            os.environ[name] = ",".join(filter(None, (hosts, HOST)))


class _Server(ThreadingHTTPServer):
    """A server whose connections may be cut by either side."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about a connection that Lance has closed, and the traceback of any other error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _stop(server: ThreadingHTTPServer, files: CachedFiles) -> None:
    # `shutdown` waits for the serving thread, which may be the one that runs this: the garbage collector calls it.
    def stop() -> None:
        server.shutdown()
        server.server_close()

    Thread(target=stop, name="file-server-end", daemon=True).start()
    files.close()


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_S
    files: CachedFiles
    key: str
    root: str
    """Path of the store's files, as in "/bucket/prefix/"."""

    def do_HEAD(self) -> None:
        """Answer with ETag and size of a file."""
        self._answer(is_head=True)

    def do_GET(self) -> None:
        """Answer with a range of a file, or all of it."""
        self._answer(is_head=False)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self, *, is_head: bool) -> None:
        _, _, credential = self.headers.get("Authorization", "").partition("Credential=")
        if not hmac.compare_digest(credential.partition("/")[0].encode(), self.key.encode()):
            self._refuse(403, "AccessDenied", is_head=is_head)
            return
        path, _, query = self.path.partition("?")
        name = unquote(path).removeprefix(self.root)
        if query or not unquote(path).startswith(self.root):
            self._refuse(501, "NotImplemented", is_head=is_head)
            return
        try:
            identity = self.files.identity(name, is_check=is_head)
            if identity is None:
                raise FileNotFoundError(name)
            start, end = _range(self.headers.get("Range", ""), identity.size)
            content = memoryview(b"") if is_head else self.files.read(name, identity, start, end)
        except (MopdError, OSError) as error:
            status, code = next(((s, c) for kind, s, c in _STATUS if isinstance(error, kind)), (500, "InternalError"))
            self._refuse(status, code, is_head=is_head)
            return
        is_part = (start, end) != (0, identity.size)
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{identity.size}")
        self.send_header("ETag", identity.etag)
        self.send_header("Last-Modified", "Thu, 01 Jan 1970 00:00:00 GMT")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str, *, is_head: bool) -> None:
        content = f"<Error><Code>{code}</Code></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(b"" if is_head else content)


def _range(header: str, size: int) -> tuple[int, int]:
    """Return first byte and end of the range that a request names; the whole file when it names none."""
    match = _RANGE.fullmatch(header)
    if match is None or not any(match.groups()):
        return 0, size
    if not match[1]:
        return max(0, size - int(match[2])), size
    start = min(int(match[1]), size)
    return start, max(start, min(size, int(match[2]) + 1 if match[2] else size))
