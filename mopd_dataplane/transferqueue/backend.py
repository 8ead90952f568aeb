"""The classes that TransferQueue needs of a backend: a key-value client, its manager, and an initialiser.

TransferQueue's controller numbers samples and tracks which of their fields exist, and saves that in its own checkpoint.
The values are in the store as soon as they are put, so a checkpoint of this backend copies nothing: it names a version
of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ray
from omegaconf import DictConfig, OmegaConf
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory
from transfer_queue.utils.logging_utils import get_logger

from mopd_dataplane.errors import InputError
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.opening import open_queue
from mopd_dataplane.store.queue.values import TAGS, Key, Write
from mopd_dataplane.transferqueue.codec import decode, encode
from mopd_dataplane.transferqueue.promote import keep_groups, read_pin, write_pin

if TYPE_CHECKING:
    from mopd_dataplane.store.queue.committed import CommittedQueue

NAME = "MopdStore"
CLIENT = "MopdStorageClient"
CONTROLLER, NAMESPACE = "TransferQueueController", "transfer_queue"
"""Name and namespace of the actor that TransferQueue starts."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class Backend:
    """Lies in the configuration that TransferQueue sends to every process: receiving it imports this module there,
    and so registers the classes."""

    store: str
    queue: str = "queue"
    mapping: Any = ""
    """Name of a framework, or a table of its field names: the values become samples. Empty: they stay values."""
    tokenizer: str = ""
    """Model whose tokenizer made the token ids: a folder, or a name of the Hugging Face Hub."""
    domain: str = "queue"
    """Domain of samples whose fields name none."""
    policy: str = "policy"
    """Name of the policy that samples."""
    promote: str = ""
    """Framework whose finished groups come back after a crash: `verl`, or empty for none."""


def read_section(config: Any) -> Backend:
    """Return what a backend section says. Raises InputError for an unknown or missing key."""
    keys = {key: value for key, value in dict(config).items() if key not in ("client_name", "zmq_info", "backend")}
    try:
        return Backend(**keys)
    except TypeError as error:
        raise InputError(
            f"backend.{NAME} = {keys}: {error}; give `store`, the folder of the store, and if you like `queue`, the "
            "name of the queue"
        ) from None


def opened(backend: Backend) -> LoggedQueue | CommittedQueue:
    """The queue of a backend section."""
    return open_queue(backend.store, backend.queue)


@StorageClientFactory.register(CLIENT)
class MopdStorageClient(StorageKVClient):  # type: ignore[misc]
    """Values of `sample@field` keys in a queue of a store."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        backend = read_section(config)
        self.queue = opened(backend)
        self.has_mapping = bool(backend.mapping)
        self.keeps_groups = bool(backend.promote)
        self._tags: dict[int, dict[str, Any]] = {}

    def tag(self, samples: Sequence[int], partition: str, tags: Sequence[dict[str, Any]]) -> None:
        """Store, with the next put of values of these samples, what a put says of them itself."""
        self._tags |= {sample: {"partition": partition, "tags": own} for sample, own in zip(samples, tags, strict=True)}

    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        """Store values, durable on return; a key that has one gets the new one. Raises InputError, ResourceError.

        Returns the write of each value, which the controller keeps with the sample's metadata: after a crash, or when
        it has used a number again, it gets and clears the value that it means or none.
        """
        _check_lists(keys, values)
        parsed, encoded = [_parsed(key) for key in keys], [encode(value) for value in values]
        tagged = [sample for sample in dict.fromkeys(sample for sample, _ in parsed) if sample in self._tags]
        encoded += [encode(self._tags.pop(sample)) for sample in tagged]
        writes = self.queue.put([*parsed, *((sample, TAGS) for sample in tagged)], encoded)
        return [str(write) for write in writes[: len(keys)]]

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
        parsed, writes = [_parsed(key) for key in keys], _writes(custom_backend_meta) or [None] * len(keys)
        if self.has_mapping:
            # Under each write of the sample's values, since it is not known which of these puts came with tags.
            tags = {((sample, TAGS), write) for (sample, _), write in zip(parsed, writes, strict=True)}
            parsed, writes = [*parsed, *(key for key, _ in tags)], [*writes, *(write for _, write in tags)]
        self.queue.clear(parsed, writes)


@StorageManagerFactory.register(NAME)
class MopdStorageManager(KVStorageManager):  # type: ignore[misc]
    """TransferQueue's manager over a store."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        super().__init__(controller_info, {**dict(config or {}), "client_name": CLIENT}, zmq_context=zmq_context)

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        """Store values, and with a mapping the partition and the tags of their samples."""
        if self.storage_client.has_mapping and metadata.global_indexes:
            self.storage_client.tag(metadata.global_indexes, metadata.partition_ids[0], metadata.get_all_custom_meta())
        await super().put_data(data, metadata, data_parser)

    async def clear_data(self, metadata: Any) -> None:
        """Forget values; if groups are promoted, the controller's process does it, two checkpoints later."""
        if not self.storage_client.keeps_groups:
            await super().clear_data(metadata)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Pin the present values."""
        folder, pin = Path(checkpoint_dir), uuid4().hex
        self.storage_client.queue.pin(pin)
        folder.mkdir(parents=True, exist_ok=True)
        write_pin(folder, pin)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Restore exactly the values of a checkpoint. Raises UnknownNameError when they are no longer kept.

        If groups are promoted, the controller's process does it, which loads its part next and knows what is needed.
        """
        if not self.storage_client.keeps_groups:
            self.storage_client.queue.restore(read_pin(Path(checkpoint_dir)))


