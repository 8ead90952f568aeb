"""Groups that were finished after a framework's checkpoint come back after a crash, and are not generated again.

It runs in the process of TransferQueue's controller. As soon as the last session of a prompt has ended, the controller
stores a record of the group: its keys, tags, fields and their writes. What the framework clears stays in the store, and
its numbers unused, until the second checkpoint after; so every group that was finished after a checkpoint can be put
back as it was, under its numbers and writes, also one that was trained on with weights that the crash lost.

When a checkpoint is loaded, a finished group whose prompt the checkpoint has as unfinished takes its place. A finished
group whose prompt was drawn after the checkpoint waits in a partition of its own until the framework, whose dataset
goes on from the checkpoint too, draws the prompt again (verl_manager.py).

The keys and tags are those of verl 0.9.1: `verl/trainer/ppo/v1/replay_buffer.py` describes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transfer_queue.controller import DataPartitionStatus, FieldMeta

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.values import TAGS, Key, Write
from mopd_dataplane.transferqueue.codec import decode, encode

GROUP = "~group"
"""Field of a prompt's number under which the record of its finished group is stored."""
GROUPS, PIN = "mopd-groups.json", "mopd-queue.json"
"""Files of a checkpoint: which groups it knows, and which values are pinned for it."""
WAITING = "mopd-waiting-"
"""Prefix of the partition in which groups of another partition wait until their prompts are drawn again."""
PROMOTES = "mopd_promotes"
"""Tag of a prompt that was drawn again: the key of the waiting prompt whose group takes its place."""
WAITED = "mopd_waited"
"""Tag of a waiting prompt: how many checkpoints were saved since it waits."""
WAIT_CHECKPOINTS = 16
"""Checkpoints after which a group that still waits is given up."""
_KEEPER = "mopd_groups"
"""Attribute of a controller that keeps groups."""


