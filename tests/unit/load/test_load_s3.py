"""Hidden states of a store on a real S3 server: read by range, kept on the node, and not asked for again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from objectservers import Mood, Server, bad_network

from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.errors import DamagedError, DeadlineError
from mopd_dataplane.job import sections
from mopd_dataplane.load.client import LoaderClient
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.hidden import PACKED, HiddenReader
from mopd_dataplane.store.remote import objects, sidecars
from mopd_dataplane.store.remote.range_cache import RangeCache

SAMPLES = 12
ROW_BYTES = 512


@pytest.fixture
def store(s3: str) -> Store:
    lengths = lengths_of(SAMPLES, mean_log=4.5, shortest=8, longest=400)
    return make_store(s3, lengths, teachers=["adder"], signals=("hidden",), row_bytes=ROW_BYTES)  # type: ignore[arg-type]


@contextmanager
def counting(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """Everything goes through a proxy; requests since the last call whose path contains a text."""
    seen: list[str] = []
    lock = threading.Lock()

    def mood(method: str, path: str) -> Mood:
        with lock:
            seen.append(path)
        return "pass"

    def count(text: str) -> int:
        with lock:
            matches = sum(text in path for path in seen)
            seen.clear()
        return matches

    with bad_network(server, mood) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield count


def read_all(reader: HiddenReader, rows: list[int], sizes: list[int]) -> bytes:
    target = bytearray(sum(sizes))
    reader.read_whole(rows, sizes, memoryview(target))
    return bytes(target)


def places_of(store: Store) -> tuple[list[int], list[int]]:
    signal_rows = store.signal_rows("adder", "hidden", range(SAMPLES))
    return signal_rows["payload_row"].to_pylist(), signal_rows["bytes"].to_pylist()


def test_a_second_pass_asks_the_object_store_for_nothing(
    store: Store, object_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sidecars, "PIECE", 4096)  # several requests a sample, as long ones have
    expected = b"".join(part.tobytes() for part in store.read_signal("adder", "hidden", range(SAMPLES), verify=True))
    rows, sizes = places_of(store)
    with counting(object_server, monkeypatch) as count:
        again = Store.open(store.uri)
        again.cache = RangeCache(tmp_path / "cache", 1 << 30)
        reader = again.hidden_reader("adder")
        assert read_all(reader, rows, sizes) == expected
        kinds = {name.rsplit(".", 1)[1] for name, file in reader._files.items() if file is not None}
        assert kinds == {"blob", "lance"}, "packed and small samples, none of them through Lance"
        assert count("/data/") > sum(sizes) // 4096
        assert again.cache.stats()["misses"] == SAMPLES

        assert read_all(reader, rows[::-1], sizes[::-1]) != expected
        assert read_all(reader, rows, sizes) == expected
        assert count("") == 0, "the next epoch"
        assert again.cache.stats()["hits"] == 2 * SAMPLES

        another = Store.open(store.uri)
        another.cache = RangeCache(tmp_path / "cache", 1 << 30)
        fresh = another.hidden_reader("adder")
        count("")
        assert read_all(fresh, rows, sizes) == expected
        assert count("/data/") <= 20 * len(fresh._files), "the next process asks which files they are"
        assert another.cache.stats() | {"misses": 0, "hits": SAMPLES} == another.cache.stats()


def packed_of(store: Store) -> tuple[list[int], list[int]]:
    """Rows and sizes of the samples that lie in a file of their own kind, which Lance itself does not parse."""
    rows, sizes = places_of(store)
    kinds = store.dataset("signals/adder/hidden").take(rows, columns=["hidden"])["hidden"].to_pylist()
    chosen = [index for index, kind in enumerate(kinds) if kind["kind"] == PACKED]
    return [rows[index] for index in chosen], [sizes[index] for index in chosen]


def test_a_file_that_was_made_anew_is_not_taken_from_the_cache(store: Store, tmp_path: Path) -> None:
    store.cache = RangeCache(tmp_path / "cache", 1 << 30)
    rows, sizes = packed_of(store)
    reader = store.hidden_reader("adder")
    old = read_all(reader, rows, sizes)
    assert store.files is not None
    [file] = reader._files.values()
    content = store.files.read(file.name)
    assert content is not None
    store.files.write(file.name, bytes(byte ^ 1 for byte in content))
    assert read_all(store.hidden_reader("adder"), rows, sizes) == bytes(byte ^ 1 for byte in old)


def test_a_damaged_range_is_fetched_again(store: Store, tmp_path: Path) -> None:
    store.cache = RangeCache(tmp_path / "cache", 1 << 30)
    rows, sizes = places_of(store)
    reader = store.hidden_reader("adder")
    expected = read_all(reader, rows, sizes)
    for file in (tmp_path / "cache").glob("*/*"):
        stored = bytearray(file.read_bytes())
        stored[-1] ^= 1
        file.write_bytes(stored)
    assert read_all(reader, rows, sizes) == expected
    assert store.cache.stats()["damaged"] == SAMPLES
    assert read_all(reader, rows, sizes) == expected
    assert store.cache.stats()["hits"] == SAMPLES


def test_a_file_that_ends_early_is_damage(store: Store) -> None:
    rows, sizes = packed_of(store)
    reader = store.hidden_reader("adder")
    read_all(reader, rows[:1], sizes[:1])
    assert store.files is not None
    [name] = {file.name for file in reader._files.values()}
    store.files.write(name, b"much less")
    with pytest.raises(DamagedError, match=r"bytes from byte 0: the file ends before"):
        read_all(reader, rows, sizes)


def test_a_server_that_is_gone_is_a_deadline_and_no_request_is_left_behind(
    store: Store, object_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MAX_RETRIES", 0)
    monkeypatch.setattr(sidecars, "PIECE", 4096)
    rows, sizes = places_of(store)
    cut = {"on": False}
    with bad_network(object_server, lambda method, path: "cut" if cut["on"] else "pass") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        again = Store.open(store.uri)
        reader = again.hidden_reader("adder")
        expected = read_all(reader, rows, sizes)
        cut["on"] = True
        target = bytearray(sum(sizes))
        with pytest.raises(DeadlineError, match="object store does not answer"):
            reader.read_whole(rows, sizes, memoryview(target))
        cut["on"] = False
        left = bytes(target)
        assert read_all(reader, rows, sizes) == expected
        assert bytes(target) == left, "nothing writes to memory that was given back"


def test_epochs_of_a_loader_on_s3_fetch_each_sample_once(store: Store, tmp_path: Path) -> None:
    """Two windows of the same samples, then another loader process; the states are those of the store every time."""
    states = store.read_signal("adder", "hidden", range(SAMPLES))
    for window in range(2):
        store.add_plan(
            build_window(
                plan_columns(store, ["adder"]), sections.Plan(pack_tokens=512, batch_samples=4), seed=window,
                stage=STAGE, window=window, snapshot=store.snapshot(), teachers=["adder"],
            )
        )  # fmt: skip
    spec = LoadSpec(stage=STAGE, signals=("hidden",), slots=2, cache_dir=str(tmp_path / "cache"), deadline_s=30)
    for process in range(2):
        with start_server(store.uri, tmp_path / "s", spec), LoaderClient(tmp_path / "s", views="numpy") as client:
            for window in range(2):
                seen = 0
                for batch in client.batches(STAGE, window):
                    for pack in batch.packs:
                        expected = np.concatenate([states[row] for row in pack.sample_rows.tolist()])
                        np.testing.assert_array_equal(pack.hidden, expected)
                        seen += len(pack.sample_rows)
                    batch.release()
                assert seen == SAMPLES
            cache_stats = client.stats()["cache"]
            assert cache_stats["hits"] >= (2 - (not process)) * SAMPLES
            assert cache_stats["misses"] == 0 if process else cache_stats["misses"] >= SAMPLES
            assert cache_stats["bytes"] <= cache_stats["max_bytes"]
