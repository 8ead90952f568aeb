"""Tags are read and set beside processes that delete them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lance
import pyarrow as pa
import pytest

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.commit.clean_up import clean_up
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.tags import ATTEMPTS, drop_tag, set_tag, tagged


class Vanishing:
    """A dataset one of whose tags is deleted between the listing and the reading, `times` times in a row."""

    def __init__(self, dataset: lance.LanceDataset, times: int) -> None:
        self._dataset, self._left = dataset, times
        self.tags, self.uri = SimpleNamespace(list=self._list), dataset.uri

    def _list(self) -> dict[str, Any]:
        if self._left:
            self._left -= 1
            raise OSError("LanceError(IO): Object at location table/_refs/tags/student-3.json not found: Not found")
        return cast(dict[str, Any], self._dataset.tags.list())


@pytest.fixture
def dataset(tmp_path: Path) -> lance.LanceDataset:
    lance_dataset = lance.write_dataset(pa.table({"a": [1]}), str(tmp_path / "table"))
    set_tag(lance_dataset, "kept", 1)
    return lance_dataset


def test_a_tag_that_vanishes_between_the_listing_and_the_reading_is_passed_over(dataset: lance.LanceDataset) -> None:
    assert tagged(cast(lance.LanceDataset, Vanishing(dataset, 3))) == {"kept": 1}


def test_one_that_never_can_be_read_is_an_error_in_the_end(dataset: lance.LanceDataset) -> None:
    with pytest.raises((ValueError, OSError), match="Not found"):
        tagged(cast(lance.LanceDataset, Vanishing(dataset, 10 * ATTEMPTS)))


def test_a_tag_is_set_moved_and_dropped_once_or_twice(dataset: lance.LanceDataset) -> None:
    lance.write_dataset(pa.table({"a": [2]}), dataset.uri, mode="append")
    set_tag(dataset, "kept", 2)
    assert tagged(dataset) == {"kept": 2}
    for _ in range(2):
        drop_tag(dataset, "kept")
    assert tagged(dataset) == {}


def test_a_tag_that_a_power_cut_tore_is_no_tag_and_clean_up_deletes_it(dataset: lance.LanceDataset) -> None:
    torn = Path(dataset.uri) / "_refs" / "tags" / "torn.json"
    torn.write_bytes(b"")
    assert tagged(dataset) == {"kept": 1}
    set_tag(dataset, "torn", 1)
    assert tagged(dataset) == {"kept": 1, "torn": 1}
    torn.write_bytes(bytes(100))
    drop_tag(dataset, "kept")
    assert tagged(dataset) == {}


def test_clean_up_goes_on_past_a_torn_tag_unless_a_snapshot_needs_it(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    store.snapshot(tag="pinned")
    labels = store.table_handle("labels")
    tags = tmp_path / "s" / "labels" / "_refs" / "tags"
    (tags / "torn.json").write_bytes(b"")
    clean_up(store.location, "labels", labels.open(), labels.acknowledged(), now=True)
    assert [path.name for path in tags.iterdir()] == ["pinned.json"]
    (tags / "pinned.json").write_bytes(b"")
    with pytest.raises(DamagedError, match="snapshot pinned needs it; nothing was cleaned up"):
        clean_up(store.location, "labels", labels.open(), labels.acknowledged(), now=True)
