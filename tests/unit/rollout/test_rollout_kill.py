"""SIGKILL, a real model, and the same samples."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane.rollout.log.recovery import recover

DRIVER = Path(__file__).parents[2] / "faults" / "rollout_driver.py"
PROMPTS = 40
TOLERANCE = 2e-5
"""Log-probs after a resume come from differently shaped float32 products: see test_hf_engine."""

Attempt = Callable[..., dict[str, Any]]
Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def attempt(tiny_model: Path) -> Iterator[Attempt]:
    """attempt(home, point, visit): one rollout in a process that dies at the visit-th pass of the point."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, str(DRIVER)], text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        stdin, stdout = driver.stdin, driver.stdout

        def tried(home: Path, point: str = "never", visit: int = 0) -> dict[str, Any]:
            task = {"home": str(home), "point": point, "visit": visit, "prompts": PROMPTS, "engine": str(tiny_model)}
            stdin.write(json.dumps(task) + "\n")
            stdin.flush()
            answer: dict[str, Any] = json.loads(stdout.readline())
            return answer

        yield tried
        stdin.close()


@pytest.fixture(scope="module")
def whole(attempt: Attempt, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The uninterrupted rollout."""
    home = tmp_path_factory.mktemp("whole")
    assert attempt(home)["code"] == 0
    return shelf(home)


def shelf(home: Path) -> Rows:
    """What was committed."""
    rows = [json.loads(line) for line in (home / "shelf.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["uid"] for row in rows}) == PROMPTS
    return {row["uid"]: row for row in rows}


def logged(home: Path) -> dict[str, list[int]]:
    """Log-prob bits that the log holds of each sample."""
    partials = recover(home / "wal" / "student" / "engine-0").ledger.partials.values()
    return {partial.spec.uid: np.array(partial.logprobs, np.float32).view(np.int32).tolist() for partial in partials}


def check(home: Path, whole: Rows) -> None:
    """Same uids, tokens and reasons; log-probs within float tolerance."""
    ended = shelf(home)
    assert ended.keys() == whole.keys()
    for uid, sample in ended.items():
        assert sample["tokens"] == whole[uid]["tokens"]
        assert sample["reason"] == whole[uid]["reason"]
        ours, theirs = (np.array(s["bits"], np.int32).view(np.float32) for s in (sample, whole[uid]))
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("point", "visits"),
    [
        pytest.param("rollout.step", (3, 40), marks=pytest.mark.slow),
        ("rollout.commit", (1,)),
        ("rollout.committed", (1,)),
    ],
)
def test_kill_and_run_again_gives_the_same_samples(
    attempt: Attempt, tmp_path: Path, whole: Rows, point: str, visits: tuple[int, ...]
) -> None:
    logged_bits: dict[str, list[int]] = {}
    for visit in visits:
        assert attempt(tmp_path, point, visit)["code"] == -9
        for uid, bits in logged(tmp_path).items():
            assert bits[: len(logged_bits.get(uid, []))] == logged_bits.get(uid, []), (
                "what was logged stays as it was logged"
            )
            logged_bits[uid] = bits
    last = attempt(tmp_path)
    assert last["code"] == 0
    check(tmp_path, whole)
    ended = shelf(tmp_path)
    assert all(ended[uid]["bits"][: len(bits)] == bits for uid, bits in logged_bits.items())
    assert any(logged_bits.values())
    assert last["drift"] < TOLERANCE


POINTS = (
    "wal.epoch.claimed", "wal.segment.header", "wal.segment.renamed", "wal.segment.named", "wal.base",
    "wal.base.synced", "wal.retire", "wal.append", "wal.appended", "wal.sync", "wal.synced", "rollout.step",
    "rollout.finish", "rollout.commit", "rollout.committed", "wal.closed",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_kills_give_the_same_samples(attempt: Attempt, tmp_path: Path, whole: Rows, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(6):
        assert attempt(tmp_path, draw.choice(POINTS), draw.choice((1, 1, 2, 5, 20, 60)))["code"] in (0, -9)
    assert attempt(tmp_path)["code"] == 0
    check(tmp_path, whole)
