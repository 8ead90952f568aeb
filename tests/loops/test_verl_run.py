"""verl's own loop around a store (jobs/examples/verl_run.py) is killed at random and loses nothing it acknowledged."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commandline import ENVIRONMENT, command

from mopd_dataplane import Store, open_store
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.transferqueue.promote import GROUP

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"
KILLS, STEPS = 3, 4


def start(store: Path, steps: int, *options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    run = [sys.executable, str(EXAMPLES / "verl_run.py"), str(store), str(steps), *options]
    return subprocess.Popen(run, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)


def acknowledged(store: Path) -> dict[tuple[str, int], list[int]]:
    """Tokens of each trajectory whose put returned, by its prompt and its session."""
    file = store.with_name(store.name + ".acknowledged")
    lines = file.read_text().splitlines() if file.exists() else []
    return {(uid, session): tokens for uid, session, tokens in map(json.loads, lines)}


def trajectories(store: Store) -> list[tuple[tuple[str, int], list[int]]]:
    """The same of every sample."""
    ids = np.concatenate([ids for ids, _ in store.scan_samples(["uid"])])
    samples = store.take_samples(ids, ["group_id", "group_index"]).to_pylist()
    tokens = store.read_tokens(ids, ["tokens"], verify=True)["tokens"].to_pylist()
    return [((row["group_id"], row["group_index"]), own) for row, own in zip(samples, tokens, strict=True)]


def finished_groups(store: Path) -> int:
    """Records of finished groups in the queue; a prompt is finished a moment after its last answer."""
    return sum(field == GROUP for _, field in LoggedQueue(store, "verl", starts_folding=False).writes())


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run that was killed KILLS times, with every process of Ray, and then ran to its end."""
    store, chance = tmp_path_factory.mktemp("verl") / "store", random.Random(0)
    for kill in range(KILLS):
        before = len(acknowledged(store))
        run = start(store, 1000)
        deadline = time.monotonic() + 300
        while len(acknowledged(store)) <= before:
            assert run.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline, f"nothing was acknowledged after kill {kill}"
            time.sleep(0.1)
        time.sleep(chance.uniform(0, 6))
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    done = int(Path(f"{store}.checkpoints/latest").read_text())
    run = start(store, done + STEPS)
    out, _ = run.communicate(timeout=600)
    assert run.returncode == 0, out
    LoggedQueue(store, "verl", starts_folding=False).fold()
    return store


def test_every_acknowledged_trajectory_is_a_sample_once(killed_run: Path) -> None:
    there, promised = trajectories(open_store(str(killed_run))), acknowledged(killed_run)
    assert len(promised) >= STEPS * 8
    assert len({key for key, _ in there}) == len(there)
    assert {key: tokens for key, tokens in there if key in promised} == promised


def test_two_teachers_score_the_run_and_a_stage_trains_on_it(killed_run: Path) -> None:
    places = ("--store", killed_run, "--set", f'student.path="{killed_run}.model"')
    subprocess.run(command("run", EXAMPLES / "after_verl.toml", *places), check=True, timeout=900, env=ENVIRONMENT)
    store = open_store(str(killed_run))
    samples = len(trajectories(store))
    (scored,) = store.sql("select count(distinct uid) as n, max(abs(mean_reverse_kl)) as gap from scores").to_pylist()
    assert scored["n"] == samples
    # The teachers have the weights that verl's worker sampled with, so what it put are their log-probs: float32 sums of
    # other shapes through two layers, in nat, mean of a sample.
    assert scored["gap"] < 1e-4
    assert store.sql("select sum(samples) as n from steps").to_pylist() == [{"n": samples}]


def test_groups_that_were_finished_before_the_kill_are_not_generated_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    run = start(store, 1)
    run.communicate(timeout=600)
    before = acknowledged(store)
    waiting = start(store, 2, "--teacher")  # its second step draws finished groups and waits for a teacher without end
    deadline = time.monotonic() + 300
    while len(acknowledged(store)) < len(before) + 8 or finished_groups(store) < 4:
        assert waiting.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "no group was finished"
        time.sleep(0.1)
    os.killpg(waiting.pid, signal.SIGKILL)
    waiting.wait()
    finished = acknowledged(store)
    again = start(store, 3)
    out, _ = again.communicate(timeout=600)
    assert again.returncode == 0, out
    assert [line for line in out.splitlines() if line.startswith("step")] == [
        "step 1: 8 trajectories", "step 2: 8 trajectories",
    ]  # fmt: skip
    assert len(before) == 8
    assert len(finished) == 16
    assert len(acknowledged(store)) == 24, "only the third step generates"
