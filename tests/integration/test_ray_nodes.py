"""A job with its store on S3, and engines, scorers and trainers on a Ray cluster of several nodes that share no folder.

Worker nodes are killed while they train, sample and score, and replaced by new ones. What the store holds then is
compared with a run of the same job in one process on a folder.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from commandline import command, run_mopd
from objectservers import Server
from raynodes import RayNodes

from mopd_dataplane import Store, open_store
from mopd_dataplane.base.files import file_digest
from mopd_dataplane.store.group_commit.election import newest_term
from mopd_dataplane.store.remote.artifacts import ArtifactStore

pytestmark = pytest.mark.slow

DEADLINE_S = 1500.0
KILLS = ("TrainerWorker", "EngineReplica", "TeacherWorker", "TrainerWorker", "EngineReplica")
"""Nodes are killed while such an actor works, in this order."""
SAMPLES = 48 + 2 * 48
COMMITTERS = 4
"""One for each rollout and each scoring on the cluster."""
JOB = """
name = "nodes"
store = "{store}"
seed = 7

[student]
tokenizer = "characters"
[student.config]
model_type = "qwen3"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 32
max_position_embeddings = 256

[domains.sums]
source = "reasoning-gym"
dataset = "chain_sum"
args = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
template = "{{expression}} = "
train = 48
eval = 4

[teachers]
base = {{ source = "stage:base" }}

[routing]
sums = "base"

[scale]
engines = 2

[engine]
slots = 4

[rollout]
group_size = 2
max_prompt_tokens = 32
max_new_tokens = 90
prompts_per_iteration = 24

[plan]
pack_tokens = 256
batch_samples = 24

[train]
learning_rate = 1e-3

[objectives.sampled.policy_gradient]
correction = "icepop"

[[stages]]
name = "base"
data = "reference"

[[stages]]
name = "student"
objective = "sampled"
iterations = 2
"""
PROMISED = {"samples": ("uid",), "scores": ("uid", "teacher", "kind"), "steps": ("stage", "window", "step")}
"""Columns that have the same values in both runs. Tokens of the first iteration are compared too."""
MOST_DRIFT = 1e-5
"""Largest difference of a log-prob of the first iteration, in nat: an engine samples a share beside others than one
engine samples all. What is trained on it differs in the last bits, and what is sampled from that may differ."""


@pytest.fixture
def nodes(object_server: Server) -> Iterator[RayNodes]:
    """A head and two worker nodes."""
    ray_nodes = RayNodes(object_server.environment)
    try:
        ray_nodes.wait_for("head")
        for _ in range(2):
            ray_nodes.wait_for(ray_nodes.add())
        yield ray_nodes
    finally:
        ray_nodes.end()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The job file; one process has run it, on the folder `store` beside it."""
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(store=tmp_path / "store"))
    run_mopd("run", file)
    return file


def has_logged(folder: Path) -> bool:
    """Check if a node has logged tokens of samples that are not finished."""
    for file in folder.glob("runs/staging/**/wal/**/*.wal"):
        with suppress(FileNotFoundError):
            if file.stat().st_size > 2_000:
                return True
    return False


def _is_busy(nodes: RayNodes, node: str, kind: str) -> bool:
    """Check if a node scores or trains, or has sampled a part of its samples."""
    if kind == "TeacherWorker":
        return nodes.runs(node, "TeacherWorker")
    if kind == "TrainerWorker":
        return nodes.runs(node, "TrainerWorker.work")
    return has_logged(nodes.folder_of(node)) and nodes.runs(node, "EngineReplica.work")


def kill_nodes(nodes: RayNodes, driver: subprocess.Popen[bytes]) -> list[str]:
    """Kill and replace nodes that train, sample or score. Returns the class of an actor of each once the job ends."""
    killed: list[str] = []
    until = time.monotonic() + DEADLINE_S
    while driver.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.2)
        nodes.replace_ended()
        if len(killed) == len(KILLS) or not all(nodes.has_started(node) for node in nodes.workers):
            continue
        kind = KILLS[len(killed)]
        for node in nodes.workers:
            if _is_busy(nodes, node, kind):
                nodes.kill(node)
                nodes.add()
                killed.append(kind)
                break
    return killed


def rows(store: Store, table: str) -> list[str]:
    return sorted(map(str, store.table(table, [*PROMISED[table]]).to_pylist()))


def first_tokens(store: Store) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probs of the samples of the first iteration, by uid."""
    first = store.table("samples", ["uid"], "stage = 'student' AND iteration = 0")["uid"].to_pylist()
    every = {row["uid"]: row for row in store.table("tokens").to_pylist()}
    return {uid: (every[uid]["tokens"], every[uid]["logprobs"]) for uid in first}


def layout(store: Store, stage: str, window: int) -> tuple[list[str], list[int], list[int]]:
    """The samples of a plan in order, and where its packs and its steps start.

    Its digest is of row ids and versions of tables too, which depend on who committed first.
    """
    plan = store.plan(stage, window)
    assert plan is not None
    uids = store.take_samples(plan.sample_rows, ["uid"])["uid"].to_pylist()
    return uids, plan.pack_starts.tolist(), plan.step_starts.tolist()


def test_nodes_are_killed_and_each_sample_is_stored_scored_and_trained_on_once(
    job: Path, nodes: RayNodes, s3: str, tmp_path: Path
) -> None:
    folder = nodes.folder_of("driver")
    folder.mkdir()
    messages = tmp_path / "messages.txt"
    with messages.open("wb") as file:
        driver = subprocess.Popen(
            command("run", job, "--store", s3, "--ray", nodes.address, "--set", "group_commit=true"),
            env=nodes.environment, cwd=folder, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        killed = kill_nodes(nodes, driver)
    finally:
        driver.kill()
        driver.wait(30)
    assert driver.returncode == 0, messages.read_text()
    assert tuple(killed) == KILLS, messages.read_text()

    store, expected = open_store(s3), open_store(str(tmp_path / "store"))
    for table in PROMISED:
        assert rows(store, table) == rows(expected, table), table
    assert store.table("samples").num_rows == SAMPLES
    sampled, expected_sampled = (first_tokens(own) for own in (store, expected))
    assert sampled.keys() == expected_sampled.keys()
    for uid, (tokens, logprobs) in sampled.items():
        assert tokens == expected_sampled[uid][0], uid
        assert np.abs(np.subtract(logprobs, expected_sampled[uid][1])).max() <= MOST_DRIFT, uid
    for stage in ("base", "student"):
        assert layout(store, stage, 0) == layout(expected, stage, 0)
    assert store.files is not None
    weights = ArtifactStore(store.files).digests("policies/base/v1")["model.safetensors"]
    assert weights == file_digest(tmp_path / "store" / "policies" / "base" / "v1" / "model.safetensors")
    assert ArtifactStore(store.files).has("policies/student/v2")
    assert store.verify().findings == []
    assert newest_term(store.files) == COMMITTERS, "the process that commits outlives the nodes"
    assert not list(tmp_path.glob("runs"))
