"""A whole job on the stand-in device: nothing stays on the CPU, in any process, and what is read back is known."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import ENVIRONMENT, command

from mopd_dataplane import open_store

HERE = Path(__file__).parents[1] / "stand_in_device"
JOB = """
name = "standin"
store = "{store}"

[student]
tokenizer = "characters"
[student.config]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 32
max_position_embeddings = 128

[domains.sums]
source = "reasoning-gym"
dataset = "chain_sum"
args = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
template = "{{expression}} = "
train = 6
eval = 2

[teachers]
one = {{ source = "student" }}

[routing]
sums = "one"

[engine]
slots = 4

[rollout]
max_prompt_tokens = 32
max_new_tokens = 4
prompts_per_iteration = 4
group_size = 2
teacher_mix = 0.2

[plan]
pack_tokens = 128
batch_samples = 8

[train]
keep = false

[objectives.all.policy_gradient]
student_logprob = "current"
reward_coef = 1.0
[objectives.all.divergence]
kind = "reverse"

[[stages]]
name = "student"
objective = "all"
iterations = 2
score = {{ topk_source = "student" }}
discriminator = {{ batch_pairs = 4 }}

[eval]
reverse_kl = true
"""
READ_BACK = {
    "rollout/engines/device_sampling.py:draw": "sums of groups, and one group's logits",
    "rollout/engines/device_sampling.py:logprobs": "a log-prob a token",
    "rollout/engines/hf.py:step": "a flag a row",
    "score/signal_kinds.py:split": "what is stored",
    "score/signal_kinds.py:check_finite": "a flag a sample",
    "train/token_stats.py:write": "statistics of one sample in eight, a file of several steps",
    "codecs.py:encode": "a flag a batch",
    "run/steps/evaluate.py:_reverse_kl": "a figure a prompt",
    "score/discriminator.py:scores": "rewards",
    "score/discriminator.py:_step": "a loss and its margins",
    "score/discriminator.py:<dictcomp>": "a version",
    "score/head_files.py:write_head": "a head file",
    "models/hf.py:hidden_states": "transformers looks whether position ids are packed",
    "score/discriminator.py:forward": "transformers looks whether position ids are packed",
    "train/student.py:packs_apart": "one flag when a model is loaded",
    "train/optimizer.py:clip_gradients": "the gradient norm",
    "train/loop.py:over_ranks": "the step's figures",
    "train/run.py:full_weights": "a policy version",
    "train/checkpoint.py:<dictcomp>": "a checkpoint",
}
MUST = {name for name, why in READ_BACK.items() if why in ("what is stored", "rewards", "the step's figures")}


@pytest.mark.slow
def test_a_job_runs_on_its_accelerator_in_every_process(tmp_path: Path, write_job: Callable[..., Path]) -> None:
    job, said = write_job(tmp_path, JOB), tmp_path / "said"
    said.mkdir()
    paths = f"{HERE}{os.pathsep}{ENVIRONMENT.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command("run", job), env=ENVIRONMENT | {"PYTHONPATH": paths, "MOPD_STAND_IN": str(said)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    store = open_store(tmp_path / "store")
    assert {step["policy_version"] for step in store.table("steps", ["policy_version"]).to_pylist()} == {0, 1}
    assert all(row["reverse_kl"] is not None for row in store.table("evals", ["reverse_kl"]).to_pylist())
    copies: Counter[str] = Counter()
    for file in said.iterdir():
        copies.update(json.loads(file.read_text()))
    assert copies.keys() <= READ_BACK.keys(), {name: n for name, n in copies.items() if name not in READ_BACK}
    assert copies.keys() >= MUST | {"run/steps/evaluate.py:_reverse_kl", "rollout/engines/device_sampling.py:draw"}
