"""Writers of a group whose object store answers late; `-s` prints how long they waited."""

import time
from pathlib import Path

import pytest
from objectservers import Mood, Server, bad_network

from mopd_dataplane.bench.commit_writers import measure
from mopd_dataplane.store.dataset import Store

WRITERS, SECONDS, FINISHED = 8, 4.0, 2
TURN_S = 0.2


@pytest.mark.slow
@pytest.mark.parametrize("delay_ms", [30, 100])
def test_writers_of_a_store_that_is_far_away_commit_every_sample_once(
    delay_ms: int, object_server: Server, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request of the writers and of the process that commits for them takes so much longer."""

    def late(method: str, path: str) -> Mood:
        time.sleep(delay_ms / 1000)
        return "pass"

    folder = tmp_path / "writers"
    folder.mkdir()
    with bad_network(object_server, late) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        figures = measure(folder, f"{s3}/store", WRITERS, SECONDS, FINISHED, group=True, per_process=4)
        print({name: round(value, 1) for name, value in figures.items()})
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_server.endpoint)
    store = Store.open(f"{s3}/store")
    uids = store.samples(["uid"])["uid"].to_pylist()
    assert len(uids) == len(set(uids)) == WRITERS * (1 + FINISHED * round(SECONDS / TURN_S))
    assert not store.verify().findings
