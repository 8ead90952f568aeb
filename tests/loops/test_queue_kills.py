"""A few of the kills of queue_kills.py, behind a store and behind TransferQueue's SimpleStorage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("queue_kills.py")
KILLS = 6


def killed(backend: str, folder: Path) -> dict[str, Any]:
    """The sums over KILLS kills."""
    words = [sys.executable, "-W", "ignore", str(DRIVER), "--kills", str(KILLS), "--backend", backend]
    done = subprocess.run(
        [*words, "--out", str(folder)], stdout=subprocess.PIPE, text=True, timeout=900, check=True, env=os.environ
    )
    sums: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return sums


def test_a_store_loses_nothing_and_generates_no_finished_group_again(tmp_path: Path) -> None:
    sums = killed("MopdStore", tmp_path)
    assert sums["kills"] == KILLS
    assert sums["acknowledged"] > 0
    wrong = ("lost", "doubled", "mislabelled", "fragments", "twice", "groups_again")
    assert {name: sums[name] for name in wrong} == dict.fromkeys(wrong, 0)


def test_the_same_kills_of_transferqueues_own_backend_cost_finished_groups(tmp_path: Path) -> None:
    sums = killed("SimpleStorage", tmp_path)
    assert sums["groups_again"] > 0
    assert sums["mislabelled"] == sums["fragments"] == sums["twice"] == 0