@dataclass(frozen=True)
class Field:
    """A field of an entry as the controller knows it."""

    write: str
    dtype: str
    """Name of the torch dtype; empty for what is no tensor"""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A key of the queue with everything that the controller knows about it."""

    key: str
    number: int
    tag: dict[str, Any]
    fields: dict[str, Field]


@dataclass(frozen=True)
class Group:
    """A prompt whose sessions have all ended without an error, and their trajectories."""

    run: str
    """Training run that it belongs to"""
    order: int
    """Position among the finished groups of the run"""
    partition: str
    prompt: Entry
    trajectories: list[Entry]

    def entries(self) -> list[Entry]:
        """Prompt and trajectories."""
        return [self.prompt, *self.trajectories]

    def is_whole(self, writes: Mapping[Key, Write | None]) -> bool:
        """Check that every value of the group is still in the store. writes: those of the values there are."""
        return all(
            str(writes.get((entry.number, name))) == field.write
            for entry in self.entries()
            for name, field in entry.fields.items()
        )


def keep_groups(controller: Any, queue: LoggedQueue, *, has_tags: bool) -> GroupKeeper:
    """Have a controller keep finished groups in a queue. Runs in its process, before its first request."""
    keeper: GroupKeeper | None = getattr(controller, _KEEPER, None)
    if keeper is None:
        keeper = GroupKeeper(controller, queue, has_tags=has_tags)
        setattr(controller, _KEEPER, keeper)
    return keeper


class GroupKeeper:
    """The groups of one controller. Its methods run in the thread that answers the controller's requests."""

    def __init__(self, controller: Any, queue: LoggedQueue, *, has_tags: bool) -> None:
        """Take the place of the controller's own methods. has_tags: each put stores its tags beside the values."""
        self._controller, self._queue, self._has_tags = controller, queue, has_tags
        self._run, self._finished = uuid4().hex, 0
        self._fields_to_free: dict[int, list[str]] = {}
        """Fields of each number that was cleared since the last checkpoint"""
        self._older_fields: dict[int, list[str]] = {}
        """Fields of each number that was cleared between the last checkpoint and the one before it"""
        self._set_tags: Callable[[dict[str, dict[int, dict[str, Any]]]], None] = controller.set_custom_meta
        self._clear_meta, self._clear_partition = controller.clear_meta, controller.clear_partition
        self._save, self._load = controller.save_checkpoint, controller.load_checkpoint
        controller.set_custom_meta = self.set_tags
        controller.clear_meta, controller.clear_partition = self.clear_meta, self.clear_partition
        controller.save_checkpoint, controller.load_checkpoint = self.save_checkpoint, self.load_checkpoint

    def set_tags(self, partition_custom_meta: dict[str, dict[int, dict[str, Any]]]) -> None:
        """Set tags by partition and number. Durable on return for a group that is finished with them."""
        for name, tags in partition_custom_meta.items():
            partition = self._controller.partitions.get(name)
            for number, tag in tags.items():
                if partition is None or not tag.get("is_prompt"):
                    continue
                if (
                    tag.get("status") == "finished"
                    and partition.custom_meta.get(number, {}).get("status") != "finished"
                ):
                    self._record(name, partition, number, tag)
        own = {
            name: {number: tag for number, tag in tags.items() if PROMOTES not in tag}
            for name, tags in partition_custom_meta.items()
        }
        self._set_tags(own)
        for name, tags in partition_custom_meta.items():
            for number in tags.keys() - own[name].keys():
                self._admit(name, number, tags[number][PROMOTES])

    def clear_meta(self, global_indexes: list[int], partition_ids: list[str], clear_consumption: bool = True) -> None:
        """Forget samples; their values stay, and their numbers unused, until the second checkpoint from now."""
        for name, number in zip(partition_ids, global_indexes, strict=True):
            self._note_cleared(name, [number])
        self._clear_meta(global_indexes, partition_ids, clear_consumption)
        self._withhold()

    def clear_partition(self, partition_id: str, clear_consumption: bool = True) -> None:
        """Forget a partition, in the same way."""
        if partition_id in self._controller.partitions:
            self._note_cleared(partition_id, self._controller.partitions[partition_id].global_indexes)
        self._clear_partition(partition_id, clear_consumption)
        self._withhold()

    def save_checkpoint(self, path: str) -> None:
        """Save the controller's state, and free what was cleared before the checkpoint before this one."""
        self._give_up_waiting()
        self._save(path)
        state = {"run": self._run, "finished": self._finished}
        publish_file(Path(path).with_name(GROUPS), json.dumps(state).encode())
        old, self._older_fields, self._fields_to_free = self._older_fields, self._fields_to_free, {}
        self._queue.clear([(number, name) for number, names in old.items() for name in names])
        self._controller.index_manager.reusable_indexes.extend(old)

    def load_checkpoint(self, path: str) -> None:
        """Load a checkpoint and promote the groups that were finished after it. Raises DamagedError."""
        self._load(path)
        self._fields_to_free, self._older_fields = {}, {}
        state = Path(path).with_name(GROUPS)
        if state.exists():
            content = json.loads(state.read_text())
            self._run, self._finished = content["run"], content["finished"]
        for partition in self._controller.partitions.values():
            self._unreserve(partition)
            self._drop(partition, _orphans(partition))
        if Path(path).with_name(PIN).exists():
            self._queue.restore(read_pin(Path(path).parent), self._named())
        writes = self._queue.writes()
        groups = []
        for group in self._later_groups(writes):
            self._finished = max(self._finished, group.order)
            partition = self._partition(group.partition)
            if group.prompt.key not in partition.keys_mapping:
                partition = self._partition(WAITING + group.partition)
                group.prompt.tag[WAITED] = 0
            if _fits(partition, group):
                self._insert(partition, group)
                groups.append(group)
        self._number_anew()
        self._sweep(writes, groups)

    def _record(self, name: str, partition: DataPartitionStatus, number: int, tag: dict[str, Any]) -> None:
        """Store the record of the group of a prompt, durably."""
        uid = partition.revert_keys_mapping.get(number)
        if uid is None:
            return
        self._finished += 1
        numbers = [own for key, own in partition.keys_mapping.items() if own != number and _uid_of(key) == uid]
        group = Group(
            self._run, self._finished, name, _entry(partition, number, tag),
            [_entry(partition, own, partition.custom_meta.get(own, {})) for own in numbers],
        )  # fmt: skip
        self._queue.put([(number, GROUP)], [encode(asdict(group))])

    def _later_groups(self, writes: Mapping[Key, Write | None]) -> list[Group]:
        """Whole groups that were finished after the loaded checkpoint, in their order; the last one of each prompt."""
        keys = [key for key in writes if key[1] == GROUP]
        groups = (_read_group(decode(value)) for value in self._queue.get(keys, [writes[key] for key in keys]))
        later = [group for group in groups if group.run == self._run and group.order > self._finished]
        whole = sorted((group for group in later if group.is_whole(writes)), key=lambda group: group.order)
        return [*{(group.partition, group.prompt.key): group for group in whole}.values()]

    def _insert(self, partition: DataPartitionStatus, group: Group) -> None:
        """Put a group into a partition, instead of what it has of the prompt."""
        uid = group.prompt.key
        self._drop(partition, [number for key, number in partition.keys_mapping.items() if _uid_of(key) == uid])
        owned = self._controller.index_manager.partition_to_indexes[partition.partition_id]
        for entry in group.entries():
            owned.add(entry.number)
            partition.global_indexes.add(entry.number)
            partition.keys_mapping[entry.key] = entry.number
            partition.revert_keys_mapping[entry.number] = entry.key
            partition.ensure_samples_capacity(entry.number + 1)
            writes = {name: field.write for name, field in entry.fields.items()}
            is_taken = partition.update_production_status(
                [entry.number], [*writes], _schema(entry), {entry.number: writes}
            )
            assert is_taken, "checked by _fits"
            partition.custom_meta[entry.number] = entry.tag

    def _admit(self, name: str, number: int, uid: str) -> None:
        """Move a waiting group into its partition, in place of the prompt that was drawn again. number: of that one."""
        waiting, partition = self._controller.partitions.get(WAITING + name), self._controller.partitions[name]
        if waiting is None or uid not in waiting.keys_mapping:
            return
        prompt = _entry(waiting, waiting.keys_mapping[uid], waiting.custom_meta[waiting.keys_mapping[uid]])
        numbers = [own for key, own in waiting.keys_mapping.items() if key != uid and _uid_of(key) == uid]
        prompt.tag.pop(WAITED, None)
        group = Group(
            self._run, 0, name, prompt, [_entry(waiting, own, waiting.custom_meta.get(own, {})) for own in numbers]
        )
        self.clear_meta([number], [name])
        self._drop(waiting, [prompt.number, *numbers])
        self._insert(partition, group)

    def _give_up_waiting(self) -> None:
        """Count a checkpoint for each waiting group, and forget those that have waited for too many."""
        for name, partition in self._controller.partitions.items():
            if not name.startswith(WAITING):
                continue
            for uid, number in [*partition.keys_mapping.items()]:
                tag = partition.custom_meta.get(number, {})
                if WAITED not in tag:
                    continue
                tag[WAITED] += 1
                if tag[WAITED] > WAIT_CHECKPOINTS:
                    numbers = [own for key, own in partition.keys_mapping.items() if _uid_of(key) == uid]
                    self.clear_meta(numbers, [name] * len(numbers))

    def _partition(self, name: str) -> DataPartitionStatus:
        """A partition, made without a number set aside for it."""
        return self._controller.partitions.setdefault(name, DataPartitionStatus(partition_id=name))

    def _drop(self, partition: DataPartitionStatus, numbers: Iterable[int]) -> None:
        """Forget entries of a partition at once, without their values."""
        entries = [*numbers]
        if entries:
            partition.clear_data(entries)
            self._controller.index_manager.partition_to_indexes[partition.partition_id].difference_update(entries)

    def _unreserve(self, partition: DataPartitionStatus) -> None:
        """Give back the numbers that are set aside for a partition, which a group that comes back may have."""
        owned = self._controller.index_manager.partition_to_indexes[partition.partition_id]
        owned.difference_update(partition.pre_allocated_global_indexes)
        partition.pre_allocated_global_indexes.clear()

    def _note_cleared(self, name: str, numbers: Iterable[int]) -> None:
        partition = self._controller.partitions.get(name)
        for number in numbers if partition is not None else ():
            if number in partition.global_indexes:
                names = [*partition.field_custom_backend_meta.get(number, {})]
                names += [GROUP] * bool(partition.custom_meta.get(number, {}).get("is_prompt"))
                self._fields_to_free[number] = names + [TAGS] * self._has_tags

    def _withhold(self) -> None:
        """Take numbers that were cleared lately out of those that are used next."""
        manager = self._controller.index_manager
        cleared = self._fields_to_free.keys() | self._older_fields.keys()
        manager.reusable_indexes = [number for number in manager.reusable_indexes if number not in cleared]

    def _number_anew(self) -> None:
        """Have the controller use every number again that no partition has."""
        manager = self._controller.index_manager
        used = {number for numbers in manager.partition_to_indexes.values() for number in numbers}
        manager.global_index_counter = max(manager.global_index_counter, max(used, default=-1) + 1)
        manager.allocated_indexes = used
        manager.reusable_indexes = [number for number in range(manager.global_index_counter) if number not in used]

    def _named(self) -> set[Key]:
        """Keys of the values that the partitions name, with the tags that were put beside them."""
        return {
            (number, name)
            for partition in self._controller.partitions.values()
            for number in partition.global_indexes
            for name in (TAGS, *partition.field_custom_backend_meta.get(number, {}))
        }

    def _sweep(self, writes: Mapping[Key, Write | None], groups: list[Group]) -> None:
        """Clear the values that neither a partition nor the record of a promoted group names."""
        needed = self._named() | {(group.prompt.number, GROUP) for group in groups}
        extra = [key for key in writes if key not in needed]
        self._queue.clear(extra, [writes[key] for key in extra])


