"""Hugging Face's Trainer on the planned steps of a store.

    trainer = StoreTrainer(model, TrainingArguments("out"), store="runs/demo", stage="student",
                           objective={"divergence": {"kind": "reverse"}})
    trainer.train()

One step of the Trainer is one planned step: learning-rate schedule, optimizer, clipping, checkpoints and callbacks are
the Trainer's, batches and loss are the store's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from mopd_dataplane.errors import InputError
from mopd_dataplane.integrations.planned_steps import PlannedSteps
from mopd_dataplane.integrations.store_loss import StoreLoss, parsed_objective
from mopd_dataplane.job.objectives import Objective
from mopd_dataplane.job.sections import Load
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.student import Student


class TrainsFromStore:
    """Mixin for subclasses of transformers.Trainer, with batches and loss of a store; put it first."""

    def __init__(
        self, *arguments: Any, store: str | Path | Store, stage: str, objective: Objective | Mapping[str, Any],
        windows: Sequence[int] | None = None, temperature: float = 1.0, max_new_tokens: int = 1, verifier: str = "",
        pass_tokens: int = 0, where: str = "", **others: Any,
    ) -> None:  # fmt: skip
        """store: with planned windows of `stage`; windows: those to train on, by default all. objective: as a job file
        declares it. temperature, max_new_tokens: of the sampler, where the objective reads them. verifier: whose
        rewards. pass_tokens: most tokens of one forward pass; 0 takes whole packs. where: condition on the planned
        samples, in SQL over the table of rollouts; those that do not meet it are left out. The rest goes to the
        trainer.

        Raises QueryError for a condition that cannot be answered, and InputError for one that leaves no sample of a
        window, for an objective or a window that does not exist, and for settings that would make the loss
        another: gradient accumulation, several processes, float16.
        """
        opened = store if isinstance(store, Store) else Store.open(store)
        declared = parsed_objective(objective)
        spec = LoadSpec.for_stage(stage, Load(), declared, verifier=verifier, where=where)
        self._steps = PlannedSteps(opened, spec, windows)
        self._store_loss = StoreLoss(
            opened, declared, temperature=temperature, max_new_tokens=max_new_tokens, pass_tokens=pass_tokens
        )
        self._student: Student | None = None
        self._plain_attention = ""
        self._found: dict[str, list[float]] = {}
        super().__init__(*arguments, **others)
        settings: TrainingArguments = self.args  # type: ignore[attr-defined]
        if settings.gradient_accumulation_steps != 1:
            raise InputError("gradient_accumulation_steps must be 1: a planned step is cut by pass_tokens, not by the "
                             "trainer, and its loss is divided by the counts of the whole step")  # fmt: skip
        if self.accelerator.num_processes != 1:  # type: ignore[attr-defined]
            raise InputError("a trainer from a store runs as one process; several ranks train with mopd run")
        if settings.fp16:
            raise InputError("fp16 is not supported here; set bf16, or train in float32")

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Planned steps; the loader process reads ahead."""
        return DataLoader(self._steps, batch_size=None)

    def train(self, *arguments: Any, **others: Any) -> Any:
        """Trainer.train; the loader ends with it."""
        try:
            return super().train(*arguments, **others)  # type: ignore[misc]
        finally:
            self._steps.close()
            self._store_loss.close()
            self._attend_plainly()

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Gradients of one planned step; returns its loss, detached."""
        model.train()
        student = self._packed_student()
        batch, device = inputs["step"], self.args.device  # type: ignore[attr-defined]
        total = torch.zeros((), device=device)
        for loss in self._store_loss.passes(student, batch, device):
            self.accelerator.backward(loss)  # type: ignore[attr-defined]
            total += loss.detach()
        for name, value in self._store_loss.sums.items():
            self._found.setdefault(name, []).append(value / batch.loss_tokens)
        return total

    def prediction_step(self, *arguments: Any, **others: Any) -> Any:
        """Evaluation on datasets of the trainer's own, with its own attention."""
        self._attend_plainly()
        return super().prediction_step(*arguments, **others)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *arguments: Any, **others: Any) -> None:
        """Adds the means of the objective's metrics since the last line."""
        if "loss" in logs:
            logs |= {name: sum(values) / len(values) for name, values in self._found.items()}
            self._found = {}
        super().log(logs, *arguments, **others)  # type: ignore[misc]

    def _packed_student(self) -> Student:
        """The trainer's model with attention over packed sequences."""
        whole: Any = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        inner = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
        if self._student is None or not self._plain_attention:
            self._plain_attention = inner.config._attn_implementation
            lower = self.args.bf16 or inner.dtype == torch.bfloat16  # type: ignore[attr-defined]
            self._student = Student(inner, dtype=torch.bfloat16 if lower else torch.float32)
        return self._student

    def _attend_plainly(self) -> None:
        if self._student is not None and self._plain_attention:
            self._student.model.set_attn_implementation(self._plain_attention)
            self._plain_attention = ""


class StoreTrainer(TrainsFromStore, Trainer):
    """Hugging Face's Trainer on a store."""
