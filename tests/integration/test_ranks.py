"""Training on several ranks over gloo: the same losses and weights as one, through kills and other world sizes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pausing import PAUSE
from trainer_ground import START_S, Ground, go_on, started, wait_until_paused, wait_until_told, weights

from mopd_dataplane import open_store
from mopd_dataplane.errors import EngineError
from mopd_dataplane.job.sections import Lora
from mopd_dataplane.models.adapter_files import is_adapter
from mopd_dataplane.train.checkpoint import latest_checkpoint
from mopd_dataplane.train.metrics import MetricsReader

PRELOADED = ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "mopd_dataplane.train.run",
             "mopd_dataplane.load.client", "transformers.models.qwen3.modeling_qwen3"]  # fmt: skip
LEARNING_RATE = 1e-3
DEADLINE_S = 120.0
"""Longest life of the others after a rank was killed: far less than they wait for each other."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    torch.set_num_threads(1)
    return Ground(tmp_path_factory.mktemp("ranks"), epochs=1)


@pytest.fixture(scope="module")
def alone(ground: Ground) -> Path:
    """One rank, uninterrupted."""
    train(ground, ground.root / "alone", ranks=1)
    return ground.root / "alone"


def rank_main(spec: str, rank: int, ranks: int) -> None:
    """A rank as torchrun would start it."""
    from mopd_dataplane.train.__main__ import main

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    sys.exit(main([spec]))


@contextmanager
def running(
    ground: Ground, run_dir: Path, *, ranks: int, members: int = 1, rank_deadline_s: float = START_S, **keys: Any
) -> Iterator[list[BaseProcess]]:
    """A loader and the ranks it serves: real processes, forked from one that has torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ground.loader(run_dir, members=members, rank_deadline_s=rank_deadline_s, **keys) as spec:
        processes = [context.Process(target=rank_main, args=(str(spec), rank, ranks)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()


def train(ground: Ground, run_dir: Path, *, ranks: int, members: int = 1, **keys: Any) -> None:
    with running(ground, run_dir, ranks=ranks, members=members, **keys) as processes:
        for process in processes:
            process.join(timeout=START_S)
        assert [process.exitcode for process in processes] == [0] * ranks


def assert_same_training(run_dir: Path, alone: Path) -> None:
    """Every step once, with the same samples, and losses and weights that differ by the order of sums only.

    A step's loss, norm and metrics are float32 sums over about 10^4 terms in another order: 1e-6 relative, times what
    the weights have drifted apart before. Adam divides each gradient by its own size, so where a gradient is nothing
    but rounding the step may go either way: such a weight can drift by 2 learning rates a step, most drift by none.
    """
    one, many = MetricsReader(alone / "checkpoints").steps(), MetricsReader(run_dir / "checkpoints").steps()
    for field in ("step", "window", "samples", "tokens", "loss_tokens", "staleness_max", "learning_rate"):
        assert [getattr(m, field) for m in many] == [getattr(m, field) for m in one], field
    for a, b in zip(one, many, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-3)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-2)
        assert b.extra == pytest.approx(a.extra, rel=1e-3, abs=1e-4)
    assert one[0].loss == pytest.approx(many[0].loss, rel=1e-5)  # before any update: the order of sums alone
    assert one[0].grad_norm == pytest.approx(many[0].grad_norm, rel=1e-5)
    expected = weights(alone)
    drift = torch.cat([(tensor - expected[name]).abs().flatten() for name, tensor in weights(run_dir).items()])
    assert drift.quantile(0.99) < 0.05 * LEARNING_RATE
    assert drift.max() < 2 * LEARNING_RATE * len(one)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "members"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_losses_and_weights_are_those_of_one_rank(ranks: int, members: int, ground: Ground, alone: Path) -> None:
    run_dir = ground.root / f"r{ranks}m{members}"
    train(ground, run_dir, ranks=ranks, members=members)
    assert_same_training(run_dir, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "members"), [(2, 1), (4, 2)])
def test_an_adapter_is_trained_by_several_ranks_as_by_one(ranks: int, members: int, ground: Ground) -> None:
    alone, run_dir = ground.root / f"adapter-alone-{ranks}", ground.root / f"adapter-r{ranks}m{members}"
    train(ground, alone, ranks=1, lora=Lora(r=4))
    train(ground, run_dir, ranks=ranks, members=members, lora=Lora(r=4))
    assert is_adapter(run_dir / "policies" / "v1")
    assert_same_training(run_dir, alone)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"lora": Lora(r=4)}, {"offload": True}], ids=["adapter", "offload"])
def test_a_killed_rank_with_less_on_its_device_is_continued_by_any_number(ground: Ground, keys: dict[str, Any]) -> None:
    name = next(iter(keys))
    alone, run_dir = ground.root / f"{name}-alone", ground.root / f"{name}-killed"
    train(ground, alone, ranks=1, **keys)
    with (
        ground.loader(run_dir, track=PAUSE, **keys) as spec,
        started([sys.executable, "-m", "mopd_dataplane.train.node_agent", str(spec), "2"]) as agent,
    ):
        wait_until_paused(run_dir, agent)
        rank_process(agent, 1).kill()
        go_on(run_dir)
        agent.communicate(timeout=DEADLINE_S)
    saved = latest_checkpoint(run_dir / "checkpoints")
    assert saved is not None
    assert 0 < saved[0].step < ground.steps
    train(ground, run_dir, ranks=1, **keys)
    assert_same_training(run_dir, alone)


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_any_number_of_ranks_continues_it(ground: Ground, alone: Path) -> None:
    run_dir = ground.root / "killed"
    with ground.loader(run_dir, track=PAUSE) as spec:
        with started([sys.executable, "-m", "mopd_dataplane.train.node_agent", str(spec), "2"]) as agent:
            wait_until_paused(run_dir, agent)
            assert listening(agent) <= {"127.0.0.1", "::1"}  # nothing on a network interface
            rank_process(agent, 1).kill()
            go_on(run_dir)
            _, told = agent.communicate(timeout=DEADLINE_S)
        assert agent.returncode == EngineError.exit_code, told
        assert "rank 1 was killed by signal 9" in told
    saved = latest_checkpoint(run_dir / "checkpoints")
    assert saved is not None
    assert 0 < saved[0].step < ground.steps
    train(ground, run_dir, ranks=4, members=2)
    assert_same_training(run_dir, alone)


def listening(agent: subprocess.Popen[str]) -> set[str]:
    """Addresses on which the agent and its ranks accept connections."""
    family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    assert len(family) == 3
    return {c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN}


def rank_process(agent: subprocess.Popen[str], rank: int) -> psutil.Process:
    for process in psutil.Process(agent.pid).children():
        if process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"no rank {rank} under the agent")


@pytest.mark.slow
def test_a_stop_ends_every_rank_at_a_checkpoint(ground: Ground, alone: Path) -> None:
    run_dir = ground.root / "stopped"
    with ground.loader(run_dir, track=PAUSE) as spec:
        with started([sys.executable, "-m", "mopd_dataplane.train.node_agent", str(spec), "2"]) as agent:
            wait_until_paused(run_dir, agent)
            leader = rank_process(agent, 0)
            agent.send_signal(signal.SIGTERM)
            wait_until_told(leader.pid)
            go_on(run_dir)
            agent.communicate(timeout=START_S)
        assert agent.returncode == 130
    saved = latest_checkpoint(run_dir / "checkpoints")
    assert saved is not None
    assert saved[0].step == len(MetricsReader(run_dir / "checkpoints").steps())
    train(ground, run_dir, ranks=1)
    assert_same_training(run_dir, alone)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_given_up(ground: Ground) -> None:
    """SIGSTOP: no connection breaks, so only the deadline of the others ends the wait."""
    run_dir = ground.root / "stands-still"
    with running(ground, run_dir, ranks=2, rank_deadline_s=3, track=PAUSE) as (leader, other):
        wait_until_paused(run_dir)
        os.kill(other.pid or 0, signal.SIGSTOP)
        go_on(run_dir)
        leader.join(timeout=START_S)
        assert leader.exitcode == EngineError.exit_code


def run_on_two_nodes(job: Path, stage: str) -> None:
    """Two processes of the command line with torchrun's variables, a loader and a rank each, over one store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mopd_dataplane", "run", str(job), "--stage", stage, "--set", "scale.ranks=2"]
    nodes = [
        subprocess.Popen(command, env=os.environ | variables | {"PET_NODE_RANK": str(node)}, stderr=subprocess.PIPE)
        for node in (1, 0)
    ]
    for node in nodes:
        _, told = node.communicate(timeout=START_S)
        assert node.returncode == 0, told.decode()


