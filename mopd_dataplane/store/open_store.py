"""The part of Store that functions over a whole store use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import lance
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from mopd_dataplane.records import Prompt, Snapshot
    from mopd_dataplane.store.commit.table import Table
    from mopd_dataplane.store.location import StoreLocation
    from mopd_dataplane.store.maintain.deletion_records import Deletions
    from mopd_dataplane.store.read.fragment_bounds import ColumnRange
    from mopd_dataplane.store.read.hidden import HiddenReader
    from mopd_dataplane.store.remote.objects import ObjectFiles


class OpenStore(Protocol):
    """An open store; every method is that of Store."""

    location: StoreLocation
    uri: str
    root: Path | None
    files: ObjectFiles | None
    deletions: Deletions

    def names(self) -> list[str]: ...

    def dataset(self, name: str, snapshot: Snapshot | None = None) -> lance.LanceDataset: ...

    def table_handle(self, name: str) -> Table: ...

    def has_column(self, name: str, column: str, snapshot: Snapshot | None = None) -> bool: ...

    def table(
        self,
        name: str,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        snapshot: Snapshot | None = None,
        limit: int | None = None,
    ) -> pa.Table: ...

    def scan_samples(
        self,
        columns: Sequence[str],
        snapshot: Snapshot | None = None,
        *,
        first: int = 0,
        limit: int | None = None,
        within: ColumnRange | None = None,
    ) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]: ...

    def sql(self, query: str, snapshot: Snapshot | None = None) -> pa.Table: ...

    def read_json(self, name: str) -> dict[str, Any] | None: ...

    def write_json(self, name: str, value: dict[str, Any]) -> None: ...

    def prompts(self, split: str | None = None, domains: Iterable[str] | None = None) -> list[Prompt]: ...

    def own_hidden_reader(self, teacher: str, snapshot: Snapshot | None = None) -> HiddenReader: ...
