"""A whole job whose teacher has another tokenizer than its student: killed while it scores, continued, sound."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import open_store
from mopd_dataplane.job.sections import Student as StudentSettings
from mopd_dataplane.models.initial_weights import character_tokenizer, make_student

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
JOB = """
name = "apart"
store = "{folder}/store"

[student]
config = {config}
tokenizer = "characters"

[domains.words]
source = "reasoning-gym"
dataset = "spell_backward"
args = {{ min_word_len = 3, max_word_len = 4 }}
template = "backward: {{word}}\\n"
train = 32
eval = 4

[teachers.other]
source = "{folder}/other"
tokenizer = "own"

[teachers.same]
source = "student"

[routing]
words = "other"

[rollout]
prompts_per_iteration = 16
max_new_tokens = 12

[score]
probe = 4

[plan]
batch_samples = 8
pack_tokens = 256

[load]
deadline_s = 600

[objectives.opd.policy_gradient]

[objectives.opd.divergence]
kind = "forward"
signal = "topk"

[[stages]]
name = "student"
objective = "opd"
iterations = 2
"""
DIES = """
import os, signal, sys
from mopd_dataplane.cli import main
from mopd_dataplane.store.dataset import Store
commit = Store.commit_signals
def commit_and_die(*arguments):
    commit(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
Store.commit_signals = commit_and_die
sys.argv = ["mopd", *sys.argv[1:]]
main()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    character_tokenizer(["ab", "er", "ing", "th", "on", "an", "st", "re"]).save_pretrained(folder / "tokenizer")
    make_student(StudentSettings(config=CONFIG, tokenizer=str(folder / "tokenizer")), folder / "other", seed=5)
    config = "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in CONFIG.items()) + " }"
    (folder / "job.toml").write_text(JOB.format(folder=folder, config=config))
    return folder / "job.toml"


@pytest.mark.slow
def test_a_killed_job_with_a_teacher_of_another_tokenizer_ends_whole(job: Path, mopd: Callable[..., Any]) -> None:
    """Its random student also writes tokens without a text, which the job first refuses and then leaves out."""
    refused = mopd("run", job, check=False)
    assert refused.returncode == 2
    assert 'samples out with teachers.other.unknown_tokens = "mask"' in " ".join(refused.stderr.split())
    masked = ("--set", 'teachers.other.unknown_tokens="mask"')
    killed = subprocess.run([sys.executable, "-c", DIES, "run", str(job), *masked], timeout=600)
    assert killed.returncode == -signal.SIGKILL
    mopd("run", job, *masked)
    store = open_store(str(job.parent / "store"))
    assert store.verify().ok
    by_kind = {
        kind: store.table("scores", ["uid", "mean_reverse_kl"], filter=f"teacher = 'other' and kind = '{kind}'")
        for kind in ("logprob", "alignment", "topk")
    }
    scores = by_kind["logprob"]["mean_reverse_kl"].to_numpy()
    for kind in ("alignment", "topk"):
        assert set(by_kind[kind]["uid"].to_pylist()) == set(by_kind["logprob"]["uid"].to_pylist())
        assert by_kind[kind].num_rows == len(scores)
    left_out = store.table("events", ["kind"], filter="kind = 'unreadable'").num_rows
    assert len(scores) + left_out == 32
    assert len(scores) > left_out > 0
    assert np.isfinite(scores).all()
    steps = store.table("steps", ["reverse_kl"], filter="stage = 'student'")["reverse_kl"].to_numpy()
    assert len(steps) >= 2
    assert np.isfinite(steps).all()
    (teacher,) = [one for one in store.teachers().values() if one.name == "other"]
    (digest,) = set(store.samples(["tokenizer"])["tokenizer"].to_pylist())
    assert teacher.tokenizer_digest != digest
    assert (job.parent / "store" / "tokenizers" / f"{teacher.tokenizer_digest}.json").is_file()


@pytest.mark.slow
def test_it_is_checked_shown_and_left_out_of_comparisons_of_distributions(job: Path, mopd: Callable[..., Any]) -> None:
    assert mopd("check", job, "--json").returncode == 0
    uid = open_store(str(job.parent / "store")).table("scores", ["uid"])["uid"][0].as_py()
    shown = mopd("show", job.parent / "store", uid).stdout
    assert "one text in two tokenizations" in shown
    assert "of other" in shown
    compared = json.loads(mopd("teachers", job, "--json").stdout)
    assert "other" not in json.dumps(compared)
