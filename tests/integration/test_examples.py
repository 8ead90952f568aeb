"""The examples of jobs/examples run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.job import sections
from mopd_dataplane.plan.plan import build_window

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"
TEACHERS = ["adder", "speller"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one planned window, and a policy with its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("examples")
    store = make_store(root / "store", lengths_of(24, mean_log=4, shortest=8, longest=100), teachers=TEACHERS)
    plan = build_window(
        plan_columns(store, TEACHERS), sections.Plan(pack_tokens=256, batch_samples=8), seed=0, stage=STAGE, window=0,
        snapshot=store.snapshot(), teachers=TEACHERS,
    )  # fmt: skip
    store.add_plan(plan)
    shape = LlamaConfig(
        vocab_size=32_000, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(shape).save_pretrained(root / "policy")
    return root


def output_of(place: Path, script: str, *words: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), str(place / "store"), STAGE, str(place / "policy"), *words]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_loop(place: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", output_of(place, "plain_loop.py"))]
    assert len(losses) == 3
    assert all(5 < loss < 20 for loss in losses), "cross-entropy of an untrained model over 32,000 tokens"


@pytest.mark.slow
def test_hugging_face_trainer(place: Path) -> None:
    losses = re.findall(r"'loss': '?([\d.]+)", output_of(place, "hf_trainer.py", str(place / "out")))
    assert losses
    assert all(5 < float(loss) < 20 for loss in losses)
