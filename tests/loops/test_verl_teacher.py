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
from contextlib import AbstractContextManager, contextmanager
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


class Commands:
    """The two commands over one store, and the environment of both."""

    def __init__(self, store: Path) -> None:
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }  # fmt: skip
        self.score = command(
            "score", EXAMPLES / "after_verl.toml", "--stage", "train", "--queue", "verl", "--store", store,
            "--set", f'student.path="{store}.model"', "--json",
        )  # fmt: skip
        self.store = store

    @contextmanager
    def trainer(self, steps: int) -> Iterator[subprocess.Popen[str]]:
        """The framework, once its TransferQueue runs."""
        run = (sys.executable, EXAMPLES / "verl_run.py", self.store, steps, "--teacher")
        with started(*run, environment=self.environment) as trainer:
            self.environment["RAY_ADDRESS"] = lines_until(trainer, r"^ray: (\S+)")[1]
            yield trainer

    def scorer(self) -> AbstractContextManager[subprocess.Popen[str]]:
        """`mopd score --queue`."""
        return started(*self.score, environment=self.environment)


def end(scorer: subprocess.Popen[str]) -> dict[str, Any]:
    """What a scorer tells when it has ended by itself."""
    out, _ = scorer.communicate(timeout=TIMEOUT_S)
    assert scorer.returncode == 0
    told: dict[str, Any] = json.loads(out)
    return told


def check_scores(store: Path) -> int:
    """Check that every sample has one log-prob signal, of the teacher of its domain. Returns the number of samples."""
    opened = open_store(str(store))
    samples = len(opened.samples(["uid"]))
    scores = opened.sql("select teacher, count(*) as n from scores where kind = 'logprob' group by 1").to_pylist()
    assert {row["teacher"] for row in scores} == {"adder", "speller"}
    assert sum(row["n"] for row in scores) == samples
    assert opened.sql("select detail from events where kind = 'unrecorded'").to_pylist() == []
    return samples


def test_the_trainer_reads_what_teachers_put_though_their_process_is_killed(tmp_path: Path) -> None:
    """The scorer is killed after the first step, starts again, and ends with the framework."""
    commands = Commands(tmp_path / "store")
    with commands.trainer(STEPS) as trainer:
        with commands.scorer() as killed:
            gaps = [float(lines_until(trainer, r"^step 0: (\S+) nat")[1])]
            os.killpg(killed.pid, signal.SIGKILL)
        with commands.scorer() as scorer:
            gaps += [float(lines_until(trainer, rf"^step {step}: (\S+) nat")[1]) for step in range(1, STEPS)]
            assert trainer.wait(TIMEOUT_S) == 0
            told = end(scorer)
    # The teachers have the weights that verl's worker sampled with: float32 sums of other shapes through two layers.
    assert max(gaps) < 1e-4
    samples = check_scores(commands.store)
    assert samples >= STEPS * 8
    assert 0 < told["put"] < samples


def test_the_scorer_ends_when_the_framework_is_killed(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "store")
    with commands.trainer(1000) as trainer, commands.scorer() as scorer:
        lines_until(trainer, r"^step 0: (\S+) nat")
        os.killpg(trainer.pid, signal.SIGKILL)
        end(scorer)
    assert check_scores(commands.store) >= 8
