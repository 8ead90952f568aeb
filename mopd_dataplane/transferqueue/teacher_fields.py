"""Teachers' signals as fields of the trajectories in a running TransferQueue, for the trainer to read.

TransferQueue gives the number of a sample to another one once it is cleared. So a trajectory is known by the write of
its token ids, which the controller keeps for each number, and the controller takes the fields of a trajectory only
while the number still has that write. It checks this in the thread that serves all of its requests, so that no clearing
comes in between.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from transfer_queue.client import AsyncTransferQueueClient

from mopd_dataplane.errors import InputError, ResourceError, nearest
from mopd_dataplane.interchange.queue_mapping import QueueMapping, read_settings, stage_of, uid_of
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.queue_log import LOGS, SETTINGS, logs_folder
from mopd_dataplane.store.queue.values import Write
from mopd_dataplane.transferqueue.backend import CONTROLLER, NAME, NAMESPACE, read_section
from mopd_dataplane.transferqueue.codec import encode

ANSWER_S = 60.0
"""How long the controller may take to answer, in seconds, before it counts as gone."""
_CHECKS = "mopd_checks_writes"
"""Attribute of a controller that checks the writes of a notice."""
_Result = TypeVar("_Result")


class QueueClosedError(ResourceError):
    """TransferQueue has ended, or does not answer."""


@dataclass(frozen=True)
class Trajectory:
    """A trajectory in the running queue."""

    partition: str
    number: int
    """Its number, which another trajectory may have later"""
    write: Write
    """The write of its token ids, which no other trajectory has"""
    uid: str
    """The uid of its sample in the store"""


@dataclass(frozen=True)
class TeacherFields:
    """The signal of one teacher for a trajectory of L tokens, R of them in its response.

    Example: TeacherFields(trajectory, "math", logprobs=np.zeros((9, 1), np.float32), ids=np.zeros((9, 1), np.int32)).
    """

    trajectory: Trajectory
    teacher: str
    logprobs: NDArray[np.float32]
    """[L, K]: row t is of the token t + 1, in nat; 0 where the teacher did not score"""
    ids: NDArray[np.int32]
    """[L, K]: the tokens of `logprobs`"""
    hidden: torch.Tensor | None = None
    """[R, d]: the hidden states from which each response token follows; 0 where the teacher did not score"""


def read_queue_mapping(store: Path, queue: str) -> QueueMapping:
    """Return the mapping of a queue of a store.

    Raises InputError for a queue that does not exist, or that has no mapping or one without fields for a teacher.
    """
    settings = logs_folder(store, queue) / SETTINGS
    if not settings.parent.is_dir():
        queues = [folder.name for folder in (store / LOGS).glob("*") if folder.is_dir()]
        raise InputError(f"{store} has no queue {queue!r}; {nearest(queue, queues)}")
    if not settings.exists():
        raise InputError(
            f"queue {queue!r} of {store} has no mapping, so none of its values is a sample; set backend.{NAME}.mapping "
            "where the framework is configured"
        )
    mapping = read_settings(settings).mapping
    missing = [part for part in ("teacher_logprobs", "teacher_ids", "teacher") if not getattr(mapping, part)]
    if missing:
        raise InputError(
            f"the mapping of queue {queue!r} names no field for {', '.join(missing)}; set them in "
            f"backend.{NAME}.mapping, as the mapping 'verl' has them, and start the framework again"
        )
    return mapping


@contextmanager
def running_queue(store: Path, queue: str) -> Iterator[RunningQueue]:
    """Join the Ray cluster at RAY_ADDRESS, or one on this machine, and attach to the TransferQueue that runs on it.

    Raises InputError when there is none, or when it keeps its values elsewhere than in this queue of the store.
    """
    mapping = read_queue_mapping(store, queue)
    joined = not ray.is_initialized()
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if joined:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray ends a process whose cluster is gone after this time; this one finds that out earlier, and ends by itself.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(int(5 * ANSWER_S)))
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"no Ray cluster answers at {address} ({error}); start the framework first, and name its cluster in "
                "RAY_ADDRESS if it is not on this machine"
            ) from None
    try:
        try:
            controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        except ValueError:
            raise InputError(
                f"no TransferQueue runs on the Ray cluster at {address}; start the framework first"
            ) from None
        config = _config_of(controller)
        _check_backend(config, store, queue)
        ray.get(controller.__ray_call__.remote(check_writes), timeout=ANSWER_S)
        client = AsyncTransferQueueClient(f"mopd-score-{os.getpid()}", config.controller.zmq_info)
        client.initialize_storage_manager(NAME, {"store": str(store), "queue": queue})
        running = RunningQueue(client, mapping, queue, controller)
        try:
            yield running
        finally:
            running.close()
    finally:
        if joined:
            ray.shutdown()


def _config_of(controller: Any) -> Any:
    """Return the configuration of a controller, which has none until TransferQueue has started. Raises InputError."""
    until = time.monotonic() + ANSWER_S
    while (config := ray.get(controller.get_config.remote(), timeout=ANSWER_S)) is None:
        if time.monotonic() > until:
            raise InputError(f"TransferQueue has not started within {ANSWER_S:.0f} s; look at the framework's messages")
        time.sleep(0.5)
    return config


def check_writes(controller: Any) -> None:
    """Let a controller check the writes that a notice of new values names, and ignore the samples that have others.

    Runs in the controller's process. The writes that a notice names for fields other than those of its values are the
    condition: a sample that lacks one of them, or is being cleared, gets nothing of the notice.
    """
    if getattr(controller, _CHECKS, False):
        return
    take = controller._handle_notify_data_update_request

    def checked(request: Any) -> Any:
        body = request.body
        schema, writes = body.get("field_schema") or {}, body.get("custom_backend_meta") or {}
        conditions = {number: {f: w for f, w in own.items() if f not in schema} for number, own in writes.items()}
        if any(conditions.values()):
            partition = controller._get_partition(body.get("partition_id"))
            numbers = [n for n in body["global_indexes"] if _has_writes(partition, n, conditions.get(n, {}))]
            body["global_indexes"] = numbers
            body["custom_backend_meta"] = {n: {f: w for f, w in writes[n].items() if f in schema} for n in numbers}
            for field in schema.values():
                if field.get("per_sample_shapes"):
                    field["per_sample_shapes"] = {n: field["per_sample_shapes"][n] for n in numbers}
        return take(request)

    controller._handle_notify_data_update_request = checked
    setattr(controller, _CHECKS, True)


def _has_writes(partition: Any, number: int, writes: Mapping[str, str]) -> bool:
    """Check if a sample of a partition has values of these writes, none of which is being cleared."""
    if partition is None:
        return False
    own = partition.field_custom_backend_meta.get(number, {})
    columns, status = partition.field_name_mapping, partition.production_status
    return all(own.get(name) == write and status[number, columns[name]] == 1 for name, write in writes.items())


class RunningQueue:
    """The trajectories of a running TransferQueue whose values are in a store. Not for several threads."""

    def __init__(self, client: AsyncTransferQueueClient, mapping: QueueMapping, queue: str, controller: Any) -> None:
        """Wrap a client of a controller that checks writes. controller: its handle; None if it is in this process."""
        self._client, self._mapping, self._name, self._controller = client, mapping, queue, controller
        self._queue: LoggedQueue = client.storage_manager.storage_client.queue
        self._loop = asyncio.new_event_loop()

    @property
    def takes_hidden(self) -> bool:
        """Whether the mapping has a field for hidden states."""
        return bool(self._mapping.teacher_hidden)

    def is_open(self) -> bool:
        """Check if TransferQueue runs."""
        if self._controller is None:
            return True
        try:
            ray.get(self._controller.get_config.remote(), timeout=ANSWER_S)
        except (ray.exceptions.RayError, ConnectionError, TimeoutError):
            return False
        return True

    def fold(self) -> None:
        """Have the store hold every trajectory that was put up to now as a sample."""
        self._queue.fold()

    def unscored(self, stage: str) -> list[Trajectory]:
        """Return the trajectories of a stage that have no log-probs of a teacher. Raises QueueClosedError."""
        key, logprobs = self._mapping.key_field, self._mapping.teacher_logprobs
        trajectories = []
        for partition in self._ask(self._client.async_get_partition_list()):
            if stage_of(partition) != stage:
                continue
            for number, writes in self._writes(partition, [key, logprobs]).items():
                if key in writes and logprobs not in writes:
                    write = Write.parse(writes[key])
                    trajectories.append(Trajectory(partition, number, write, uid_of(self._name, number, write)))
        return trajectories

    def put(self, signals: Sequence[TeacherFields]) -> int:
        """Put the fields of trajectories. Returns how many trajectories took them: not those that are cleared by now.

        Raises QueueClosedError, ResourceError.
        """
        count = 0
        for partition in dict.fromkeys(one.trajectory.partition for one in signals):
            count += self._put(partition, [one for one in signals if one.trajectory.partition == partition])
        return count

    def close(self) -> None:
        """Leave the queue."""
        self._queue.close()
        self._client.close()
        self._loop.close()

    def _put(self, partition: str, signals: Sequence[TeacherFields]) -> int:
        """Store the fields of trajectories of one partition, have the controller take them, clear what it refused."""
        values = {one.trajectory.number: self._values(one) for one in signals}
        keys = [(number, name) for number, fields in values.items() for name in fields]
        stored = [encode(value) for fields in values.values() for value in fields.values()]
        write = str(self._queue.put(keys, stored)[0])
        conditions = {one.trajectory.number: {self._mapping.key_field: str(one.trajectory.write)} for one in signals}
        self._ask(
            self._client.storage_manager.notify_data_update(
                partition,
                [*values],
                _schema([*values.values()]),
                {number: conditions[number] | dict.fromkeys(fields, write) for number, fields in values.items()},
            )
        )
        present = self._writes(partition, [self._mapping.key_field, self._mapping.teacher_logprobs])
        taken = {n for n in values if present.get(n, {}).get(self._mapping.teacher_logprobs) == write}
        gone = {n for n in values if present.get(n, {}).items().isdisjoint(conditions[n].items())} - taken
        refused = [key for key in keys if key[0] in gone]
        self._queue.clear(refused, [Write.parse(write)] * len(refused))
        return len(taken)

    def _values(self, one: TeacherFields) -> dict[str, torch.Tensor | str]:
        mapping = self._mapping
        values: dict[str, torch.Tensor | str] = {
            mapping.teacher_logprobs: torch.from_numpy(one.logprobs),
            mapping.teacher_ids: torch.from_numpy(one.ids),
            mapping.teacher: one.teacher,
        }
        if one.hidden is not None and self.takes_hidden:
            values[mapping.teacher_hidden] = one.hidden
        return values

    def _writes(self, partition: str, names: list[str]) -> dict[int, dict[str, str]]:
        """Return the writes of some fields of each sample of a partition, by its number; empty once it is cleared."""
        request = self._client.async_get_meta(
            data_fields=names, batch_size=0, partition_id=partition, mode="force_fetch"
        )
        try:
            meta = self._ask(request)
        except RuntimeError as error:
            if f"{partition} not found" in str(error):
                return {}
            raise
        return dict(zip(meta.global_indexes, meta._custom_backend_meta, strict=True))

    def _ask(self, request: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the controller's answer. Raises QueueClosedError when there is none."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(request, ANSWER_S))
        except TimeoutError:
            raise QueueClosedError(f"the controller of queue {self._name!r} does not answer") from None


def _schema(samples: Sequence[Mapping[str, torch.Tensor | str]]) -> dict[str, dict[str, Any]]:
    """Return what TransferQueue keeps of each field: types, and the shapes in the order of the samples."""
    schema = {}
    for name, value in samples[0].items():
        if isinstance(value, torch.Tensor):
            shapes = [tuple(one[name].shape) for one in samples]  # type: ignore[union-attr]
            schema[name] = {
                "dtype": value.dtype, "shape": None, "is_nested": True, "is_non_tensor": False,
                "per_sample_shapes": shapes,
            }  # fmt: skip
        else:
            schema[name] = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    return schema


def _check_backend(config: Any, store: Path, queue: str) -> None:
    """Check that a running TransferQueue keeps its values in this queue. Raises InputError."""
    kind = str(config.backend.storage_backend)
    if kind != NAME:
        raise InputError(f"the running TransferQueue keeps its values in {kind}, not in a store ({NAME})")
    backend = read_section(config.backend[NAME])
    # A relative path is one of the process that started TransferQueue, so only its end can be compared.
    path = Path(os.path.normpath(backend.store.removeprefix("file://")))
    parts = tuple(part for part in path.parts if part != "..")
    if backend.queue != queue or store.parts[len(store.parts) - len(parts) :] != parts:
        raise InputError(
            f"the running TransferQueue keeps its values in queue {backend.queue!r} of {backend.store}, not in queue "
            f"{queue!r} of {store}"
        )
