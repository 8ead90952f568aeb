"""TRL trains from a store: the loss is that of Hugging Face's Trainer on it, which is ours; adapters are TRL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scored_store import STEPS
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTConfig

from mopd_dataplane import Store
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.integrations import hf_trainer
from mopd_dataplane.integrations.trl import StoreTrainer

REVERSE = {"divergence": {"kind": "reverse"}}
COMMON: dict[str, Any] = {
    "learning_rate": 1e-3, "lr_scheduler_type": "constant", "num_train_epochs": 1, "logging_steps": 1,
    "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "weight_decay": 0.0,
}  # fmt: skip


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_trl_and_transformers_train_alike(scored_store: Store, policy: Path, tmp_path: Path) -> None:
    trainer = StoreTrainer(
        str(policy), args=SFTConfig(str(tmp_path / "trl"), gradient_checkpointing=False, **COMMON),
        store=scored_store.uri, stage="student", windows=[90], objective=REVERSE,
    )  # fmt: skip
    trainer.train()
    other = hf_trainer.StoreTrainer(
        AutoModelForCausalLM.from_pretrained(policy), TrainingArguments(str(tmp_path / "hf"), **COMMON),
        store=scored_store, stage="student", windows=[90], objective=REVERSE,
    )  # fmt: skip
    other.train()
    assert len(losses(trainer)) == STEPS
    assert losses(trainer) == pytest.approx(losses(other), abs=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_an_adapter_learns_and_its_base_does_not(scored_store: Store, policy: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pinned in constraints-ecosystem.txt")
    trainer = StoreTrainer(
        str(policy), args=SFTConfig(str(tmp_path / "trl"), max_steps=2 * STEPS, **COMMON | {"learning_rate": 1e-2}),
        store=scored_store.uri, stage="student", windows=[90], objective=REVERSE,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, value in trainer.model.named_parameters() if not before[name].equal(value)}
    assert changed
    assert all("lora_" in name for name in changed)
    step_losses = losses(trainer)
    assert sum(step_losses[STEPS:]) < sum(step_losses[:STEPS])


def test_a_stage_without_samples_is_named(scored_store: Store, policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no samples of stage 'nobody'"):
        StoreTrainer(
            str(policy), args=SFTConfig(str(tmp_path), **COMMON), store=scored_store, stage="nobody", objective=REVERSE
        )
