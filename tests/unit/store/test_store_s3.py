"""Stores on a real S3 server: committers that race and die, a server that dies, credentials that stay secret."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import store_builders as build
from objectservers import KEY, SECRET, Mood, Server, bad_network, rclone, seaweedfs

from mopd_dataplane.errors import DeadlineError, InputError, ResourceError, UnknownNameError
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.remote import objects
from mopd_dataplane.store.remote.network import network_failure

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server this test may kill; its credentials are in the environment."""
    server = seaweedfs(tmp_path / "own")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    try:
        server.start_with_bucket()
        yield server
    finally:
        server.kill()


@pytest.mark.slow
def test_a_store_on_s3_keeps_what_it_is_given(s3: str) -> None:
    store = Store.create(s3)
    samples = [build.sample(i) for i in range(6)]
    assert store.commit_samples(samples).inserted == 6
    store.add_teacher(build.teacher("t"))
    for kind in ("logprob", "hidden"):
        assert store.commit_signals("t", kind, [build.signal(s, i, kind) for i, s in enumerate(samples)]) == 6
    again = Store.open(s3)
    assert again.commit_samples(samples).inserted == 0
    assert again.read_tokens(np.arange(6), verify=True).num_rows == 6
    assert np.array_equal(again.read_signal("t", "hidden", [4])[0], build.signal(samples[4], 4, "hidden").hidden)
    snapshot = store.snapshot(tag="plan-0")
    assert again.snapshot(tag="plan-0") == snapshot
    assert again.sql("select count(*) as n from samples join scores using (uid)").to_pylist() == [{"n": 12}]
    again.compact()
    again.release("plan-0")
    [missing] = again.verify().findings
    assert missing.problem == "head file heads/t.safetensors is missing"


@pytest.mark.slow
def test_committers_that_race_and_one_that_is_killed_lose_nothing(
    s3: str, start_child: Start, answer_of: Callable[..., dict[str, int]]
) -> None:
    store = Store.create(s3)
    killed = start_child(s3, "--samples", 0, 16, "--batch", 4, "--die-at", "samples.insert.written", "--on", 2)
    others = [start_child(s3, "--samples", 8 * i, 8 * i + 16, "--batch", 4) for i in (1, 2)]
    inserted = [answer_of(child)["inserted"] for child in others]
    assert answer_of(killed) == {}
    missing = store.commit_samples([build.sample(i) for i in range(32)]).inserted
    assert sum(inserted) >= 16
    assert missing > 0
    assert sorted(store.samples(["uid"])["uid"].to_pylist()) == sorted(build.sample(i).uid for i in range(32))
    assert store.verify().findings == []


def test_a_server_that_ignores_preconditions_takes_one_writer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = rclone(tmp_path / "rclone")
    server.start()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ResourceError, match=r"ignores If-None-Match.*single_writer"):
            Store.create("s3://bucket/run")
        assert [path for path in (server.folder / "data").rglob("*") if path.is_file()] == []
        promised = Store.create("s3://bucket/run", single_writer=True)
        assert promised.add_prompts([]) == 0
        assert Store.open("s3://bucket/run").read_json("store.json")["single_writer"] is True
    finally:
        server.kill()


@pytest.mark.slow
def test_a_server_that_dies_ends_in_a_clear_error_and_loses_nothing(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"client_max_retries": "1", "client_retry_timeout": "2", "connect_timeout": "1s", "timeout": "5s"}
    monkeypatch.setattr(objects, "MAX_RETRIES", 1)
    store = Store.create("s3://bucket/run", quick)
    first, second = [build.sample(i) for i in range(4)], [build.sample(i) for i in range(4, 8)]
    store.commit_samples(first)
    own_server.kill()
    for work in (
        lambda: store.commit_samples(second),
        lambda: Store.open("s3://bucket/run", quick),
    ):
        with pytest.raises(DeadlineError, match=r"object store does not answer.*run the same command again") as caught:
            work()
        assert SECRET not in str(caught.value)
    own_server.start()
    assert wait_for(lambda: store.commit_samples(second).inserted) == 4
    assert store.verify().findings == []
    assert sorted(store.samples(["uid"])["uid"].to_pylist()) == sorted(s.uid for s in first + second)


def wait_for(work: Callable[[], int]) -> int:
    """What `work` returns once the restarted server has its parts together again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return work()
        except (DeadlineError, ResourceError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["throttle", "cut", "lose reply"])
def test_a_bad_network_loses_and_doubles_nothing(
    s3: str, object_server: Server, monkeypatch: pytest.MonkeyPatch, trouble: Mood
) -> None:
    """Every third request meets trouble; or the first reply to the PUT of every single object is lost."""
    Store.create(s3)
    request_counts = {"all": 0, "troubled": 0}
    seen: set[str] = set()

    def mood(method: str, path: str) -> Mood:
        request_counts["all"] += 1
        fresh = method == "PUT" and path not in seen
        seen.add(path)
        if not (fresh if trouble == "lose reply" else request_counts["all"] % 3 == 0):
            return "pass"
        request_counts["troubled"] += 1
        return trouble

    with bad_network(object_server, mood) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store = Store.open(s3)
        inserted = [store.commit_samples([build.sample(i)]).inserted for i in range(4)]
        store.write_json("note.json", {"kept": True})
        assert store.read_json("note.json") == {"kept": True}
    assert request_counts["troubled"] > 3
    assert inserted == [1, 1, 1, 1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_server.endpoint)
    again = Store.open(s3)
    assert again.samples(["uid"])["uid"].to_pylist() == [build.sample(i).uid for i in range(4)]
    assert again.verify().findings == []


def test_refused_credentials_are_named_and_not_shown(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-0815")
    for work in (lambda: Store.open(s3), lambda: Store.create(s3)):
        with pytest.raises(InputError, match=r"refuses these credentials \(403 SignatureDoesNotMatch\)") as caught:
            work()
        assert not {"wrong-secret-0815", KEY, SECRET} & set(str(caught.value).replace("/", " ").split())
        assert caught.value.__cause__ is None


def test_a_uri_with_credentials_is_refused_and_not_repeated() -> None:
    for uri in ("s3://AKIA:hunter2@bucket/run", "s3://bucket/run?aws_secret_access_key=hunter2"):
        with pytest.raises(InputError, match="must not carry credentials") as caught:
            Store.open(uri)
        assert "hunter2" not in str(caught.value)


def test_no_store_and_no_object_store() -> None:
    with pytest.raises(InputError, match="no store can be at gopher://"):
        Store.open("gopher://bucket/run")


def test_an_empty_place_has_no_store(s3: str) -> None:
    with pytest.raises(UnknownNameError, match="no store at"):
        Store.open(s3)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("Error performing PUT http://h/b in 1s, after 8 retries - Server returned non-2xx status code: 503 Slow Down: "
         "<Error><Code>SlowDown</Code></Error>", DeadlineError, "says 503 SlowDown after 8 retries"),
        ("Error performing GET http://h/b - HTTP error: error sending request", DeadlineError, "does not answer"),
        ("Error performing PUT http://h/b - Server returned non-2xx status code: 404 Not Found: "
         "<Error><Code>NoSuchBucket</Code></Error>", UnknownNameError, "no such bucket"),
        ("the credential provider was not enabled", InputError, "no credentials"),
    ],
)  # fmt: skip
def test_what_the_network_says_is_told_apart(text: str, kind: type[Exception], said: str) -> None:
    failure = network_failure("s3://b/run", OSError(text))
    assert type(failure) is kind
    assert said in str(failure)
    assert network_failure("s3://b/run", OSError("Encountered internal error: bad magic")) is None
