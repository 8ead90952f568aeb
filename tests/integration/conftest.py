"""A whole job small enough for a test: two domains, a model of 0.1 M parameters, two on-policy iterations."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commandline import ENVIRONMENT, command, run_mopd
from filelock import FileLock

from mopd_dataplane import open_store

sys.path.insert(0, str(Path(__file__).parent))  # for trainer_ground

TINY_JOB = """
name = "tiny"
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
tie_word_embeddings = false

[domains.sums]
source = "reasoning-gym"
dataset = "chain_sum"
args = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
template = "{{expression}} = "
train = 48
eval = 8

[domains.words]
source = "reasoning-gym"
dataset = "spell_backward"
args = {{ min_word_len = 3, max_word_len = 4 }}
template = "{{word}} < "
train = 48
eval = 8

[teachers]
sums = {{ source = "stage:sums" }}
words = {{ source = "stage:words" }}

[routing]
sums = "sums"
words = "words"

[engine]
slots = 16

[rollout]
max_prompt_tokens = 32
max_new_tokens = 12
prompts_per_iteration = 32

[plan]
pack_tokens = 128
batch_samples = 16

[train]
learning_rate = 1e-3
checkpoint_steps = 2

[objectives.sampled.policy_gradient]
correction = "icepop"

[objectives.full-vocab.divergence]
kind = "reverse"

[[stages]]
name = "base"
data = "reference"

[[stages]]
name = "sums"
start = "base"
data = "reference"
domains = ["sums"]

[[stages]]
name = "words"
start = "base"
data = "reference"
domains = ["words"]

[[stages]]
name = "student"
start = "base"
objective = "sampled"
iterations = 2
"""


Command = Callable[..., subprocess.CompletedProcess[str]]
JobWriter = Callable[..., Path]


def write_tiny_job(folder: Path, text: str = TINY_JOB, *, extra: str = "") -> Path:
    """The tiny job as a file whose store lies beside it; `extra` is appended."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.toml"
    file.write_text((text + extra).format(store=folder / "store"))
    return file


@pytest.fixture(scope="session")
def mopd() -> Command:
    """run_mopd."""
    return run_mopd


@pytest.fixture(scope="session")
def write_job() -> JobWriter:
    """write_tiny_job."""
    return write_tiny_job


@pytest.fixture(scope="session")
def start_mopd() -> Callable[..., subprocess.Popen[bytes]]:
    """Start the command line without waiting for it."""

    def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(*arguments), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    return start


@pytest.fixture(scope="session")
def finished_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a tiny job that ran uninterrupted: job.toml and store. A test that writes copies the store first.

    One worker runs it, every worker has a copy of its own.
    """
    base = tmp_path_factory.getbasetemp()
    origin = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished"
    with FileLock(f"{origin}.lock", timeout=900):
        if not (origin / "done").exists():
            shutil.rmtree(origin, ignore_errors=True)
            run_mopd("run", write_tiny_job(origin))
            (origin / "done").touch()
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(origin / "store", folder / "store", symlinks=True)
    write_tiny_job(folder)
    store = open_store(str(folder / "store"))
    before = store.table("samples", ["uid"]).num_rows
    yield folder
    assert open_store(str(folder / "store")).table("samples", ["uid"]).num_rows == before, "a test wrote to it"


@pytest.fixture(scope="session")
def concurrent_stage() -> str:
    """Job text of a stage of 96 samples whose parts run concurrently."""
    return """
[[stages]]
name = "async"
start = "base"
objective = "sampled"
concurrent = true
iterations = 3
rollout = {{ prompts_per_iteration = 32, weight_change = "span" }}
plan = {{ batch_samples = 16, max_staleness = 2 }}
"""
