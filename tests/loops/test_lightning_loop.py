"""Lightning's Trainer on planned steps: losses of a plain loop, and a checkpoint from whose position it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mopd_dataplane import LoadSpec, Store
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.integrations.torch_dataset import StoreDataset
from mopd_dataplane.job import sections
from mopd_dataplane.plan.plan import build_window

TEACHERS = ["adder", "speller"]
STEPS = 3


class Distil(lightning.LightningModule):
    """Cross-entropy on what was written; one item of the dataset is one step of the optimizer."""

    def __init__(self, policy: Path, dataset: StoreDataset) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(policy)
        self.dataset = dataset
        self.automatic_optimization = False
        self.losses: list[float] = []

    def training_step(self, step: dict[str, Any], index: int) -> None:
        optimizer = self.optimizers()
        self.losses.append(accumulate(self.model, step, self.manual_backward))
        self.position = step["next"]
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["position"] = self.position

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.dataset.load_state_dict(checkpoint["position"])


def accumulate(model: torch.nn.Module, step: dict[str, Any], backward: Any) -> float:
    total = 0.0
    for pack in step["packs"]:
        tokens, places = pack["tokens"].long()[None], pack["position_ids"].long()[None]
        logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        loss = losses[pack["loss_mask"][1:].bool()].sum() / step["loss_tokens"]
        backward(loss)
        total += float(loss.detach())
    return total


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Path]:
    """A store with a window of STEPS steps, and a policy."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    store = make_store(tmp_path / "store", lengths_of(24, mean_log=4, shortest=8, longest=100), teachers=TEACHERS)
    plan = build_window(
        plan_columns(store, TEACHERS), sections.Plan(pack_tokens=256, batch_samples=8), seed=0, stage=STAGE, window=0,
        snapshot=store.snapshot(), teachers=TEACHERS,
    )  # fmt: skip
    store.add_plan(plan)
    shape = LlamaConfig(
        vocab_size=32_000, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "policy")
    return store, tmp_path / "policy"


def fit(store: Store, policy: Path, folder: Path, steps: int, checkpoint: Path | None = None) -> tuple[Distil, Path]:
    dataset = StoreDataset(store.uri, LoadSpec(stage=STAGE), windows=[0])
    module = Distil(policy, dataset)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, devices=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(dataset, batch_size=None), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / f"{steps}.ckpt", weights_only=False)
    return module, folder / f"{steps}.ckpt"


def test_lightning_trains_as_a_plain_loop_and_goes_on_from_its_checkpoint(
    ground: tuple[Store, Path], tmp_path: Path
) -> None:
    store, policy = ground
    model = AutoModelForCausalLM.from_pretrained(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = []
    for step in StoreDataset(store.uri, LoadSpec(stage=STAGE), windows=[0]):
        plain.append(accumulate(model, step, lambda loss: loss.backward()))
        optimizer.step()
        optimizer.zero_grad()
    assert len(plain) == STEPS
    whole, _ = fit(store, policy, tmp_path / "whole", STEPS)
    assert whole.losses == pytest.approx(plain, abs=1e-6)
    first, checkpoint = fit(store, policy, tmp_path / "parts", 1)
    rest, _ = fit(store, policy, tmp_path / "parts", STEPS, checkpoint)
    assert [*first.losses, *rest.losses] == pytest.approx(plain, abs=1e-6)
