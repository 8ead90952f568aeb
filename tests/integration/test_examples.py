"""The examples of jobs/examples run as they stand, and their first loss is that of each sample on its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mopd_dataplane import open_store
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.job import sections
from mopd_dataplane.plan.plan import build_window

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"
TEACHERS = ["adder", "speller"]


@pytest.fixture(scope="module")
def example_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        vocab_size=32_000, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(root / "policy")
    return root


def output_of(example_dir: Path, script: str, *words: str, launcher: tuple[str, ...] = ()) -> str:
    example = [str(EXAMPLES / script), str(example_dir / "store"), STAGE, str(example_dir / "policy")]
    command = [sys.executable, *launcher, *example, *words]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(example_dir), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def first_loss(example_dir: Path, packs: int) -> float:
    """Cross-entropy over the trained tokens of the window's first packs, one forward pass for each sample."""
    model = AutoModelForCausalLM.from_pretrained(example_dir / "policy")
    store = open_store(str(example_dir / "store"))
    plan = store.plan(STAGE, 0)
    assert plan is not None
    total, count = 0.0, 0
    for payload in store.read_tokens(plan.sample_rows[: plan.pack_starts[packs]]).to_pylist():
        tokens, mask = torch.tensor(payload["tokens"]), torch.tensor(payload["loss_mask"]).bool()
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, -len(mask) - 1 : -1].log_softmax(-1)
        said = logprobs.gather(-1, tokens[-len(mask) :, None])[mask]
        total, count = total - float(said.sum()), count + len(said)
    return total / count


@pytest.mark.slow
def test_a_plain_loop(example_dir: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", output_of(example_dir, "plain_loop.py"))]
    assert len(losses) == 3
    plan = open_store(str(example_dir / "store")).plan(STAGE, 0)
    assert plan is not None
    assert losses[0] == pytest.approx(first_loss(example_dir, int(plan.step_starts[1])), abs=1e-5)
    assert all(5 < loss < 20 for loss in losses), "cross-entropy of an untrained model over 32,000 tokens"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_loop_of_accelerate_trains_as_the_plain_one_on_any_number_of_processes(
    example_dir: Path, processes: int
) -> None:
    launcher = ("-m", "accelerate.commands.launch", "--cpu", f"--num_processes={processes}", "--num_machines=1",
                "--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1")  # fmt: skip
    out = [output_of(example_dir, "accelerate_loop.py", launcher=launcher), output_of(example_dir, "plain_loop.py")]
    own, plain = ([float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", text)] for text in out)
    assert len(own) == 3
    # Losses of later steps hold the weights' updates; sums in another order differ by float32's rounding.
    assert own == pytest.approx(plain, abs=1e-4)


@pytest.mark.slow
def test_hugging_face_trainer(example_dir: Path) -> None:
    output_of(example_dir, "hf_trainer.py", str(example_dir / "out"))
    logged = json.loads((example_dir / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in logged if "loss" in entry]
    assert losses[0] == pytest.approx(first_loss(example_dir, 1), abs=1e-3)
    assert len(losses) == 4
    assert all(5 < loss < 20 for loss in losses)
