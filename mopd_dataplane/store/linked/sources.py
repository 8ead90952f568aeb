"""The other stores that have payload of one store's samples.

    sources/<number>.json    location and id of a store, from 1 on

A number is claimed by creating its file and never changes, because rows refer to it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mopd_dataplane.errors import DamagedError, MismatchError, MopdError, UnknownNameError

if TYPE_CHECKING:
    import lance

    from mopd_dataplane.records import Teacher
    from mopd_dataplane.store.location import StoreLocation
    from mopd_dataplane.store.read.hidden import HiddenReader
    from mopd_dataplane.store.remote.range_cache import RangeCache

FOLDER = "sources"
_FILE = re.compile(r"(\d+)\.json")


class SourceRecord(NamedTuple):
    """Another store."""

    uri: str
    uuid: str
    """Its id, which no other store at this location has."""


class OtherStore(Protocol):
    """What is read of another store; every member is that of StoreReader."""

    uri: str
    sources: Sources

    @property
    def uuid(self) -> str: ...

    def dataset(self, name: str) -> lance.LanceDataset: ...

    def teachers(self) -> dict[str, Teacher]: ...

    def use_cache(self, cache: RangeCache | None) -> None: ...

    def own_hidden_reader(self, teacher: str) -> HiddenReader: ...


class Sources:
    """The other stores of one store, each opened when it is first read."""

    def __init__(self, location: StoreLocation, open_store: Callable[..., OtherStore]) -> None:
        """open_store: takes (uri, storage_options), and raises the errors of StoreReader.open."""
        self._location = location
        self._open_store = open_store
        self._records: dict[int, SourceRecord] = {}
        self._stores: dict[int, OtherStore] = {}
        self.cache: RangeCache | None = None
        """Cache of those that are on object stores, on this node; set by StoreReader.use_cache."""

    def __bool__(self) -> bool:
        """Whether there are other stores."""
        return bool(self._records) or bool(self._location.children(FOLDER))

    def all(self) -> dict[int, SourceRecord]:
        """Return every other store by its number."""
        numbers = [int(match[1]) for match in map(_FILE.fullmatch, self._location.children(FOLDER)) if match]
        return {number: self.record(number) for number in sorted(numbers)}

    def add(self, store: OtherStore) -> int:
        """Return the number of another store; recorded durably if it is new."""
        wanted_record = SourceRecord(store.uri, store.uuid)
        records = self.all()
        for number, record in records.items():
            if record == wanted_record:
                return number
        number = max(records, default=0) + 1
        value: dict[str, Any] = {**wanted_record._asdict(), "token": uuid.uuid4().hex}
        while not self._location.create_json(f"{FOLDER}/{number}.json", value):
            if self.record(number) == wanted_record:
                break
            number += 1
        self._stores[number] = store
        return number

    def record(self, number: int) -> SourceRecord:
        """Return the record of a number. Raises DamagedError when it is missing."""
        if number not in self._records:
            value = self._location.read_json(f"{FOLDER}/{number}.json")
            if value is None:
                file = self._location.of(f"{FOLDER}/{number}.json")
                raise DamagedError(f"{file} is gone, and rows of this store refer to it; restore it from a copy")
            self._records[number] = SourceRecord(str(value["uri"]), str(value["uuid"]))
        return self._records[number]

    def open(self, number: int) -> OtherStore:
        """Open another store, to read it.

        Raises UnknownNameError when it is not there, MismatchError when another store is at its location.
        """
        if number in self._stores:
            return self._stores[number]
        record = self.record(number)
        here = f"{self._location.uri} refers to samples of the store {record.uri} without a copy of them"
        try:
            options = self._location.storage_options if "://" in record.uri else {}
            store = self._open_store(record.uri, options)
        except UnknownNameError:
            raise UnknownNameError(
                f"{here}, and that store is not there; bring it back. While it is there, its samples can be copied: "
                "mopd store copy"
            ) from None
        except MopdError as error:
            raise type(error)(f"{here}: {error}") from error
        if store.uuid != record.uuid:
            raise MismatchError(
                f"{here}, and another store is there now ({store.uuid}, not {record.uuid}); move it away"
            )
        store.use_cache(self.cache)
        self._stores[number] = store
        return store

    def are_remote(self) -> bool:
        """Check if one of them is on an object store."""
        return any("://" in record.uri for record in self.all().values())