@StorageBootstrapProvider.register_provider(NAME)  # type: ignore[untyped-decorator]
def initialize(conf: DictConfig) -> dict[str, Any]:
    """Once, in the process that starts TransferQueue: open the queue, and have every other process know the backend."""
    section = conf.backend[NAME]
    backend = read_section(OmegaConf.to_container(section, resolve=True))
    if backend.promote:
        _check_promote(backend)
    if backend.mapping:
        _record(backend)
    if backend.promote:
        controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        ray.get(controller.__ray_call__.remote(keep_groups_of, backend))
    keys = opened(backend).keys()
    if keys:
        _log.warning(f"{section.store} holds {len(keys)} values of an earlier run; load a checkpoint to go on with it")
    section.backend = backend
    return {}


def keep_groups_of(controller: Any, backend: Backend) -> None:
    """Have a controller keep the finished groups of a backend. Runs in the controller's process."""
    queue = opened(backend)
    assert isinstance(queue, LoggedQueue)
    keep_groups(controller, queue, has_tags=bool(backend.mapping))


def _check_promote(backend: Backend) -> None:
    """Raises InputError for a framework whose groups are unknown, and for an object store."""
    if backend.promote != "verl":
        raise InputError(f"backend.{NAME}.promote = {backend.promote!r:.40}: give verl, or leave it out")
    if "://" in backend.store.removeprefix("file://"):
        raise InputError(
            f"backend.{NAME}.promote: groups are promoted from the logs of a folder; give a folder as store, or leave "
            "promote out"
        )


def _record(backend: Backend) -> None:
    """Have the values recorded as samples. Raises InputError for a mapping or tokenizer that is none."""
    if "://" in backend.store.removeprefix("file://"):
        raise InputError(
            f"backend.{NAME}.mapping: a queue on an object store has no logs from which samples could be recorded; "
            "give a folder as store, or leave mapping out"
        )
    from mopd_dataplane.interchange.queue_mapping import QueueRollouts, read_mapping
    from mopd_dataplane.interchange.queue_rollouts import record_rollouts
    from mopd_dataplane.interchange.vocabulary import TokenizerVocabulary
    from mopd_dataplane.models.hf import load_tokenizer, tokenizer_digest
    from mopd_dataplane.models.hub import model_folder

    mapping = read_mapping(backend.mapping)
    if not backend.tokenizer:
        raise InputError(f"backend.{NAME}.mapping: give tokenizer, the folder or name of the model that samples")
    tokenizer = load_tokenizer(model_folder(backend.tokenizer, weights=False))
    vocabulary = TokenizerVocabulary(tokenizer, tokenizer_digest(tokenizer))
    rollouts = QueueRollouts(
        mapping=mapping, tokenizer=vocabulary.digest, vocabulary_size=vocabulary.size, domain=backend.domain,
        policy=backend.policy,
    )  # fmt: skip
    folder = Path(backend.store.removeprefix("file://")).absolute()
    record_rollouts(folder, backend.queue, rollouts, vocabulary.file())


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
