"""Makes a store of any size through the public API, for measurements and loader tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.bench.small_samples import SAMPLED
from mopd_dataplane.records import Sample, Signal, Teacher, sample_uid
from mopd_dataplane.store.dataset import Store

STAGE = "student"
BATCH = 512
"""Samples of one commit, unless told."""


def lengths_of(
    samples: int, *, mean_log: float = 7.9, shortest: int = 16, longest: int = 32_768, seed: int | tuple[int, ...] = 0
) -> Any:
    """[samples] int32 lognormal lengths (sigma 1), clipped; the defaults have mean 4.3 k tokens."""
    draws = np.random.default_rng(seed).lognormal(mean_log, 1.0, samples)
    return np.clip(draws, shortest, longest).astype(np.int32)


def make_store(
    root: Path,
    lengths: NDArray[np.int32],
    *,
    teachers: Sequence[str] = ("adder", "speller"),
    signals: Sequence[str] = (),
    row_bytes: int = 16,
    topk: int = 4,
    group_size: int = 1,
    rewards: bool = False,
    batch: int = BATCH,
    seed: int = 0,
    note: Callable[[int], None] = lambda done: None,
) -> Store:
    """A store with one sample per length and the asked signals; sample i belongs to domain and teacher i % n.

    A quarter of each sample is prompt. The last twentieth of a response is written by a later policy version, and the
    second response token is tool output (not trained), where the response is long enough. Interrupted, the same call
    goes on with the last batch. note: is told how many samples there are after each batch. Raises what Store raises.
    """
    store = Store.create(str(root))
    for teacher in teachers:
        store.add_teacher(bench_teacher(teacher, row_bytes // 2))
    row_count = store.dataset("samples").count_rows()
    for first in range(max(0, -(-row_count // batch) - 1) * batch, len(lengths), batch):
        noise = np.random.default_rng((seed, first))
        samples = [
            _sample(index, int(lengths[index]), teachers, group_size, noise)
            for index in range(first, min(first + batch, len(lengths)))
        ]
        rows = store.commit_samples(samples).rows
        for number, teacher in enumerate(teachers):
            start = (number - first) % len(teachers)
            own = list(zip(samples[start :: len(teachers)], rows[start :: len(teachers)].tolist(), strict=True))
            for kind in signals:
                scored = [_signal(kind, sample, row, row_bytes, topk, noise) for sample, row in own]
                store.commit_signals(teacher, kind, scored)
        if rewards:
            store.add_rewards([_reward(s, int(r), noise) for s, r in zip(samples, rows, strict=True)])
        note(min(first + batch, len(lengths)))
    return store


def bench_teacher(name: str, hidden_size: int) -> Teacher:
    """A teacher without weights."""
    return Teacher(
        name=name, source="bench", weights_digest="0" * 64, tokenizer_digest="0" * 16, vocab_size=32_000,
        hidden_size=hidden_size, dtype="bfloat16", head_file=f"heads/{name}.safetensors", head_digest="1" * 64,
    )  # fmt: skip


def _sample(index: int, length: int, teachers: Sequence[str], group_size: int, noise: np.random.Generator) -> Sample:
    prompt_len = max(1, length // 4)
    response_len = length - prompt_len
    mask = np.ones(response_len, dtype=np.uint8)
    if response_len > 2:
        mask[1] = 0
    logprobs = -noise.exponential(0.5, response_len).astype(np.float32) * mask
    switch = response_len - response_len // 20
    spans = [0, switch] if 0 < switch < response_len else [0]
    group = index // group_size
    return Sample(
        uid=sample_uid(0, STAGE, f"p{group}", index % group_size, 0), prompt_id=f"p{group}", group_id=f"p{group}#0",
        group_index=index % group_size, domain=f"domain-{index % len(teachers)}", stage=STAGE, writer_seq=index,
        policy=STAGE, prompt_len=prompt_len,
        tokens=noise.zipf(1.3, length).clip(0, 31_999).astype(np.int32), logprobs=logprobs, loss_mask=mask,
        version_starts=np.array(spans, dtype=np.int32), versions=np.arange(len(spans), dtype=np.int32),
        tokenizer="0" * 16, **SAMPLED,
    )  # fmt: skip


def _signal(kind: str, sample: Sample, row: int, row_bytes: int, topk: int, noise: np.random.Generator) -> Signal:
    trained = sample.loss_tokens
    if kind == "logprob":
        logprob = -noise.exponential(0.4, sample.response_len).astype(np.float32) * sample.loss_mask
        return Signal(uid=sample.uid, sample_row=row, kind=kind, logprob=logprob)
    if kind == "topk":
        ids = noise.integers(0, 32_000, (trained, topk), dtype=np.int32)
        return Signal(
            uid=sample.uid, sample_row=row, kind=kind, topk_ids=ids,
            topk_logprobs=-noise.exponential(1.0, (trained, topk)).astype(np.float32),
        )  # fmt: skip
    states = noise.integers(0, 256, (trained, row_bytes), dtype=np.uint8)
    return Signal(uid=sample.uid, sample_row=row, kind=kind, codec="bf16", hidden=states)


def _reward(sample: Sample, row: int, noise: np.random.Generator) -> dict[str, Any]:
    return {
        "uid": sample.uid, "sample_row": row, "verifier": "bench", "verifier_version": "1",
        "reward": float(noise.random()),
    }  # fmt: skip


def plan_columns(store: Store, teachers: Sequence[str]) -> Any:
    """Planner columns of every sample of a store made by make_store."""
    from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, collect_columns

    names = {f"domain-{number}": teacher for number, teacher in enumerate(teachers)}
    return collect_columns(
        store.scan_samples(SAMPLE_COLUMNS), store.dataset("samples").count_rows(),
        route=lambda domain, effort: names[domain], teachers=list(teachers),
    )  # fmt: skip
