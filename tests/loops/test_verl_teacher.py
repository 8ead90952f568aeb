"""A trainer of verl reads the signals of teachers that `mopd score --queue` puts beside its trajectories."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commandline import command

from mopd_dataplane import open_store

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"
STEPS = 3
TIMEOUT_S = 900


@contextmanager
def started(*words: object, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose group ends with the block."""
    process = subprocess.Popen(
        list(map(str, words)), stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lines_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read what a process prints until a line matches."""
    assert process.stdout is not None
    for line in iter(process.stdout.readline, ""):
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"ended with {process.wait()} before it printed {pattern!r}")


def test_the_trainer_trains_on_what_teachers_put_while_both_are_killed(tmp_path: Path) -> None:
    """The scorer is killed after the first step, starts again, and ends with the framework."""
    store = tmp_path / "store"
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }  # fmt: skip
    score = command(
        "score", EXAMPLES / "after_verl.toml", "--stage", "train", "--queue", "verl", "--store", store,
        "--set", f'student.path="{store}.model"', "--json",
    )  # fmt: skip
    run = (sys.executable, EXAMPLES / "verl_run.py", store, STEPS, "--teacher")
    with started(*run, environment=environment) as trainer:
        environment["RAY_ADDRESS"] = lines_until(trainer, r"^ray: (\S+)")[1]
        with started(*score, environment=environment) as killed:
            gaps = [float(lines_until(trainer, r"^step 0: (\S+) nat")[1])]
            os.killpg(killed.pid, signal.SIGKILL)
        with started(*score, environment=environment) as scorer:
            gaps += [float(lines_until(trainer, rf"^step {step}: (\S+) nat")[1]) for step in range(1, STEPS)]
            assert trainer.wait(TIMEOUT_S) == 0
            out, _ = scorer.communicate(timeout=TIMEOUT_S)
    assert scorer.returncode == 0
    told: dict[str, Any] = json.loads(out)
    # The teachers have the weights that verl's worker sampled with: float32 sums of other shapes through two layers.
    assert max(gaps) < 1e-4
    opened = open_store(str(store))
    samples = len(opened.samples(["uid"]))
    assert samples >= STEPS * 8
    assert 0 < told["put"] < samples
    scores = opened.sql("select teacher, count(*) as n from scores where kind = 'logprob' group by 1").to_pylist()
    assert {row["teacher"] for row in scores} == {"adder", "speller"}
    assert sum(row["n"] for row in scores) == samples
    assert opened.sql("select detail from events where kind = 'unrecorded'").to_pylist() == []
