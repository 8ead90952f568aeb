"""Creation, format versions and schemas: what does not match is refused and nothing is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
import store_builders as build

from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import PRIMARY_KEY, lance_schema
from mopd_dataplane.tables import FORMAT_VERSION, SAMPLES, SIGNALS, TABLES


def files_of(root: Path) -> dict[str, tuple[int, int]]:
    """Every file under a folder with its size and modification time."""
    return {str(p.relative_to(root)): (p.stat().st_size, p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file()}


def test_create_makes_every_table_with_the_pinned_format(store: Store) -> None:
    assert store.root is not None
    for name, spec in TABLES.items():
        dataset = lance.dataset(str(store.root / name))
        assert dataset.data_storage_version == spec.storage
        assert dataset.schema.metadata[b"mopd:format_version"] == str(FORMAT_VERSION).encode()
        assert dataset.schema.names == spec.stored.names
        assert [f.name for f in dataset.schema if PRIMARY_KEY in (f.metadata or {})] == [
            f.name for f in spec.schema if f.name in spec.key
        ]
    assert json.loads((store.root / "store.json").read_text())["format_version"] == FORMAT_VERSION
    assert oct(store.root.stat().st_mode)[-3:] == "700"


def test_create_again_opens_and_changes_nothing(store: Store) -> None:
    assert store.root is not None
    before = files_of(store.root)
    Store.create(store.uri)
    assert files_of(store.root) == before


def test_open_without_a_store_names_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="create_store"):
        Store.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_creation_killed_halfway_is_finished_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from mopd_dataplane.store.commit import table\n"
        "from mopd_dataplane.store.dataset import Store\n"
        "real = table.Table.create\n"
        "def create(self):\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if self.name == 'scores' else real(self)\n"
        "table.Table.create = create; Store.create(sys.argv[1])"
    )
    uri = tmp_path / "store"
    assert subprocess.run([sys.executable, "-c", code, str(uri)], timeout=60).returncode == -signal.SIGKILL
    with pytest.raises(UnknownNameError):
        Store.open(uri)
    store = Store.create(uri)
    assert store.commit_samples([build.sample(0)]).inserted == 1


def test_a_store_of_a_newer_format_is_refused_naming_both(store: Store) -> None:
    assert store.root is not None
    mark = unseal((store.root / "store.json").read_bytes(), "store.json")
    (store.root / "store.json").write_bytes(seal(mark | {"format_version": FORMAT_VERSION + 1}))
    before = files_of(store.root)
    for attempt in (Store.open, Store.create):
        with pytest.raises(MismatchError, match=f"version {FORMAT_VERSION + 1}, this version reads {FORMAT_VERSION}"):
            attempt(store.uri)
    assert files_of(store.root) == before


def test_a_table_of_a_newer_format_is_refused_before_a_write(store: Store) -> None:
    assert store.root is not None
    lance.dataset(str(store.root / "samples")).update_schema_metadata({"mopd:format_version": "7"})
    before = files_of(store.root / "samples") | files_of(store.root / "tokens")
    with pytest.raises(MismatchError, match="format version 7"):
        Store.open(store.uri).commit_samples([build.sample(0)])
    assert files_of(store.root / "samples") | files_of(store.root / "tokens") == before


def renamed(schema: pa.Schema) -> pa.Schema:
    return schema.set(0, schema.field(0).with_name("id"))


def other_type(schema: pa.Schema) -> pa.Schema:
    index = schema.get_field_index("prompt_len")
    return schema.set(index, schema.field(index).with_type(pa.int64()))


def nullable(schema: pa.Schema) -> pa.Schema:
    return schema.set(1, schema.field(1).with_nullable(True))


def extra(schema: pa.Schema) -> pa.Schema:
    return schema.append(pa.field("surprise", pa.int32(), nullable=False))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed, "'uid' is missing"),
        (other_type, "'prompt_len' is int64 not null, expected int32 not null"),
        (nullable, "'prompt_id' is string, expected string not null"),
        (extra, "'surprise' is not known and not nullable"),
    ],
)
def test_other_columns_are_refused(store: Store, change: object, said: str) -> None:
    assert store.root is not None
    other = change(lance_schema(SAMPLES, "samples"))  # type: ignore[operator]
    lance.write_dataset(other.empty_table(), str(store.root / "samples"), mode="overwrite", data_storage_version="2.2")
    with pytest.raises(MismatchError, match=said):
        Store.open(store.uri).commit_samples([build.sample(0)])
    assert store.dataset("tokens").count_rows() == 0


def test_additive_evolution_both_ways(store: Store) -> None:
    """A newer writer's nullable column is carried; one that an older store lacks is added by the first write."""
    assert store.root is not None
    lance.dataset(str(store.root / "samples")).add_columns(pa.field("mood", pa.string()))
    lance.dataset(str(store.root / "samples")).drop_columns(["mean_logprob"])
    reopened = Store.open(store.uri)
    assert reopened.commit_samples([build.sample(0)]).inserted == 1
    row = reopened.samples().to_pylist()[0]
    assert row["mood"] is None
    assert row["uid"] == build.sample(0).uid
    assert row["mean_logprob"] is not None


def test_a_store_from_before_a_column_is_read_verified_and_written(store: Store) -> None:
    """Sampling masks came to `tokens` and `samples` later: what was stored before has none, and keeps its checksum."""
    assert store.root is not None
    store.commit_samples([build.sample(0)])
    lance.dataset(str(store.root / "tokens")).drop_columns(["sampling_mask_sizes", "sampling_mask_ids"])
    lance.dataset(str(store.root / "samples")).drop_columns(["sampling_mask_len"])
    old = Store.open(store.uri)
    snapshot = old.snapshot()
    assert not old.has_column("samples", "sampling_mask_len", snapshot)
    assert old.verify().ok
    assert old.read_tokens([0], verify=True)["uid"].to_pylist() == [build.sample(0).uid]
    sample = build.sample(1, loss_mask=np.ones(20, np.uint8))
    sample.sampling_mask_sizes, sample.sampling_mask_ids = np.ones(20, np.int32), sample.tokens[5:]
    old.commit_samples([sample])
    assert old.samples(["sampling_mask_len"])["sampling_mask_len"].to_pylist() == [None, 20]
    assert old.read_tokens([0, 1], verify=True)["sampling_mask_ids"].to_pylist() == [None, sample.tokens[5:].tolist()]
    assert old.read_tokens([0], snapshot=snapshot, verify=True).num_rows == 1
    assert old.verify().ok


def test_names_are_checked_before_any_file_is_touched(store: Store) -> None:
    for name in (
        "../x",
        "signals/../../etc/logprob",
        "signals/-rf/logprob",
        "signals/a b/logprob",
        "signals/t/depth",
        "signals/" + "x" * 65 + "/topk",
        "sample",
        "signals/t/logprob/x",
        "signals/\u202et/logprob",
    ):
        with pytest.raises(UnknownNameError):
            store.dataset(name)


def test_every_table_has_documented_columns() -> None:
    for spec in [*TABLES.values(), *SIGNALS.values()]:
        assert spec.doc
        assert all(field.metadata[b"doc"] for field in spec.schema), spec.name
        assert all(not spec.schema.field(name).nullable for name in spec.key), spec.name


def test_importing_the_package_loads_neither_lance_nor_torch() -> None:
    code = "import sys, mopd_dataplane; assert not {'lance', 'torch', 'duckdb'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))
