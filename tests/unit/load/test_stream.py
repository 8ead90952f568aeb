"""A stream of batches: five lines for any trainer, exact resume, and a loader that comes and goes by itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.errors import DeadlineError, InputError, QueryError
from mopd_dataplane.job import sections
from mopd_dataplane.load.client import LoadedBatch
from mopd_dataplane.load.launch import is_served, start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.load.stream import BatchStream, socket_of
from mopd_dataplane.plan.follow import end_window
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.store.dataset import Store

TEACHERS = ["adder", "speller"]
SPEC = LoadSpec(stage=STAGE, slots=2, deadline_s=20)
Seen = list[tuple[int, int, list[int]]]


def add_window(store: Store, window: int) -> None:
    plan = build_window(
        plan_columns(store, TEACHERS), sections.Plan(pack_tokens=512, batch_samples=8), seed=window, stage=STAGE,
        window=window, snapshot=store.snapshot(), teachers=TEACHERS,
    )  # fmt: skip
    store.add_plan(plan)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two windows and the end of the log."""
    root = tmp_path_factory.mktemp("stream") / "s"
    planned_store = make_store(root, lengths_of(24, mean_log=4.5, shortest=4, longest=400), teachers=TEACHERS)
    add_window(planned_store, 0)
    add_window(planned_store, 1)
    planned_store.add_plan(end_window(STAGE, 2, 0, planned_store.snapshot()))
    return planned_store


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def served(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a loader that outlives its trainers."""
    path = tmp_path_factory.mktemp("served") / "l.sock"
    with start_server(store.uri, path, SPEC), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as anchor:
        anchor.connect(str(path))
        yield path


def stream_of(store: Store, path: Path | None = None, **options) -> BatchStream:
    return BatchStream(store.uri, SPEC, socket=path, views="numpy", environment={}, **options)


def read(stream: BatchStream, limit: int = 1000) -> Seen:
    """(window, step, tokens of the first pack) of the next batches."""
    seen = []
    for batch in stream:
        seen.append((batch.window, batch.step, batch.packs[0].tokens.tolist()))
        if len(seen) == limit:
            break
    return seen


def test_it_walks_every_window_and_ends_where_the_log_is_closed(store, served):
    with stream_of(store, served) as stream:
        seen = read(stream)
        assert [window for window, _, _ in seen] == sorted(window for window, _, _ in seen)
        assert {window for window, _, _ in seen} == {0, 1}
        assert [step for _, step, _ in seen] == list(range(len(seen))), "steps count over windows"
        assert read(stream) == [], "a second loop goes on where the first ended"
    with stream_of(store, served, windows=[1]) as stream:
        assert read(stream) == [entry for entry in seen if entry[0] == 1]


def test_state_dict_resumes_at_any_batch(store, served):
    with stream_of(store, served) as stream:
        whole = read(stream)
    for cut in range(1, len(whole) + 1):
        with stream_of(store, served) as stream:
            head = read(stream, cut)
            state = json.loads(json.dumps(stream.state_dict()))
        with stream_of(store, served) as stream:
            stream.load_state_dict(state)
            assert head + read(stream) == whole


def lengths_in(batch: LoadedBatch) -> list[list[int]]:
    """Tokens of each sample of a batch, pack by pack."""
    return [np.diff(pack.cu_seqlens).tolist() for pack in batch.packs]


def test_a_condition_leaves_out_samples_and_the_batches_say_so(store):
    where = "total_len < 120 and domain = 'domain-0'"
    length = store.samples(["total_len", "domain"]).to_pylist()
    plans = [store.plan(STAGE, window) for window in (0, 1)]
    expected = []
    for plan in plans:
        for first, end in pairwise(plan.step_starts.tolist()):
            spans = [plan.sample_rows[a:b].tolist() for a, b in pairwise(plan.pack_starts[first : end + 1].tolist())]
            packs = [
                [
                    length[row]["total_len"]
                    for row in rows
                    if length[row]["total_len"] < 120 and length[row]["domain"] == "domain-0"
                ]
                for rows in spans
            ]
            expected += [[pack for pack in packs if pack]] if any(packs) else []
    assert 0 < sum(len(pack) for step in expected for pack in step) < 24
    spec = SPEC.model_copy(update={"where": where, "deadline_s": 120.0})
    with BatchStream(store.uri, spec, views="numpy", environment={}) as stream:
        batches = [
            (lengths_in(batch), batch.loss_tokens, sum(int(p.loss_mask.sum()) for p in batch.packs)) for batch in stream
        ]
    assert [packs for packs, _, _ in batches] == expected
    assert all(counted == there for _, counted, there in batches), "what a loss is divided by counts the others out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("total_len < 0", InputError, r"leaves none of the 24 samples of window 0 .*loosen it"),
        ("total_length < 9", QueryError, "no column 'total_length'.*'total_len'"),
    ],
)
def test_a_condition_that_cannot_be_met_is_refused(store, where, error, message):
    spec = SPEC.model_copy(update={"where": where, "deadline_s": 120.0})
    with (
        BatchStream(store.uri, spec, views="numpy", environment={}) as stream,
        pytest.raises(error, match=message),
    ):
        read(stream)


def test_a_window_that_the_stream_does_not_walk_is_refused(store, served):
    with (
        stream_of(store, served, windows=[1]) as stream,
        pytest.raises(InputError, match=r"window 0, but this stream reads windows \[1\]"),
    ):
        stream.load_state_dict({"window": 0, "step": 0})


@pytest.mark.slow
def test_it_waits_for_a_window_and_gives_up_in_time(tmp_path):
    growing_store = make_store(tmp_path / "s", lengths_of(24, mean_log=4, shortest=4, longest=200), teachers=TEACHERS)
    add_window(growing_store, 0)
    with (
        stream_of(growing_store, window_deadline_s=1.0) as stream,
        pytest.raises(DeadlineError, match=r"window 1 .* not planned yet"),
    ):
        read(stream)
    writer = threading.Timer(1.0, add_window, (growing_store, 1))
    with stream_of(growing_store, windows=[0, 1]) as stream:
        writer.start()
        assert {window for window, _, _ in read(stream)} == {0, 1}
    writer.join()


RANK = """
import json, sys
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.load.stream import BatchStream
with BatchStream(sys.argv[1], LoadSpec.model_validate_json(sys.argv[2]), views="numpy", windows=[0]) as stream:
    print(json.dumps([[b.step, [p.index for p in b.packs]] for b in stream]))
"""


def test_the_first_rank_starts_the_loader_and_the_others_find_it(store):
    plan = store.plan(STAGE, 0)
    ranks = []
    for rank in (1, 0):
        rank_env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, "-c", RANK, store.uri, SPEC.model_dump_json()]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **rank_env}))
    outputs = [json.loads(process.communicate(timeout=60)[0]) for process in ranks]
    for step, batches in enumerate(zip(*outputs, strict=True)):
        packs = sorted(pack for batch in batches for pack in batch[1])
        assert packs == list(range(plan.step_starts[step], plan.step_starts[step + 1]))
    assert not is_served(socket_of(store.uri, SPEC)), "the loader ended with its last trainer"


@pytest.mark.slow
def test_a_loader_started_by_hand_is_used_and_outlives_its_trainers(store):
    command = [sys.executable, "-m", "mopd_dataplane", "load", "serve", store.uri, "--stage", STAGE, "--slots", "2"]
    command_process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert command_process.stdout is not None
        path = Path(command_process.stdout.readline().strip())
        for _ in range(2):
            with stream_of(store, path) as stream:
                assert len(read(stream)) > 2
            time.sleep(1.2)  # longer than the loader's look for trainers
            assert is_served(path)
    finally:
        command_process.terminate()
        command_process.wait(20)
    until = time.monotonic() + 20
    while is_served(path) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_served(path), "the loader ends with the command that serves it"


@pytest.mark.parametrize("kind", ["link", "open"])
def test_a_runtime_folder_that_others_may_enter_is_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / f"mopd-{os.getuid()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o755)
    with pytest.raises(InputError, match="not a folder that only this user may enter"):
        socket_of("runs/x", SPEC)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that are started take SIGINT, also where these tests run in the background of a shell, which do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_loader_without_a_traceback(
    store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends it to every process of a job; what it means is said once, by the job."""
    with start_server(store.uri, tmp_path / "l.sock", SPEC) as loader:
        os.kill(loader.pid, signal.SIGINT)
        assert loader.process.wait(20) == 130
    assert "Traceback" not in capfd.readouterr().err
