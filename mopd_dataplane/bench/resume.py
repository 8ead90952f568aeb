"""Share of exact resumes: a real model, interrupted again and again, compared with the uninterrupted run.

    killed    the process dies in the middle of a step; prefixes are prefilled again from the log
    stopped   SIGTERM: keys and values are saved beside the log and loaded again (Hugging Face engine only)

Prefill and decode multiply matrices of different shapes, which rounds differently; so a killed run's resumes are exact
only as often as rounding allows. The rate is measured, never assumed.
"""

import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mopd_dataplane.bench.length_bias import Interrupted, Killed, live
from mopd_dataplane.bench.length_stats import equivalence
from mopd_dataplane.errors import EngineError
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.vllm import VllmEngine


def measure(
    model: Path,
    *,
    engine: Literal["hf", "vllm"] = "hf",
    samples: int = 64,
    slots: int = 16,
    max_new_tokens: int = 64,
    every: int = 20,
    threads: int = 0,
) -> dict[str, Any]:
    """Sample `samples` prompts with a model folder: whole, killed, and stopped after every `every` decode steps.

    Returns per treatment: samples that were interrupted, how many of them stayed exact at every resume, samples with
    the same tokens and with the same log-prob bits as the uninterrupted run, the largest log-prob gap of samples with
    the same tokens in nat, and the equivalence test of mean lengths.
    """
    running = {"hf": _InterruptedHf, "vllm": _InterruptedVllm}[engine](model, slots=slots, threads=threads)
    prompts = [Prompt(prompt_id=f"p{i}", domain="sums", text=f"{i} + {7 * i} =") for i in range(samples)]
    whole = _sampled(running, prompts, max_new_tokens, None, every)
    result = {
        name: _compared(_sampled(running, prompts, max_new_tokens, name, every), whole)
        for name in running.interruptions
    }
    running.close()
    facts = {"model": str(model), "engine": engine, "samples": samples, "slots": slots, "threads": threads}
    return facts | result


class _InterruptedHf(Interrupted, HfEngine):
    interruptions = ("killed", "stopped")

    def forget(self) -> None:
        """Slots hold all that it remembers, and they are free between two lives."""


class _InterruptedVllm(Interrupted, VllmEngine):
    interruptions = ("killed",)  # it saves no keys and values

    def forget(self) -> None:
        """Drop the prefixes that a killed process would not have kept."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM did not drop its cached prefixes, so a fresh engine cannot be measured")


_Interrupted = _InterruptedHf | _InterruptedVllm


def _sampled(
    engine: _Interrupted, prompts: list[Prompt], max_new_tokens: int, how: str | None, every: int
) -> dict[str, Sample]:
    """All samples by uid, over as many lives as it takes."""
    committed: dict[str, Sample] = {}
    engine.how = how
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        while len(committed) < len(prompts):
            engine.left = every
            engine.forget()
            with suppress(Killed, KeyboardInterrupt):
                live(
                    engine, prompts, committed, Path(scratch), stage="resume", seed=0, max_new_tokens=max_new_tokens,
                    render=lambda prompt: engine.tokenizer.encode(prompt.text),
                )  # fmt: skip
    return committed


def _compared(ours: dict[str, Sample], whole: dict[str, Sample]) -> dict[str, Any]:
    """Samples of an interrupted rollout beside those of the uninterrupted one."""
    interrupted = [sample for sample in ours.values() if sample.interruptions]
    exact = sum(sample.resume == "exact" for sample in interrupted)
    pairs = [(ours[uid], sample) for uid, sample in whole.items()]
    same = [(a.logprobs, b.logprobs) for a, b in pairs if np.array_equal(a.tokens, b.tokens)]
    gaps = [float(np.abs(a - b).max()) for a, b in same if a is not None and b is not None]
    lengths = (np.array([sample.response_len for sample in side]) for side in zip(*pairs, strict=True))
    return {
        "interrupted": len(interrupted),
        "interruptions": sum(sample.interruptions for sample in interrupted),
        "exact": exact,
        "exact_rate": exact / max(len(interrupted), 1),
        "same_tokens": len(same),
        "same_bits": sum(gap == 0 for gap in gaps),
        "largest_gap_nat": max(gaps, default=0.0),
        "mean_length": asdict(equivalence(*lengths)),
    }
