"""A plain PyTorch loop on batches of a planned stage: cross-entropy on what the policy wrote.

    python jobs/examples/plain_loop.py STORE STAGE POLICY

The loader starts by itself and ends with this process. transformers keeps the sequences of a pack apart by
`position_ids`, but only without a cache of keys. The sum is divided by the trained tokens of the whole step, so
the gradient does not depend on how the step was cut into packs.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from mopd_dataplane import BatchStream, LoadSpec


def main(store: str, stage: str, policy: str) -> None:
    """Train one pass over window 0 and print the loss of every step."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with BatchStream(store, LoadSpec(stage=stage), windows=[0]) as stream:
        for batch in stream:
            total = 0.0
            for pack in batch.packs:
                tokens = pack.tokens.long()[None]
                places = pack.position_ids.long()[None]
                logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, :-1]
                losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
                loss = losses[pack.loss_mask[1:].bool()].sum() / batch.loss_tokens
                loss.backward()
                total += float(loss.detach())
                batch.release(pack)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {batch.step} loss {total:.6f}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
