"""A loop of accelerate on the planned steps of a store, on any number of processes: cross-entropy on what was written.

    accelerate launch --cpu --num_processes 2 jobs/examples/accelerate_loop.py STORE STAGE POLICY

The dataset gives each process its share of a step, which may be no pack at all, so gradients are added up once a step
instead of once a backward pass. Their sum does not depend on the number of processes.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from mopd_dataplane import LoadSpec
from mopd_dataplane.integrations.torch_dataset import StoreDataset


def main(store: str, stage: str, policy: str) -> None:
    """Train one pass over window 0 and print the loss of every step."""
    accelerator = Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = StoreDataset(store, LoadSpec(stage=stage), windows=[0])
    for step in DataLoader(dataset, batch_size=None):
        total = torch.zeros(())
        for pack in step["packs"]:
            tokens, places = pack["tokens"].long()[None], pack["position_ids"].long()[None]
            logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            loss = losses[pack["loss_mask"][1:].bool()].sum() / step["loss_tokens"]
            loss.backward()
            total += loss.detach()
        for weight in model.parameters():
            own = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = accelerator.reduce(own, "sum")
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step['step']} loss {accelerator.reduce(total, 'sum'):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:4])
