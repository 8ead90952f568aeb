"""Tokens, signals and metadata of a store on a real S3 server, read through the cache of a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest
from advice import advises
from objectservers import Mood, Server, bad_network

from mopd_dataplane.bench import far
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.errors import DamagedError, DeadlineError, MopdError
from mopd_dataplane.job import sections
from mopd_dataplane.load.client import LoaderClient
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.run import delete as deleting
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.remote import cached_files, objects
from mopd_dataplane.store.remote.cached_files import CachedFiles, FileIdentity
from mopd_dataplane.store.remote.file_server import FileServer
from mopd_dataplane.store.remote.range_cache import RangeCache

SAMPLES = 60
TEACHER = "adder"


def fill(uri: str | Path) -> Store:
    lengths = lengths_of(SAMPLES, mean_log=4.5, shortest=8, longest=400)
    signals = ("logprob", "topk")
    return make_store(uri, lengths, teachers=[TEACHER], signals=signals, batch=20, rewards=True)  # type: ignore[arg-type]


def plan_windows(store: Store, count: int) -> None:
    """Plan windows of all samples, each in another order."""
    for window in range(count):
        store.add_plan(
            build_window(
                plan_columns(store, [TEACHER]), sections.Plan(pack_tokens=512, batch_samples=8), seed=window,
                stage=STAGE, window=window, snapshot=store.snapshot(), teachers=[TEACHER],
            )
        )  # fmt: skip


@pytest.fixture
def store(s3: str) -> Store:
    return fill(s3)


Requests = list[tuple[str, str]]
"""Method and path of each."""


@contextmanager
def watched(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """Stores that are opened inside go through a proxy; the requests that it has seen."""
    requests: Requests = []

    def mood(method: str, path: str) -> Mood:
        requests.append((method, path))
        return "pass"

    with bad_network(server, mood) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield requests


def gets(requests: Requests) -> list[str]:
    """Paths of the files that were read, of which the proxy has not told yet."""
    paths = [path for method, path in requests if method == "GET" and "?" not in path]
    requests.clear()
    return paths


def read_all(store: Store, order: Any = range(SAMPLES)) -> list[Any]:
    """Everything that a loader reads of these samples, at the newest snapshot; checksums are compared."""
    snapshot, rows = store.snapshot(), np.asarray(order)
    tokens = store.read_tokens(rows, ["tokens", "logprobs", "loss_mask"], snapshot, verify=True).to_pylist()
    metadata = store.take_samples(rows, ["uid", "total_len"], snapshot).to_pylist()
    signals = [store.read_signal(TEACHER, kind, rows, snapshot, verify=True) for kind in ("logprob", "topk")]
    values = [np.concatenate([np.ravel(part) for part in sample]) for sample in zip(*signals[1:], strict=True)]
    rewards = store.table("rewards", ["sample_row", "reward"], snapshot=snapshot).to_pylist()
    return [tokens, metadata, [array.tolist() for array in signals[0]], [v.tolist() for v in values], rewards]


def through(store: Store, folder: Path, max_bytes: int = 1 << 30) -> Store:
    """The same store, opened again and read through a cache."""
    again = Store.open(store.uri)
    again.use_cache(RangeCache(folder, max_bytes))
    return again


def test_a_second_pass_reads_no_file_from_the_object_store(
    store: Store, object_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, reverse = read_all(store), read_all(store, range(SAMPLES)[::-1])
    with watched(object_server, monkeypatch) as requests:
        first = through(store, tmp_path / "cache")
        assert read_all(first) == expected
        files = [path for path in gets(requests) if "/data/" in path]
        assert len(files) == len(set(files)) > 10, "small files are fetched with one request each"

        assert read_all(first, range(SAMPLES)[::-1]) == reverse
        assert not [path for path in gets(requests) if "/data/" in path or "/_versions/" in path], "the next epoch"

        assert read_all(through(store, tmp_path / "cache"), range(SAMPLES)[::-1]) == reverse
        again = [path for path in gets(requests) if "/data/" in path]
        assert not again, "another process of the node, or the same after a restart"


def test_a_damaged_block_is_fetched_again(store: Store, tmp_path: Path) -> None:
    expected = read_all(store)
    read_all(through(store, tmp_path / "cache"))
    blocks = [path for path in (tmp_path / "cache").glob("*/*") if path.is_file()]
    for path in blocks:
        stored = bytearray(path.read_bytes())
        stored[len(stored) // 2] ^= 4
        path.write_bytes(stored)
    again = through(store, tmp_path / "cache")
    assert read_all(again) == expected
    assert again.cache is not None
    assert again.cache.stats()["damaged"] > 10
    after = through(store, tmp_path / "cache")
    assert read_all(after) == expected
    assert after.cache is not None
    assert after.cache.stats() | {"damaged": 0, "misses": 0} == after.cache.stats()


READER = """
import os, signal, sys
sys.path[:0] = sys.argv[3].split(os.pathsep)
import test_load_tables_s3 as tests
from pathlib import Path
from mopd_dataplane.base import fault_points
seen = []
def observe(point):
    seen.append(point)
    if point == sys.argv[4] and seen.count(point) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
