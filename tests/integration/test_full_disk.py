"""A whole job whose store lies on a small tmpfs: clear endings, pauses, and the samples of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import open_store

SCRIPT = Path(__file__).with_name("full_disk.py")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, write_job: Callable) -> tuple[dict[str, Any], Path]:
    """What full_disk.py tells, and a copy of the store it leaves."""
    folder = tmp_path_factory.mktemp("full")
    job = write_job(folder, extra="\n[wal]\nsegment_bytes = 4096\n")
    own = ["unshare", "--mount"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        own = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("neither root nor user namespaces here: no small disk can be mounted")
    done = subprocess.run([*own, sys.executable, str(SCRIPT), str(job)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "copy"


@pytest.mark.slow
def test_every_ending_names_the_cause_and_the_next_step(ran: tuple[dict[str, Any], Path]) -> None:
    endings = ran[0]["endings"]
    assert endings, "the disk was too large to get full"
    for ending in endings:
        assert ending["code"] == 4, ending["said"]
        assert "space" in ending["said"] or "full" in ending["said"], ending["said"]
        assert "again" in ending["said"].rstrip().splitlines()[-1], ending["said"]
        assert "Traceback" not in ending["said"]


@pytest.mark.slow
def test_rollouts_pause_and_go_on(ran: tuple[dict[str, Any], Path]) -> None:
    said = "\n".join(ran[0]["said"])
    assert ran[0]["fillings"] >= 2
    assert said.count("is full") >= ran[0]["fillings"]
    assert "generation pauses until there is space" in said
    assert "commits pause until there is space" in said


@pytest.mark.slow
def test_nothing_is_half_written_and_nothing_is_different(ran: tuple[dict[str, Any], Path], finished_job: Path) -> None:
    assert ran[0]["findings"] == []
    assert ran[0]["left"] == []
    samples = [open_store(str(store)).table("tokens", ["uid", "tokens"]) for store in (ran[1], finished_job / "store")]
    ours, theirs = ({row["uid"]: row["tokens"] for row in table.to_pylist()} for table in samples)
    assert ours == theirs
    assert np.all([len(tokens) for tokens in ours.values()])
