"""A store with every signal and two windows, and a loader of it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mopd_dataplane.load.launch import LoaderProcess, start_server
from mopd_dataplane.store.dataset import Store

sys.path.insert(0, str(Path(__file__).parent))  # load_builders


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    from load_builders import small_store

    return small_store(tmp_path_factory.mktemp("load") / "store")


@pytest.fixture(scope="module")
def loader(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoaderProcess]:
    """One loader for all tests: a connection that asks for nothing keeps it alive between trainers."""
    from load_builders import SPEC

    path = tmp_path_factory.mktemp("loader") / "loader.sock"
    with start_server(store.uri, path, SPEC) as process, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as anchor:
        anchor.connect(str(path))
        yield process
