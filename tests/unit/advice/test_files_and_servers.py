"""Next steps that messages about files, URLs, servers and plug-ins name: each is taken, and works."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from advice import advises
from pydantic import BaseModel

from mopd_dataplane.base import file_urls, files, http_client
from mopd_dataplane.base.http_client import Call, HttpClient, check_root
from mopd_dataplane.base.log.flusher import Flusher
from mopd_dataplane.base.log.segment_file import SegmentFile
from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.base.processes import exit_error
from mopd_dataplane.base.secrets import check_server_url
from mopd_dataplane.cli import app as app_errors
from mopd_dataplane.errors import InputError

ROOT = "http://127.0.0.1:8000/v1"


class Web:
    """A web server that does what a test says: `answer` gets the handler of each request."""

    def __init__(self, port: int = 0) -> None:
        self.answer: Callable[[BaseHTTPRequestHandler], None] = sound
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def sound(handler: BaseHTTPRequestHandler) -> None:
    """A short answer, whole."""
    _begin(handler, 200, 3)
    if handler.command == "GET":
        handler.wfile.write(b"ok\n")


def failing(handler: BaseHTTPRequestHandler) -> None:
    """A server in trouble."""
    _begin(handler, 500, 0)


def cut(handler: BaseHTTPRequestHandler) -> None:
    """A line, and then no more of what was promised."""
    _begin(handler, 200, 1000)
    handler.wfile.write(b"begun\n")
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def silent(handler: BaseHTTPRequestHandler) -> None:
    """A line, and then silence."""
    _begin(handler, 200, 1000)
    handler.wfile.write(b"begun\n")
    handler.wfile.flush()
    threading.Event().wait(2.0)


def mute(handler: BaseHTTPRequestHandler) -> None:
    """Not even headers."""
    threading.Event().wait(2.0)


def garbled(handler: BaseHTTPRequestHandler) -> None:
    """Bytes that are not in the encoding that the headers name."""
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", "3")
    handler.end_headers()
    handler.wfile.write(b"ok\n")


def _begin(handler: BaseHTTPRequestHandler, status: int, length: int) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.server.shutdown()
    web.server.server_close()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpClient]:
    """A client that is patient for a moment."""
    for name, seconds in (("_PAUSE_S", 0.01), ("BODY_S", 0.3), ("SILENCE_S", 0.3)):
        monkeypatch.setattr(http_client, name, seconds)
    client = HttpClient(headers={}, most=2, patience_s=0.1)
    yield client
    client.close()


def get(client: HttpClient, web: Web, deadline_s: float = 5.0) -> bytes:
    return client.request(Call(method="GET", url=f"{web.url}/v1/x", deadline_s=deadline_s)).require_success().content


def read_lines(client: HttpClient, web: Web) -> list[str]:
    async def every() -> list[str]:
        return [line async for line in client.stream(Call(method="GET", url=f"{web.url}/v1/x", deadline_s=5.0))]

    return client.start(every()).result(timeout=10)


def test_a_request_that_failed_goes_through_once_the_server_is_well(client: HttpClient, web: Web) -> None:
    web.answer = failing
    with advises(" times in "):
        get(client, web)
    web.answer = silent
    with advises(" s after its headers ("):
        get(client, web)
    web.answer = mute
    with advises(" was not answered in "):
        get(client, web, deadline_s=0.3)
    web.answer = sound
    assert get(client, web) == b"ok\n"


def test_a_stream_that_broke_off_is_whole_once_the_server_is_well(client: HttpClient, web: Web) -> None:
    web.answer = cut
    with advises(" was broken off: "):
        read_lines(client, web)
    web.answer = silent
    with advises(": the stream has been silent for "):
        read_lines(client, web)
    web.answer = sound
    assert read_lines(client, web) == ["ok"]


def test_a_server_that_is_started_answers(client: HttpClient) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with advises("; start it, then run again to continue"):
        client.request(Call(method="GET", url=f"http://127.0.0.1:{port}/v1/x"))
    web = Web(port)
    try:
        assert get(client, web) == b"ok\n"
    finally:
        web.server.shutdown()
        web.server.server_close()


def test_an_answer_in_an_unknown_encoding_is_named(client: HttpClient, web: Web) -> None:
    web.answer = garbled
    with advises(" could not be carried out ("):
        get(client, web)
    web.answer = sound
    assert get(client, web) == b"ok\n"


def test_the_url_of_a_server() -> None:
    with advises(": give the server's API root, like http://127.0.0.1:8000/v1"):
        check_root("http://127.0.0.1:8000")
    assert check_root(ROOT) == ROOT
    with advises("is not a URL; give the server's API root"):
        check_server_url("http://[::1")
    with advises("is no http URL; give the server's API root"):
        check_server_url("ftp://127.0.0.1")
    with advises("which would be stored with the job; give http://HOST:PORT/v1"):
        check_server_url("http://me:secret@127.0.0.1:8000/v1")
    assert check_server_url(ROOT) == ROOT


def test_files_by_name_and_url(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    (tmp_path / "empty").mkdir()
    with advises(" file there; give a file, a folder that holds some, or a pattern"):
        file_urls.files_at(tmp_path / "empty", [".jsonl"])
    for there in (rows, tmp_path, tmp_path / "*.jsonl"):
        assert file_urls.files_at(there, [".jsonl"]) == [str(rows)]
    with advises(" exists; give a path that does not exist"):
        file_urls.check_new(rows)
    with advises(" is a file, not a folder; give another path"):
        file_urls.check_new(rows / "below")
    file_urls.check_new(tmp_path / "new")
    with advises(" can only be read; give a local file, or an object store's URL"):
        file_urls.write_file("https://example.org/x", b"")
    for there in (tmp_path / "x", "memory://advice/x"):
        file_urls.write_file(there, b"here")
        assert file_urls.read_file(there) == b"here"
    with advises("; give a path, or a URL that begins with hf://"):
        file_urls.read_file("nosuch://x/y")
    with advises(" cannot be read as a file: "):
        file_urls.read_file("/proc/self/mem")
    assert file_urls.read_file(rows) == b"{}\n"


def test_a_url_is_read_once_its_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://advice/y"
    file_urls.write_file(url, b"here")
    error: Exception = TimeoutError()

    def fail(*args: object, **options: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(type(fsspec.filesystem("memory")), "get_file", fail)
        with advises(": no answer in time; run the same command again"):
            file_urls.read_file(url)
        error = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        with advises("; check the name, or run again"):
            file_urls.read_file(url)
    assert file_urls.read_file(url) == b"here"


def test_a_url_is_read_once_its_server_is_well(web: Web) -> None:
    web.answer = failing
    with advises(": its server fails ("):
        file_urls.read_file(f"{web.url}/x")
    web.answer = sound
    assert file_urls.read_file(f"{web.url}/x") == b"ok\n"


def test_targets(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    with advises("does not end like a picture; give a name"):
        files.publish_figure(Figure(), tmp_path / "curve.txt", dpi=10)
    files.publish_figure(Figure(), tmp_path / "curve.png", dpi=10)
    (tmp_path / "file").write_bytes(b"")
    with advises(" cannot be written to ("):
        files.check_target(tmp_path / "file" / "below")
    with advises(" is not a regular file and is left alone; give another file"):
        files.check_target(tmp_path)
    files.check_target(tmp_path / "other")
    with advises(" exists and is not a socket: it is left alone; give another path"):
        files.unlink_socket(tmp_path / "file")
    files.unlink_socket(tmp_path / "other")


def test_what_another_process_writes_is_written_once_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PUBLISH_S", 0.2)
    monkeypatch.setattr(files, "_MAKE_S", 0.2)
    staging = tmp_path / ".file.tmp"
    with staging.open("wb") as other:
        assert files.try_lock(other)
        with advises("another process has been writing "):
            files.publish_file(tmp_path / "file", b"new")
    files.publish_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    (tmp_path / ".folder.tmp").mkdir()
    descriptor = os.open(tmp_path / ".folder.tmp", os.O_RDONLY)
    assert files.try_lock(descriptor)
    with advises("another process has been filling "):
        files.make_folder(tmp_path / "folder", lambda folder: None)
    os.close(descriptor)
    files.make_folder(tmp_path / "folder", lambda folder: None)
    assert (tmp_path / "folder").is_dir()


def test_a_full_disk_that_has_space_again() -> None:
    is_full = True

    def write() -> str:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "written"

    def write_with_patience() -> str:
        return files.once_there_is_space(
            write, disk="the disk", pauses="sampling pauses", continues="sampling goes on", outcome="nothing is lost",
            wait_s=0.0, notice=lambda text: None,
        )  # fmt: skip

    def write_once() -> str:
        with files.full_disk_named():
            return write()

    with advises(" s; free some space and run again: "):
        write_with_patience()
    with advises("; nothing half-written is used: free some space, then run again to continue"):
        write_once()
    is_full = False
    assert write_with_patience() == write_once() == "written"


def test_a_log_whose_disk_failed_a_sync_is_read_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(name: str) -> SegmentFile:
        return SegmentFile(
            tmp_path / name, b"header", syncs=True, full_disk_wait_s=0, notice=print, words=("sampling", "kept")
        )

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    first = segment("0001")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fail)
        first.write(b"lost")
        with advises("Check the disk, then run again: what was synced before is kept"):
            first.sync()
    first.close()
    assert (tmp_path / "0001").read_bytes().startswith(b"header")
    segment("0002").close()


def test_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "advised_plugin.py"
    with advises(" (or give package.module:Name)"):
        find_plugin("mopd.rewards", "advised", {})
    module.write_text("raise ValueError('half written')\n")
    with advises("mend the module, then run the same command again"):
        find_plugin("mopd.rewards", "advised_plugin:Reward", {})
    module.write_text("Reward = 'a reward, in another length'\n")
    sys.modules.pop("advised_plugin", None)
    assert find_plugin("mopd.rewards", "advised_plugin:Reward", {}) == "a reward, in another length"


class Form(BaseModel):
    """What an answer should have."""

    rank: int


def test_an_answer_of_another_form_is_taken_once_it_has_its_own(client: HttpClient, web: Web) -> None:
    def answers(content: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            _begin(handler, 200, len(content))
            handler.wfile.write(content)

        return answer

    def rank() -> int:
        return client.request(Call(method="GET", url=f"{web.url}/v1/x", deadline_s=5.0)).read(Form).rank

    web.answer = answers(b'{"rank": "first"}')
    with advises("; nothing of it was stored: check that ") as refused:
        rank()
    assert str(refused.value).endswith("check that the url is that of a vLLM server, then run again to continue")
    web.answer = answers(b'{"rank": 1}')
    assert rank() == 1


def test_a_process_that_may_open_more_files(tmp_path: Path) -> None:
    """Below its limit of descriptors it opens what it could not."""

    def read() -> bytes:
        try:
            return (tmp_path / "file").read_bytes()
        except OSError as error:
            failure = files.out_of_descriptors("the file", error)
            assert failure is not None
            raise failure from None

    (tmp_path / "file").write_bytes(b"here")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    opened.enter_context((tmp_path / "file").open())
            with advises("nothing is damaged: raise the limit, or close stores that are not used, then run again"):
                read()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert read() == b"here"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_log_whose_thread_died_is_written_by_the_next_run() -> None:
    def die() -> None:
        raise ValueError("no such thing")

    def synced(sync: Callable[[], None]) -> bool:
        flusher = Flusher(0.0, sync, lambda: None)
        flusher.start()
        flusher.wrote(1)
        try:
            flusher.wait(1)
        finally:
            flusher.stop()
        return True

    with advises("the thread that syncs the log died: "):
        synced(die)
    assert synced(lambda: None)


def test_a_part_that_ended_is_started_by_the_same_command() -> None:
    def run(code: str) -> None:
        if ended := subprocess.run([sys.executable, "-c", code], check=False).returncode:
            raise exit_error("a part", ended)

    with advises("; run the same command again to continue"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(InputError, match="mend it and run the same command again to continue"):
        run("raise SystemExit(2)")
    run("")


def test_a_place_that_the_system_refuses(tmp_path: Path) -> None:
    """The system's refusal is stood in for: nobody refuses root."""
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "closed"))
    with advises("; give another path, or the right to use it"):
        raise app_errors._known(refused)
    (tmp_path / "open").write_bytes(b"")