@pytest.mark.slow
def test_two_nodes_train_one_policy(
    tmp_path: Path, write_job: Callable[..., Path], mopd: Callable[..., object]
) -> None:
    alone, job = write_job(tmp_path / "alone"), write_job(tmp_path / "shared")
    mopd("run", alone, "--stage", "base")
    run_on_two_nodes(job, "base")
    query = "select step, samples, tokens, loss from steps order by step"
    one, two = (open_store(str(tmp_path / name / "store")).sql(query).to_pylist() for name in ("alone", "shared"))
    assert [(row["step"], row["samples"]) for row in two] == [(row["step"], row["samples"]) for row in one]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-3)


@pytest.mark.slow
def test_two_nodes_train_an_overlapped_stage_to_its_end(
    finished_job: Path, tmp_path: Path, write_job: Callable[..., Path], concurrent_stage: str
) -> None:
    """It publishes a version for every window, which are more than its iterations; both nodes train on all of them."""
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    run_on_two_nodes(write_job(tmp_path, extra=concurrent_stage), "async")
    store = open_store(str(tmp_path / "store"))
    windows = [window for window in store.plans("async") if len(store.plan("async", window).sample_rows)]
    assert len(windows) > 3, "more versions than iterations"
    planned = [row for window in windows for row in store.plan("async", window).sample_rows.tolist()]
    assert len(planned) == len(set(planned)) == 96
    steps = store.sql("select sum(samples) n from steps where stage = 'async'").to_pylist()
    assert steps == [{"n": 96}], "each step counts the samples of both nodes"
