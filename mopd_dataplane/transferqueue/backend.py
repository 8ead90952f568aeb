"""The classes that TransferQueue needs of a backend: a key-value client, its manager, and an initialiser.

TransferQueue's controller numbers samples and tracks which of their fields exist, and saves that in its own checkpoint.
The values are in the store as soon as they are put, so a checkpoint of this backend copies nothing: it names a version
of the queue.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from omegaconf import DictConfig
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory
from transfer_queue.utils.logging_utils import get_logger

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import InputError
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.opening import open_queue
from mopd_dataplane.store.queue.values import Key, Write
from mopd_dataplane.transferqueue.codec import decode, encode

if TYPE_CHECKING:
    from mopd_dataplane.store.queue.committed import CommittedQueue

NAME = "MopdStore"
CLIENT = "MopdStorageClient"
CHECKPOINT = "mopd-queue.json"

_log = get_logger(__name__)


@dataclass(frozen=True)
class Backend:
    """Lies in the configuration that TransferQueue sends to every process: receiving it imports this module there,
    and so registers the classes."""

    store: str
    queue: str = "queue"


def opened(config: Any) -> LoggedQueue | CommittedQueue:
    """The queue that a backend section names. Raises InputError for an unknown or missing key."""
    keys = {key: value for key, value in dict(config).items() if key not in ("client_name", "zmq_info", "backend")}
    try:
        backend = Backend(**keys)
    except TypeError as error:
        raise InputError(f"backend.{NAME} = {keys}: {error}; give store, and queue for a name of its own") from None
    return open_queue(backend.store, backend.queue)


@StorageClientFactory.register(CLIENT)
class MopdStorageClient(StorageKVClient):  # type: ignore[misc]
    """Values of `sample@field` keys in a queue of a store."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.queue = opened(config)

    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        """Store values, durable on return; a key that has one gets the new one. Raises InputError, ResourceError.

        Returns the write of each value, which the controller keeps with the sample's metadata: after a crash, or when
        it has used a number again, it gets and clears the value that it means or none.
        """
        _check_lists(keys, values)
        writes = self.queue.put([_parsed(key) for key in keys], [encode(value) for value in values])
        return [str(write) for write in writes]

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        """Values in the asked order; their shapes and dtypes are stored with them.

        Raises UnknownNameError, and MismatchError for a value of another write than the one in the metadata.
        """
        _check_lists(keys)
        values = self.queue.get([_parsed(key) for key in keys], _writes(custom_backend_meta))
        return [decode(value) for value in values]

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Forget values, durably; one of another write than the one in the metadata stays."""
        _check_lists(keys)
        self.queue.clear([_parsed(key) for key in keys], _writes(custom_backend_meta))


@StorageManagerFactory.register(NAME)
class MopdStorageManager(KVStorageManager):  # type: ignore[misc]
    """TransferQueue's manager over a store."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        super().__init__(controller_info, {**dict(config or {}), "client_name": CLIENT}, zmq_context=zmq_context)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Pin the present values."""
        folder, pin = Path(checkpoint_dir), uuid4().hex
        self.storage_client.queue.pin(pin)
        folder.mkdir(parents=True, exist_ok=True)
        publish_file(folder / CHECKPOINT, json.dumps({"pin": pin}).encode())

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Restore exactly the values of a checkpoint. Raises UnknownNameError when they are no longer kept."""
        self.storage_client.queue.restore(json.loads((Path(checkpoint_dir) / CHECKPOINT).read_text())["pin"])


@StorageBootstrapProvider.register_provider(NAME)  # type: ignore[untyped-decorator]
def initialize(conf: DictConfig) -> dict[str, Any]:
    """Once, in the process that starts TransferQueue: open the queue, and have every other process know the backend."""
    section = conf.backend[NAME]
    queue = opened(section)
    keys = queue.keys()
    if keys:
        _log.warning(f"{section.store} holds {len(keys)} values of an earlier run; load a checkpoint to go on with it")
    section.backend = Backend(str(section.store), str(section.get("queue", "queue")))
    return {}


def _parsed(key: str) -> Key:
    sample, _, field = key.partition("@")
    return int(sample), field


def _writes(custom_backend_meta: list[str | None] | None) -> list[Write | None] | None:
    """Writes that the controller kept; None for values that it does not know one of."""
    return [Write.parse(text) if text else None for text in custom_backend_meta] if custom_backend_meta else None


def _check_lists(keys: Any, values: Any = None) -> None:
    for name, values_given in (("keys", keys), ("values", values)):
        if values_given is not None and not isinstance(values_given, list):
            raise InputError(f"{name} must be a list, found {type(values_given).__name__}")
    if values is not None and len(keys) != len(values):
        raise InputError(f"{len(keys)} keys for {len(values)} values; give one value a key")
