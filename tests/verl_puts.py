"""What verl's agent loops put into a queue, encoded as TransferQueue's backend does; light, for child processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.values import TAGS, Value, Write


def value(content: Any) -> Value:
    """A value as the backend of TransferQueue encodes it."""
    if isinstance(content, np.ndarray):
        return Value("tensor", content.tobytes(), str(content.dtype), content.shape)
    return Value("msgpack", msgspec.msgpack.encode(content))


def put(queue: LoggedQueue, sample: int, content: Mapping[str, Any], partition: str = "train") -> Write:
    said = {TAGS: {"partition": partition, "tags": {"status": "success"}}}
    fields = {**content, **said}
    return queue.put([(sample, name) for name in fields], [value(one) for one in fields.values()])[0]


def trajectory(number: int, **more: Any) -> dict[str, Any]:
    """What verl's agent loop puts of one answer, whose tokens follow from the number."""
    noise = np.random.default_rng(number)
    response = noise.integers(5, 40, 3 + number % 5)
    mask = np.ones(len(response), np.int64)
    mask[1] = 0
    logprobs = np.where(mask, -noise.random(len(response)), 0.0).astype(np.float32)
    rewards = np.zeros(len(response), np.float32)
    rewards[-1] = number % 3
    return {
        "prompts": noise.integers(5, 40, 4), "responses": response, "response_mask": mask,
        "rollout_log_probs": logprobs, "rm_scores": rewards, "uid": f"prompt-{number // 2}", "session_id": number % 2,
        "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7", "style": "rule"}, "global_steps": number,
        "raw_prompt": [{"role": "user", "content": f"3 + {number // 2} ="}], "num_turns": 2,
        "extra_fields": {"min_global_steps": number, "max_global_steps": number + number % 2,
                         "reward_extra_info": {"acc": number % 3 == 1}},
    } | more  # fmt: skip