def write_pin(folder: Path, pin: str) -> None:
    """Note in a checkpoint which values are pinned for it."""
    publish_file(folder / PIN, json.dumps({"pin": pin}).encode())


def read_pin(folder: Path) -> str:
    """The pin of the values of a checkpoint."""
    return str(json.loads((folder / PIN).read_text())["pin"])


def _uid_of(key: str) -> str:
    """The prompt's key of a key: `uid` of `uid` and of `uid_session_index`."""
    return key.partition("_")[0]


def _orphans(partition: DataPartitionStatus) -> list[int]:
    """Numbers of trajectories without a prompt: the checkpoint's trainer had sampled their group."""
    keys = partition.keys_mapping
    return [number for key, number in keys.items() if _uid_of(key) != key and _uid_of(key) not in keys]


def _entry(partition: DataPartitionStatus, number: int, tag: dict[str, Any]) -> Entry:
    fields = {}
    for name, write in partition.field_custom_backend_meta.get(number, {}).items():
        meta = partition.field_metadata[name]
        shape = meta.per_sample_shapes.get(number) if meta.is_nested else meta.shape
        fields[name] = Field(write, _dtype_name(meta), tuple(shape or ()))
    return Entry(partition.revert_keys_mapping[number], number, dict(tag), fields)


def _fits(partition: DataPartitionStatus, group: Group) -> bool:
    """Check that the fields of a group have the types of those that a partition has."""
    for entry in group.entries():
        for name, field in entry.fields.items():
            meta = partition.field_metadata.get(name)
            if meta is not None and field.dtype != _dtype_name(meta):
                return False
    return True


def _dtype_name(meta: FieldMeta) -> str:
    return str(meta.dtype).removeprefix("torch.") if meta.dtype is not None else ""


def _schema(entry: Entry) -> dict[str, dict[str, Any]]:
    """What TransferQueue keeps of each field of an entry."""
    return {
        name: {
            "dtype": getattr(torch, field.dtype), "shape": None, "is_nested": True, "is_non_tensor": False,
            "per_sample_shapes": {entry.number: field.shape},
        } if field.dtype else {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
        for name, field in entry.fields.items()
    }  # fmt: skip


def _read_group(record: dict[str, Any]) -> Group:
    """Return the group of its record. Raises DamagedError for one that `_record` did not write."""
    try:
        prompt, *trajectories = (
            Entry(**entry | {"fields": {name: Field(**field) for name, field in entry["fields"].items()}})
            for entry in (record["prompt"], *record["trajectories"])
        )
        return Group(**record | {"prompt": prompt, "trajectories": trajectories})
    except (TypeError, LookupError) as error:
        raise DamagedError(f"the record of a finished group cannot be read: {error}") from None
