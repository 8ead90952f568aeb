"""verl's agent-loop manager, which takes stored groups for prompts that the dataset yields again after a restart.

In verl's configuration, `actor_rollout_ref.rollout.agent.agent_loop_manager_class` names it:
`mopd_dataplane.transferqueue.verl_manager.StoredGroupManager`.

verl's dataset goes on from the checkpoint, so it yields the prompts that were drawn after the checkpoint once more.
Their finished groups wait in the queue (promote.py); a prompt with the same content gets its group, not a new one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from mopd_dataplane.transferqueue.codec import encode
from mopd_dataplane.transferqueue.promote import PROMOTES, WAITED, WAITING

PARTITION = "train"
"""Partition of verl's training prompts; those of a validation are always answered anew."""
NOT_CONTENT = frozenset({"uid", "global_steps"})
"""Fields of a prompt that differ each time that the dataset yields it."""


class StoredGroupManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager; it generates only for the prompts that have no waiting group."""

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Dispatch the prompts of a batch that have no finished group in the store."""
        rest = take_stored_groups(prompts)
        if rest is not None:
            super().generate_sequences(rest)


def take_stored_groups(prompts: TensorDict) -> TensorDict | None:
    """Have waiting groups take the place of the prompts of a batch that have their content.

    Returns the prompts that must be generated; None without any. prompts: a batch of verl that is already in the queue.
    """
    if "validate" in prompts:
        return prompts
    names, waiting = _waiting_prompts()
    if not waiting:
        return prompts
    columns = dict(prompts.items())
    matches: dict[int, str] = {}
    for row in range(len(prompts)):
        uids = waiting.get(_digest(columns, names, row))
        if uids:
            matches[row] = uids.pop(0)
    if not matches:
        return prompts
    keys = [_value(columns["uid"], row) for row in matches]
    tags = [{"is_prompt": True, PROMOTES: uid} for uid in matches.values()]
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, tags=tags)
    rest = [row for row in range(len(prompts)) if row not in matches]
    return prompts[rest] if rest else None


def _waiting_prompts() -> tuple[list[str], dict[str, list[str]]]:
    """(fields of the waiting prompts, their keys by the digest of these fields), the longest wait first."""
    entries = (tq.kv_list(WAITING + PARTITION) or {}).get(WAITING + PARTITION, {})
    uids = [uid for uid, tag in entries.items() if WAITED in tag]
    if not uids:
        return [], {}
    columns = dict(tq.kv_batch_get(keys=uids, partition_id=WAITING + PARTITION).items())
    names = sorted(columns.keys() - NOT_CONTENT)
    waiting: dict[str, list[str]] = defaultdict(list)
    for row, uid in enumerate(uids):
        waiting[_digest(columns, names, row)].append(uid)
    return names, waiting


def _digest(columns: Mapping[str, Any], names: Sequence[str], row: int) -> str:
    """Digest of some fields of a row; a field that there is not counts as None."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        value = encode(_value(columns[name], row) if name in columns else None)
        # Without the shape: the queue may give a number back as a tensor of one number.
        digest.update(f"{name}\0{value.kind}\0{value.dtype}\0{len(value.data)}\0".encode() + value.data)
    return digest.hexdigest()


def _value(column: Any, row: int) -> Any:
    """Value of a row of a batch's column."""
    if isinstance(column, NonTensorStack):
        item = column[row]
        return item.data if isinstance(item, NonTensorData) else item
    return column.data if isinstance(column, NonTensorData) else column[row]
