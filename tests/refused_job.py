"""A sound job that edits make wrong, and what its refusal advises."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

JOB: dict[str, Any] = {
    "name": "small", "store": "unused", "student": {"config": {"model_type": "qwen3"}},
    "domains": {
        "sums": {"source": "reasoning-gym", "dataset": "chain_sum", "train": 64},
        "words": {"source": "reasoning-gym", "dataset": "letter_counting", "train": 64},
    },
    "teachers": {"expert": {"source": "models/expert"}, "other": {"source": "models/other"}},
    "routing": {"sums": "expert", "words": "other"},
    "objectives": {"opd": {"policy_gradient": {}}, "exact": {"divergence": {}}},
    "plan": {"batch_samples": 8},
    "stages": [{"name": "student", "objective": "opd", "rollout": {}, "plan": {}, "train": {}, "score": {}}],
}  # fmt: skip
GONE: Any = object()
"""Value of an edit that leaves a key out."""


class Refusal(NamedTuple):
    """A job that is refused, and what its message advises."""

    edits: dict[str, Any]
    """Values by dotted key, set in JOB."""
    advised: list[tuple[str, dict[str, Any]]]
    """Words of the message, and the edits that follow them."""


def at(stage_key: str) -> str:
    return f"stages.student.{stage_key}"


GRADIENT = "objectives.opd.policy_gradient"
OF_HIDDEN = {"stages.student.objective": "exact"}
OF_TOPK = {"objectives.exact.divergence": {"kind": "reverse", "signal": "topk"}, **OF_HIDDEN}
CONCURRENT = {at("concurrent"): True}


def edited(*changes: dict[str, Any]) -> dict[str, Any]:
    """JOB with some values."""
    job = copy.deepcopy(JOB)
    for key, value in (item for edits in changes for item in edits.items()):
        *path, last = key.split(".")
        node: Any = job
        for part in path:
            stages = {one["name"]: one for one in node} if isinstance(node, list) else node
            node = stages.setdefault(part, {})
        if value is GONE:
            node.pop(last, None)
        else:
            node[last] = copy.deepcopy(value)
    return job
