"""An empty store, the builders, and committers in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.store.dataset import Store

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # store_builders, shared with child_commit.py

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.create(tmp_path / "store")


@pytest.fixture
def start_child() -> Start:
    """start_child(uri, "--samples", 0, 64, …) -> a running child_commit.py."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "child_commit.py"), *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    return start


def answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What a child printed; {} when it was killed."""
    out, _ = child.communicate(timeout=120)
    return json.loads(out) if child.returncode == 0 else {}


@pytest.fixture
def answer_of() -> Callable[[subprocess.Popen[str]], dict[str, Any]]:
    """Wait for a child and parse what it printed."""
    return answer
