"""Addresses of the viewer that last: ports, tokens, tunnels, the reader's browser, and stores that come later."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import command
from starlette.testclient import TestClient
from viewing import BASE, BEARER, PORT, TOKEN, client_of

from mopd_dataplane import Store
from mopd_dataplane.errors import InputError, ResourceError
from mopd_dataplane.view.addresses import has_browser, listen, open_browser, port_of, token_in, tunnel
from mopd_dataplane.view.app import build_app
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.stores import ShownStores


def test_a_store_has_the_same_port_at_every_start_and_a_neighbour_when_it_is_taken() -> None:
    uris = ["/runs/a"]
    own = port_of(uris)
    assert own == port_of(["/runs/a"]) != port_of(["/runs/b"])
    with listen(None, uris) as first, listen(None, uris) as second:
        ports = [taken.getsockname()[1] for taken in (first, second)]
        assert own <= ports[0] < ports[1]
        with pytest.raises(ResourceError, match=rf"cannot listen on port {ports[0]}.*another --port, or 0"):
            listen(ports[0], uris)


def test_a_token_file_is_written_once_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = token_in(file)
    assert token_in(file) == token
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(InputError, match=r"can be read by others.*chmod 600"):
        token_in(file)
    file.chmod(0o600)
    for wrong in ("short", "x" * 600, "with a space in the middle"):
        file.write_text(wrong)
        with pytest.raises(InputError, match="16 to 512 letters"):
            token_in(file)
    with pytest.raises(InputError, match="in a folder that exists"):
        token_in(tmp_path / "missing" / "token")


@pytest.mark.parametrize("name", ["localhost:9999", "127.0.0.1:9999", "[::1]:9999", "localhost"])
def test_a_tunnel_may_have_another_port(demo_store: Store, name: str) -> None:
    page = client_of(demo_store, **BEARER, host=name, origin=f"http://{name}")
    assert page.get("/api/stores").status_code == 200
    page.headers["origin"] = f"http://localhost:{PORT}"
    assert page.get("/api/stores").status_code == 403, "another server on this machine is another origin"


def test_the_address_a_browser_is_started_with_opens_once(demo_store: Store) -> None:
    app = build_app(ShownStores([Shown(demo_store)]), token=TOKEN, port=PORT, once="for-one-time")
    opened = TestClient(app, base_url=BASE, follow_redirects=False)
    assert opened.get("/?token=for-one-time").status_code == 303
    assert opened.get("/api/stores").status_code == 200
    assert TestClient(app, base_url=BASE).get("/?token=for-one-time").status_code == 401
    assert TestClient(app, base_url=BASE, headers={"authorization": "Bearer for-one-time"}).get("/").status_code == 401


def test_a_browser_is_expected_where_somebody_would_see_it() -> None:
    assert has_browser({"DISPLAY": ":0"}, "linux")
    assert has_browser({}, "darwin")
    assert not has_browser({}, "linux")
    assert not has_browser({"DISPLAY": ":10", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, "linux")


def test_the_readers_browser_gets_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, log = tmp_path / "browser", tmp_path / "log"
    browser.write_text(f'#!/bin/sh\necho "$1" > {log}.part && mv {log}.part {log}\n')
    browser.chmod(0o700)
    monkeypatch.setattr("webbrowser._tryorder", None)
    monkeypatch.setenv("BROWSER", str(browser))
    assert open_browser("http://127.0.0.1:1/?token=x")
    until = time.monotonic() + 20
    while not log.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert log.read_text().strip() == "http://127.0.0.1:1/?token=x"


def stores_at(address: str) -> str:
    """What the server of a printed address says of its stores."""
    url, token = address.split("?token=")
    request = urllib.request.Request(f"{url}api/stores", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command("view", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_address_stays_and_the_tunnel_is_printed(demo_store: Store, tmp_path: Path) -> None:
    lines = []
    for _ in range(2):
        server = started(str(demo_store.uri), "--token-file", str(tmp_path / "token"), "--no-open")
        assert server.stdout is not None
        assert server.stderr is not None
        address = server.stdout.readline().strip()
        printed = server.stderr.readline().strip()
        server.terminate()
        server.wait(timeout=60)
        lines.append(address)
    assert lines[0] == lines[1]
    port = int(re.search(r":(\d+)/", lines[0])[1])  # type: ignore[index]
    assert port == port_of([str(demo_store.uri)])
    assert printed.endswith(tunnel(port))
    assert socket.gethostname() in printed


@pytest.mark.slow
def test_a_store_that_does_not_exist_yet_is_waited_for(make_store: Callable[..., Store], tmp_path: Path) -> None:
    server = started(str(tmp_path / "later"), "--port", "0", "--follow")
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        assert "there is no store at" in server.stderr.readline()
        make_store(tmp_path / "later", prompts=1)
        address, until = server.stdout.readline().strip(), time.monotonic() + 60
        while '"samples":12' not in stores_at(address):  # it may have looked while the store was being written
            assert time.monotonic() < until
            time.sleep(0.5)
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.mark.slow
def test_a_folder_of_runs_shows_each_of_them(make_store: Callable[..., Store], tmp_path: Path) -> None:
    for n, name in enumerate(("first", "second")):
        make_store(tmp_path / name, prompts=1)
        os.utime(tmp_path / name / "store.json", (1_000_000 * (n + 1),) * 2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "store.json").write_text("no JSON")
    server = started(str(tmp_path), "--port", "0")
    assert server.stdout is not None
    try:
        text = stores_at(server.stdout.readline().strip())
    finally:
        server.terminate()
        server.wait(timeout=60)
    assert re.findall(r'"name":"(\w+)","uri"', text) == ["second", "first"], "the newest first"
    assert "broken" not in text
