"""Processor time of drawing tokens: every sampler on the same logits, in turn.

With a model, the logits are made by a decode step of that model's size, and each sampler's share of the step is given.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import InputError
from mopd_dataplane.rollout.engines.philox import key_words
from mopd_dataplane.rollout.engines.sampling import SAMPLERS, Distribution, sample_key

ROUNDS = 5
"""Each sampler takes its turn as often; the median counts, since other work on the machine disturbs single turns."""
CUTS = {"": (0, 1.0), "top_k_50": (50, 1.0), "top_p_0.9": (0, 0.9)}
"""top_k and top_p of each case by the name it has in the figures."""
PROMPT = 64
"""Tokens behind which a step decodes."""
_TEXT = (
    "A farmer has seventeen sheep and all but nine of them run away in the night. In the morning he counts what is "
    "left, writes the number into his book, and drives to the market in the next town, where he sells three and buys "
    "a dog for twenty-four coins. How many animals does he own now, and how many coins has he spent on each of them?"
)
"""What a model reads: behind text it prefers few tokens, as it does at work."""


def measure(vocab: int, slots: int, *, model: Path | None = None) -> dict[str, Any]:
    """Figures by name: processor ns an entry of the vocabulary for each sampler and cut; with a model, whose vocabulary
    and logits it then is, also processor ms of a decode step and each sampler's share of it.

    Raises InputError for impossible sizes.
    """
    if vocab < 1 or slots < 1:
        raise InputError(f"vocabulary {vocab} and slots {slots} must be at least 1")
    step: Callable[[], NDArray[np.float32]] | None = None
    if model is None:
        # Logits of a language model have few tokens near the likeliest; a wide normal distribution has that too.
        logits = np.random.default_rng(0).normal(0, 4, (slots, vocab)).astype(np.float32)
    else:
        step = _decode_step(model, slots)
        logits = step()
    entries = logits.shape[0] * logits.shape[1]
    keys = np.stack([key_words(sample_key(str(slot))) for slot in range(slots)])
    positions = count()
    turns: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for cut, (top_k, top_p) in CUTS.items():
            settings = (np.ones(slots), np.full(slots, top_k), np.full(slots, top_p))
            for name, sampler in SAMPLERS.items():
                spent = _processor_s(partial(_draw, sampler, logits, settings, keys, next(positions)))
                turns.setdefault("/".join(filter(None, (name, cut))), []).append(spent)
        if step is not None:
            turns.setdefault("step", []).append(_processor_s(step))
    seconds = {name: float(np.median(spent)) for name, spent in turns.items()}
    figures: dict[str, Any] = {"vocabulary": logits.shape[1], "slots": slots}
    step_s = seconds.pop("step", None)
    figures |= {f"{name} ns_per_entry": round(1e9 * spent / entries, 2) for name, spent in seconds.items()}
    if step_s is not None:
        figures["decode_step_ms"] = round(1e3 * step_s, 1)
        figures |= {f"{name} share_of_step": round(spent / step_s, 4) for name, spent in seconds.items()}
    return figures


def _draw(
    sampler: type[Distribution],
    logits: NDArray[np.float32],
    settings: tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]],
    keys: NDArray[np.uint32],
    position: int,
) -> None:
    """Draw tokens from the logits of a step, as an engine does."""
    distribution = sampler.of(logits, *settings)
    distribution.logprobs(distribution.draw(keys, np.full(len(keys), position), settings[0]))


def _decode_step(model: Path, slots: int) -> Callable[[], NDArray[np.float32]]:
    """A decode step of a model behind pieces of a text, without a draw: [slots, V] logits."""
    import torch

    from mopd_dataplane.models.hf import load_tokenizer
    from mopd_dataplane.rollout.engines.decoder import Decoder

    decoder = Decoder(model, rows=slots, dtype="float32", device="cpu")
    text = np.array(load_tokenizer(model)(_TEXT)["input_ids"])
    prompts = text[(np.arange(slots)[:, None] + np.arange(PROMPT)) % len(text)]
    with torch.inference_mode():
        decoder.prefill(range(slots), prompts, [PROMPT] * slots)

    def step() -> NDArray[np.float32]:
        with torch.inference_mode():
            return decoder.forward(prompts[:, -1], np.full(slots, PROMPT)).numpy()

    return step


def _processor_s(work: Callable[[], object]) -> float:
    """Processor seconds of one call, over all threads."""
    before = time.process_time()
    work()
    return time.process_time() - before
