"""Row 12 of the fault list: the loader, a process that reads from it, or the trainer dies at every state of a slot."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from deaths import Child, folder, killer, told_by
from inject import Row, Tally
from tinystage import (
    STAGE,
    TEACHER,
    LoaderChild,
    Manifest,
    anchored,
    client_of,
    make_stage_apart,
    manifest,
    nobody_holds_a_slot,
    open_files,
    shared_memory,
    whole_window,
)

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.files import file_digest
from mopd_dataplane.errors import DeadlineError
from mopd_dataplane.job import objectives, sections
from mopd_dataplane.load.client import LoadedBatch, LoaderClient
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.train.metrics import MetricsReader
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.run import Run
from mopd_dataplane.train.spec import TrainSpec
from mopd_dataplane.train.stop import Stop

STATES = ("connected", "opened", "being filled", "lent", "half released", "released", "ended")
TRAIN_POINTS = (
    "train.batch", "train.updated", "train.step", "train.save", "train.save.written", "train.save.named",
    "train.saved", "train.publish", "train.published", "at random",
)  # fmt: skip
NOTICED_S = 5.0
TINY = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 1000,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
OBJECTIVE = objectives.Objective(policy_gradient=objectives.PolicyGradientTerm())


def walk_to(state: str, client: LoaderClient, done: list[Manifest]) -> Callable[[], object]:
    """Bring a slot into a state; batches seen whole are added to `done`. Returns what is asked for next."""
    if state == "connected":
        return lambda: next(client.batches(STAGE, 0))
    stream: Iterator[LoadedBatch] = client.batches(STAGE, 0)
    batch = next(stream)
    if state == "opened":
        return partial(read_on, client, [batch], stream, done)
    done.append(manifest(batch))
    if state == "being filled":
        return partial(read_on, client, [next(stream)], stream, done)
    if state == "half released":
        batch.release(batch.packs[0])
    if state == "released":
        batch.release()
    if state == "ended":
        done.extend(manifest(batch) for batch in stream)
    return partial(read_on, client, [], stream, done)


def read_on(
    client: LoaderClient, batches: list[LoadedBatch], stream: Iterator[LoadedBatch], done: list[Manifest]
) -> None:
    """Read these batches and what came after them while the loader lived, and ask for more."""
    for batch in chain(batches, stream):
        done.append(manifest(batch))
    client.plan(STAGE, 0)


def loader_killed(count: int, seed: int) -> Tally:
    """The trainer notices at once; a new loader goes on with the next batch; nothing is left behind."""
    tally, draw = Tally(), random.Random(seed)
    with folder() as home:
        make_stage_apart(home)
        path = home.with_name("l.sock")
        expected = whole_window(home, path)
        before = open_files()
        for case in range(count):
            state = STATES[case % len(STATES)]
            what = f"case {case}: loader killed when a slot was {state}"
            loader = LoaderChild(home, path)
            client, done = client_of(path), []
            ask = walk_to(state, client, done)
            time.sleep(draw.choice((0, 0, 0.005)))
            loader.end(signal.SIGKILL)
            began = time.monotonic()
            try:
                ask()
                noticed = False
            except DeadlineError:
                noticed = time.monotonic() - began < NOTICED_S
            client.close()
            del client, ask  # what was handed out stays readable as long as somebody holds it
            loader = LoaderChild(home, path)
            with client_of(path) as client:
                done += [manifest(batch) for batch in client.batches(STAGE, 0, len(done))]
            del client
            ended = loader.end_by(10) == 0 and not path.exists()
            clean = open_files() == before and shared_memory() == 0
            right = [[tuple(pack) for pack in batch] for batch in done] == expected
            tally.case(noticed and right and ended and clean, f"{what}: {noticed=} {right=} {ended=} {clean=}")
    return tally


def reader_killed(count: int, seed: int) -> Tally:
    """The loader takes everything back; the next reader gets every batch, and no slot is lost."""
    tally = Tally()
    with folder() as home:
        make_stage_apart(home)
        path = home.with_name("l.sock")
        expected = whole_window(home, path)
        loader = LoaderChild(home, path)
        with anchored(path):
            for case in range(count):
                state = STATES[case % len(STATES)]
                victim = Child(partial(read_and_die, path, state))
                victim.end_by(10)
                began = time.monotonic()
                with client_of(path) as client:
                    right = [manifest(batch) for batch in client.batches(STAGE, 0)] == expected
                    prompt = time.monotonic() - began < NOTICED_S
                    back = nobody_holds_a_slot(client, NOTICED_S)
                what = f"case {case}: reader killed when a slot was {state}: {right=} {prompt=} {back=}"
                tally.case(right and prompt and back, what)
        loader.end_by(10)
    return tally


def read_and_die(path: Path, state: str) -> None:
    """A reader that is killed in a state."""
    client = client_of(path)
    ask = walk_to(state, client, [])
    os.kill(os.getpid(), signal.SIGKILL)
    ask()


def trainer_killed(count: int, seed: int) -> Tally:
    """Killed around a step, a checkpoint or a publication, and run again: the steps and the policy of a calm run."""
    tally, draw = Tally(), random.Random(seed)
    torch.set_num_threads(1)
    with folder() as home:
        steps = make_stage_apart(home)
        told_by(partial(make_policy, home))
        path = home.with_name("l.sock")
        loader = LoaderChild(home, path)
        with anchored(path):
            calm = trained(home, path, home / "calm")
            tally.case(len(calm["steps"]) == steps and calm["policy"] != "none", "the calm run is whole")
            for case in range(count):
                point, visit = TRAIN_POINTS[case % len(TRAIN_POINTS)], draw.choice((1, 1, 2, 3))
                run_dir = home / f"case-{case}"
                victim = Child(partial(train, spec_of(home, path, run_dir), point, visit))
                if point == "at random":
                    time.sleep(draw.uniform(0, 0.4))
                    os.kill(victim.pid, signal.SIGKILL)
                victim.end_by(60)
                outcome = trained(home, path, run_dir)
                left = [str(file.relative_to(run_dir)) for file in run_dir.rglob("*.tmp")]
                tally.case(
                    outcome == calm and not left, f"case {case}: {point} visit {visit}: {outcome == calm}, {left}"
                )
        loader.end_by(10)
    return tally


def make_policy(home: Path) -> None:
    """The policy the stage starts from."""
    make_student(sections.Student(config=TINY, tokenizer="characters"), home / "start", seed=0)


def spec_of(home: Path, path: Path, run_dir: Path) -> TrainSpec:
    """Train one window into `run_dir`, with a checkpoint at every second step."""
    return TrainSpec(
        stage=STAGE, start=str(home / "start"), policy_dir=str(run_dir / "policies"), socket=str(path),
        checkpoint_dir=str(run_dir / "checkpoints"), objective=OBJECTIVE, teachers=(TEACHER,),
        train=sections.Train(learning_rate=1e-3, checkpoint_steps=2, threads=1, device="cpu"), deadline_s=60,
    )  # fmt: skip


def train(spec: TrainSpec, point: str = "", visit: int = 0) -> None:
    """The trainer's work in this process; dies at the visit-th pass of a point."""
    fault_points.observe(killer(point, visit) if point else None)
    hf.quiet_transformers()
    with LoaderClient(spec.socket, deadline_s=spec.deadline_s) as source:
        run = Run(spec, source, Ranks.join("cpu"))
        run.train(Stop())
        run.close()


def trained(home: Path, path: Path, run_dir: Path) -> dict[str, Any]:
    """Train what is left; the steps taken, without times, and the digest of the policy."""
    told_by(partial(train, spec_of(home, path, run_dir)))
    steps = [json.loads(json.dumps(vars_of(metrics))) for metrics in MetricsReader(run_dir / "checkpoints").steps()]
    policy = run_dir / "policies" / "v1" / "model.safetensors"
    return {"steps": steps, "policy": file_digest(policy) if policy.exists() else "none"}


def vars_of(metrics: Any) -> dict[str, Any]:
    """A step's metrics without wall times."""
    return {name: getattr(metrics, name) for name in metrics.__slots__ if name not in ("step_time_s", "data_wait_s")}


ROWS = [
    Row(
        12, "the loader is killed at every state of a slot", "noticed in 5 s, the same batches, nothing left behind",
        loader_killed, (4, 105, 5_000),
    ),
    Row(
        12, "a reader is killed at every state of a slot", "its slots come back, the same batches",
        reader_killed, (7, 105, 5_000),
    ),
    Row(
        12, "the trainer is killed around steps and checkpoints", "the steps and the policy of a calm run",
        trainer_killed, (5, 100, 5_000),
    ),
]  # fmt: skip
