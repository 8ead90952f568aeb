"""Samples for measurements, by number; importing them loads neither lance nor pyarrow."""

from typing import Any

import numpy as np

from mopd_dataplane.records import Sample

BENCH_RUN = "bench"
"""Stage that the samples belong to."""
SAMPLED: dict[str, Any] = {
    "iteration": 0, "writer": "bench", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "finish_reason": "stop",
}  # fmt: skip
"""What every sample of a measurement says of how it was sampled."""


def bench_sample(number: int, response: int) -> Sample:
    """A sample with a prompt of 16 tokens; the same number gives the same sample."""
    rng = np.random.default_rng(number + 1)
    return Sample(
        uid=rng.bytes(16).hex(), prompt_id=f"p{number}", group_id=f"p{number}#0", group_index=0, domain="bench",
        stage=BENCH_RUN, writer_seq=number, policy="bench", prompt_len=16,
        tokens=rng.zipf(1.3, 16 + response).clip(max=150_000).astype(np.int32),
        logprobs=-rng.random(response, np.float32), loss_mask=np.ones(response, np.uint8),
        version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), tokenizer="bench", **SAMPLED,
    )  # fmt: skip