fault_points.observe(observe)
store = tests.through(tests.Store.open(sys.argv[1]), Path(sys.argv[2]))
import json
print(json.dumps(tests.read_all(store)))
"""


def reader(store: Store, folder: Path, point: str = "") -> subprocess.Popen[str]:
    here = Path(__file__).parent
    arguments = [store.uri, str(folder), os.pathsep.join(map(str, (here, here.parents[1]))), point]
    return subprocess.Popen([sys.executable, "-c", READER, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("point", ["cache.begun", "cache.written"])
def test_a_reader_that_is_killed_while_it_fetches_leaves_nothing_half_read(
    store: Store, tmp_path: Path, point: str
) -> None:
    expected = read_all(store)
    assert reader(store, tmp_path / "cache", point).wait(120) == -signal.SIGKILL
    assert list((tmp_path / "cache").glob("*/.*")), "it died with a file half written"
    again = through(store, tmp_path / "cache")
    assert read_all(again) == expected
    assert again.cache is not None
    stats = again.cache.stats()
    assert stats["damaged"] == 0
    assert stats["hits"] > 0


@pytest.mark.slow
def test_processes_share_a_cache_while_both_fill_it(store: Store, tmp_path: Path) -> None:
    expected = read_all(store)
    processes = [reader(store, tmp_path / "cache") for _ in range(2)]
    answers = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(json.loads(answer) == json.loads(json.dumps(expected)) for answer in answers)
    third = through(store, tmp_path / "cache")
    assert read_all(third) == expected
    assert third.cache is not None
    # A process that waits for the other's lock for long does not cache that block.
    assert third.cache.stats()["hits"] > 10 * third.cache.stats()["misses"]


def test_a_cache_that_is_too_small_changes_nothing_but_speed(store: Store, tmp_path: Path) -> None:
    expected = read_all(store)
    small = through(store, tmp_path / "cache", 100_000)
    assert read_all(small) == read_all(small) == expected
    taken = sum(-(-path.stat().st_size // 4096) * 4096 for path in (tmp_path / "cache").glob("*/*"))
    assert 0 < taken <= 100_000


def test_deletions_merges_and_clean_up_are_those_of_the_snapshot(store: Store, tmp_path: Path) -> None:
    """Rows are deleted with a deletion file, as other programs do, and by the command; files are merged and removed."""
    pinned = store.snapshot(tag="before")
    reading = through(store, tmp_path / "cache")
    before = reading.read_tokens(range(SAMPLES), ["tokens"], pinned).to_pylist()
    lance.dataset(store.dataset("rewards").uri, storage_options=store.location.storage_options).delete("sample_row = 3")
    left = set(range(SAMPLES)) - {3}
    assert set(reading.table("rewards", ["sample_row"], snapshot=reading.snapshot())["sample_row"].to_pylist()) == left
    gone = store.take_samples([5], ["uid"])["uid"][0].as_py()
    store.compact(now=True)
    assert reading.read_tokens(range(SAMPLES), ["tokens"], pinned).to_pylist() == before, "an old version"
    assert through(store, tmp_path / "cache").read_tokens(range(SAMPLES), ["tokens"], pinned).to_pylist() == before
    where = f"uid = '{gone}'"
    list(deleting.delete(store, deleting.preview(store, where)[0], where))
    rest = [row for row in range(SAMPLES) if row != 5]
    tokens = through(store, tmp_path / "cache").read_tokens(rest, ["tokens"], verify=True).to_pylist()
    assert tokens == [before[row] for row in rest]
    with pytest.raises(MopdError):
        reading.read_tokens([5], ["tokens"])


def test_a_store_made_anew_at_the_same_place_is_not_read_from_the_cache(s3: str, tmp_path: Path) -> None:
    first = fill(s3)
    read_all(through(first, tmp_path / "cache"))
    assert first.files is not None
    first.files.remove([name for name, _ in first.files.identities()])
    lengths = lengths_of(SAMPLES, mean_log=4.0, shortest=8, longest=300, seed=9)
    second = make_store(s3, lengths, teachers=[TEACHER], signals=("logprob", "topk"), batch=20, rewards=True)  # type: ignore[arg-type]
    assert read_all(through(second, tmp_path / "cache")) == read_all(second)


def test_a_server_that_does_not_answer_is_a_deadline(
    store: Store, object_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(objects, "MAX_RETRIES", 0)
    cut = {"on": False}
    with bad_network(object_server, lambda method, path: "cut" if cut["on"] else "pass") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        again = through(store, tmp_path / "cache")
        tokens, snapshot = again.dataset("tokens", again.snapshot()), again.snapshot()
        assert tokens.count_rows() == SAMPLES
        again.take_samples(range(SAMPLES), ["uid", "payload_row", "payload_crc"], snapshot)
        cut["on"] = True
        with pytest.raises(DeadlineError, match="the object store says 504"):
            again.read_tokens(range(SAMPLES), ["tokens"], snapshot)
        cut["on"] = False
        assert len(again.read_tokens(range(SAMPLES), ["tokens"], snapshot)) == SAMPLES


def test_a_file_that_is_gone_is_damage(store: Store, tmp_path: Path) -> None:
    assert store.files is not None
    store.files.remove(store.files.under("tokens/data"))
    with pytest.raises(DamagedError):
        through(store, tmp_path / "cache").read_tokens(range(SAMPLES), ["tokens"])


def test_other_users_of_the_machine_cannot_read_from_the_server(store: Store, tmp_path: Path) -> None:
    assert store.files is not None
    server = FileServer(store.files, RangeCache(tmp_path / "cache", 1 << 20))
    url = f"{server.storage_options['aws_endpoint']}/{server.uri.removeprefix('s3://')}/store.json"
    key = server.storage_options["aws_access_key_id"]
    for credential in ("", f"AWS4-HMAC-SHA256 Credential={key[:-1]}/day", "Credential=/"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": credential}), timeout=30)
    good = urllib.request.Request(url, headers={"Authorization": f"AWS4-HMAC-SHA256 Credential={key}/day"})
    with urllib.request.urlopen(good, timeout=30) as reply:
        assert reply.read() == store.files.read("store.json")
    for method, path in (("GET", "/other/x/store.json"), ("GET", "/bucket?list-type=2"), ("PUT", "/bucket/x/a")):
        request = urllib.request.Request(server.storage_options["aws_endpoint"] + path, method=method)
        request.add_header("Authorization", good.headers["Authorization"])
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=30)
    server.close()


@pytest.mark.parametrize(
    "environment",
    [
        {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"},
        {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_ENDPOINT": "http://127.0.0.1:9"},
        {"AWS_SKIP_SIGNATURE": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true", "AWS_SESSION_TOKEN": "token"},
        {"AWS_DEFAULT_REGION": "nowhere", "AWS_UNSIGNED_PAYLOAD": "true", "AWS_S3_EXPRESS": "true"},
    ],
)
def test_the_environment_of_the_object_store_does_not_matter_to_the_server(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str]
) -> None:
    snapshot, again = store.snapshot(), Store.open(store.uri)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "example.com")
    assert again.files is not None
    again.use_cache(RangeCache(tmp_path / "cache", 1 << 30))
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "example.com,127.0.0.1"
    assert again.location.open_dataset("samples", snapshot.versions["samples"]).count_rows() == SAMPLES


class FakeFiles:
    """One file of an object store; reads wait for a signal."""

    uri = "s3://bucket/x"

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.reads: list[tuple[int, int]] = []
        self.go = threading.Event()

    def read_range(self, name: str, start: int, nbytes: int) -> memoryview:
        self.reads.append((start, nbytes))
        assert self.go.wait(60)
        return memoryview(self.content)[start : start + nbytes]


def test_blocks_are_fetched_once_however_many_threads_need_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cached_files, "BLOCK_BYTES", 1000)
    files = FakeFiles(np.random.default_rng(0).bytes(20_500))
    cached = CachedFiles(files, RangeCache(tmp_path / "cache", 1 << 20))  # type: ignore[arg-type]
    identity = FileIdentity("etag", len(files.content))
    bounds = [(0, 20_500), (10, 11), (999, 1001), (1000, 2000), (20_000, 20_500), (3500, 20_499), (7, 7)]
    answers: dict[tuple[int, int], bytes] = {}

    def read(start: int, end: int) -> None:
        answers[start, end] = bytes(cached.read("f", identity, start, end))

    threads = [threading.Thread(target=read, args=bound) for bound in bounds]
    for thread in threads:
        thread.start()
    files.go.set()
    for thread in threads:
        thread.join(60)
    assert answers == {(start, end): files.content[start:end] for start, end in bounds}
    fetched = [block for start, nbytes in files.reads for block in range(start // 1000, -(-(start + nbytes) // 1000))]
    assert sorted(fetched) == list(range(21)), "each block once"
    assert max(nbytes for _, nbytes in files.reads) <= 1000 * cached_files.REQUEST_BLOCKS
    files.content = files.content[:5000]
    with pytest.raises(FileNotFoundError, match="ends before byte"):
        cached.read("f", FileIdentity("other", 20_500), 0, 20_500)
    files.content = bytes(20_500)
    assert bytes(cached.read("f", FileIdentity("other", 20_500), 10, 20)) == bytes(10), "a failure is not remembered"
    cached.close()


def batches_of(client: LoaderClient, window: int) -> list[list[dict[str, Any]]]:
    names = ("tokens", "sampler_logprobs", "loss_mask", "cu_seqlens", "rewards", "advantages", "sample_rows")
    taken = []
    for batch in client.batches(STAGE, window):
        taken.append([{name: np.array(getattr(pack, name)) for name in names} for pack in batch.packs])
        batch.release()
    return taken


def test_two_nodes_get_the_batches_of_a_local_store(store: Store, tmp_path: Path) -> None:
    """Each node has its own loader and its own cache folder, and reads two windows of the same samples."""
    local = fill(tmp_path / "local")
    for own in (store, local):
        plan_windows(own, 2)

    def batches(uri: str, cache: str) -> list[list[list[list[dict[str, Any]]]]]:
        result = []
        with ExitStack() as stack:
            clients = []
            for rank in range(2):
                folder = tmp_path / f"{cache}-{rank}"
                spec = LoadSpec(
                    stage=STAGE, where="reward > 0.2", signals=("logprob", "topk"), rewards=True, slots=2,
                    cache_dir=str(folder), deadline_s=60,
                )  # fmt: skip
                stack.enter_context(start_server(uri, folder.with_suffix(".s"), spec))
                client = LoaderClient(folder.with_suffix(".s"), rank=rank, world_size=2, views="numpy")
                clients.append(stack.enter_context(client))
            for client in clients:
                result.append([batches_of(client, window) for window in range(2)])
        return result

    expected, remote = batches(str(tmp_path / "local"), "none"), batches(store.uri, "node")
    assert [len(step) for step in expected[0][0]]
    np.testing.assert_equal(remote, expected)
    assert all(any((tmp_path / f"node-{rank}" / "ranges").glob("*/*")) for rank in range(2))


@pytest.mark.slow
def test_the_benchmark_counts_what_each_epoch_requests(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.example.com")
    with advises("requests to an http:// server alone can be delayed; set"):
        far.measure(s3, 64, delays_ms=[1.0], folder=tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr(far, "LONGEST", 256)
    rows = far.measure(s3, 64, delays_ms=[1.0], folder=tmp_path)
    assert os.environ["AWS_ENDPOINT_URL"] == endpoint
    assert [(row["loader"], row["epoch"]) for row in rows] == [
        (name, epoch) for name in ("no cache", "empty cache", "full cache, new process") for epoch in (1, 2)
    ]
    assert len({row["tokens"] for row in rows}) == 1
    assert rows[2]["GETs of files"] > 2 * max(row["GETs of files"] for row in rows[3:])
    assert not list(tmp_path.iterdir())
