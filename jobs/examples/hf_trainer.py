"""Hugging Face's Trainer on packs of a planned stage.

    python jobs/examples/hf_trainer.py STORE STAGE POLICY OUTPUT

One pack is one row: transformers keeps its sequences apart by `position_ids`, but only without a cache of keys.
What the trainer holds outlives the slot, so each row is copied out of shared memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from mopd_dataplane import BatchStream, LoadSpec


class Rows(IterableDataset[dict[str, torch.Tensor | bool]]):
    """Packs as the keyword arguments of a causal language model; -100 where nothing is trained."""

    def __init__(self, stream: BatchStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[dict[str, torch.Tensor | bool]]:
        for batch in self.stream:
            for pack in batch.packs:
                tokens = pack.tokens.long()[None]
                labels = tokens.masked_fill(pack.loss_mask[None] == 0, -100)
                places = pack.position_ids.long()[None]
                yield {"input_ids": tokens, "position_ids": places, "labels": labels, "use_cache": False}
                batch.release(pack)


class PackTrainer(Trainer):
    """A Trainer whose rows are whole packs already."""

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor | bool]]:
        """No collation, no worker: the loader process reads ahead."""
        assert isinstance(self.train_dataset, Rows)
        return DataLoader(self.train_dataset, batch_size=None)


def main(store: str, stage: str, policy: str, output: str) -> None:
    """Train one pass over window 0."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    with BatchStream(store, LoadSpec(stage=stage), windows=[0]) as stream:
        settings = TrainingArguments(
            output,
            max_steps=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = PackTrainer(model, settings, train_dataset=Rows(stream))
        trainer.train()
        trainer.save_state()  # every loss, which the printed lines round to four digits


if __name__ == "__main__":
    main(*sys.argv[1:5])
