"""Keys of a table in memory: found wherever they were added, and only where the key itself is equal."""

from __future__ import annotations

from itertools import pairwise

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mopd_dataplane.store.commit import keys as keys_module
from mopd_dataplane.store.commit.keys import RATIO, KeyDirectory
from mopd_dataplane.store.format.row_ids import row_ids

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def rows_of(numbers: range) -> pa.Table:
    return pa.table({"uid": [f"{number * 7919 % 100_003:032x}" for number in numbers], "version": list(numbers)})


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, learns=st.booleans(), buckets=st.sampled_from([1, 5, 1 << 63]))
def test_every_key_is_found_at_its_row(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    learns: bool,
    buckets: int,
) -> None:
    """With as many different hashes as `buckets`: in one, every key collides with every other."""
    hashed = keys_module.hash_rows
    with monkeypatch.context() as patch:
        patch.setattr(keys_module, "hash_rows", lambda keys, names: hashed(keys, names) % np.uint64(buckets))
        uri, directory, end = str(tmp_path_factory.mktemp("keys") / "table"), KeyDirectory(("uid", "version")), 0
        for size in sizes:
            batch = rows_of(range(end, end + size))
            lance.write_dataset(batch, uri, mode="append" if end else "create", enable_stable_row_ids=True)
            dataset = lance.dataset(uri)
            if learns:
                directory.add(dataset, row_ids(dataset).ids()[end:], batch)
            end += size
            key_rows = rows_of(range(end + 3))
            expected = [*range(end), -1, -1, -1]
            assert directory.find(dataset, key_rows).tolist() == expected
        assert KeyDirectory(("uid", "version")).find(dataset, key_rows).tolist() == expected


def test_keys_lie_in_few_sorted_runs() -> None:
    directory, count = KeyDirectory(("uid",)), 3000
    for first in range(0, count, 3):
        batch = rows_of(range(first, first + 3))
        directory._extend(np.arange(first, first + 3), keys_module.hash_rows(batch, ["uid"]))
    lengths = [len(hashes) for hashes, _ in directory._runs]
    assert sum(lengths) == count
    assert all(longer >= RATIO * shorter for longer, shorter in pairwise(lengths))
    assert all((np.diff(hashes.astype(np.float64)) >= 0).all() for hashes, _ in directory._runs)
