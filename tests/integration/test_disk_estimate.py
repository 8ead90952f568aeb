"""What `mopd check` estimates of the disk beside what a run wrote, and the iterations that its lines name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import run_mopd

JOB = """
name = "disk"
store = "{store}"

[student]
tokenizer = "characters"
[student.config]
model_type = "qwen3"
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 64
max_position_embeddings = 256

[domains.sums]
source = "reasoning-gym"
dataset = "chain_sum"
args = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
template = "{{expression}} = "
train = 64

[teachers]
one = {{ source = "student" }}

[routing]
sums = "one"

[engine]
slots = 64

[rollout]
max_prompt_tokens = 16
max_new_tokens = 64
group_size = 2

[score]
hidden_codec = "fp32"

[plan]
pack_tokens = 512
batch_samples = 64

[objectives.exact.divergence]
kind = "reverse"
signal = "hidden"

[[stages]]
name = "student"
objective = "exact"
iterations = 2
"""
FACTOR = 1.5
"""A part is estimated within this factor. Answers end early, so that of hidden states at most the estimate is written:
random weights end one token in a hundred."""


def written(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def bytes_of(said: str) -> float:
    """The number that an estimate begins with, after its `about`."""
    _, number, unit, *_ = said.split()
    return float(number) * {"MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.slow
def test_what_a_run_writes_is_near_the_estimate(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    store = tmp_path / "store"
    file.write_text(JOB.format(store=store))
    disk = json.loads(run_mopd("check", file, "--json").stdout)["disk"]
    assert not store.exists()
    lines = run_mopd("run", file).stderr.splitlines()
    for head in ("student 1/2      rollout", "student 2/2      train", "student          left     about"):
        assert any(line.startswith(head) for line in lines), head
    trained = written(store / "policies" / "student") + written(store / "checkpoints")
    assert 1 / FACTOR < bytes_of(disk["student policies and checkpoints"]) / trained < FACTOR
    assert 1 / FACTOR < bytes_of(disk["initial student"]) / written(store / "policies" / "init") < FACTOR
    hidden = written(store / "signals" / "one" / "hidden")
    assert 1 / FACTOR < bytes_of(disk["student hidden states"]) / hidden < 2 * FACTOR
    assert 1 / FACTOR < bytes_of(disk["all"]) / written(store) < FACTOR
