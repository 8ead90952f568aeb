"""A store on a read-only mount: everything that reads works, and what writes is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import store_builders as build
from tokenizers import Tokenizer, models

from mopd_dataplane.records import PlanWindow
from mopd_dataplane.store.commit.token_stats import write_token_stats
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import keep_tokenizer

READ = """
import sys
import numpy as np
from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.slot_layout import arrays_of
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import Numbers, find_decoder
from mopd_dataplane.store.commit.token_stats import read_token_stats

store = Store.open(sys.argv[1])
assert store.samples().num_rows == 8
assert store.read_tokens(np.arange(8), verify=True).num_rows == 8
assert len(store.read_signal("t", "hidden", np.arange(8), verify=True)) == 8
assert store.sql("select count(*) as n from samples")["n"][0].as_py() == 8
assert store.table("labels")["note"].to_pylist() == ["odd"]
uid = store.samples(["uid"])["uid"][0].as_py()
assert len(read_token_stats(store, uid)) == 1
assert [deletion.finished for deletion in store.deletions.all()] == [True]
assert store.read_json("provenance.json")["runs"]
assert not isinstance(find_decoder(store), Numbers)
assert store.verify().ok, store.verify().findings
assert store.snapshot(tag="pinned").versions["samples"] > 1
assert store.info()["tables"]["samples"]["rows"] == 8
source = WindowSource(store, store.plan("student", 0), LoadSpec(stage="student", signals=("hidden",)))
fields, size = source.fields(0)
memory = memoryview(bytearray(size))
source.fill(0, fields, memory, list)
assert arrays_of(memory, fields)["sample_rows"].tolist() == list(range(8))
"""


@pytest.fixture
def read_only(store: Store) -> Iterator[Path]:
    """The folder of a store with samples, signals, a pinned snapshot and a plan, mounted so that nobody can write."""
    assert store.root is not None
    samples = [build.sample(number) for number in range(8)]
    for number in range(0, 8, 2):
        store.commit_samples(samples[number : number + 2])
    head = store.path("heads/t.safetensors")
    head.parent.mkdir()
    head.write_bytes(b"head")
    store.add_teacher(build.teacher("t", head_digest=_sha(b"head")))
    store.commit_signals("t", "hidden", [build.signal(s, row, "hidden") for row, s in enumerate(samples)])
    store.add_plan(
        PlanWindow(
            stage="student", window=0, seed=0, settings={}, snapshot=store.snapshot(tag="pinned"),
            sample_rows=np.arange(8), pack_starts=np.array([0, 8]), pack_teachers=np.zeros(1, np.int16),
            step_starts=np.array([0, 1]), teachers=["t"], stats={}, digest="d",
        )
    )  # fmt: skip
    write_token_stats(store, [build.statistics(samples[0], 0)])
    store.add_labels([build.label(samples[0], note="odd")])
    store.deletions.close(store.deletions.begin(["0" * 32], [1 << 40], ["a prompt"]))
    store.write_json("provenance.json", {"runs": [{"commit": "a"}]})
    keep_tokenizer(store, "9f2c", json.loads(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str()))
    bind = subprocess.run(["mount", "--bind", str(store.root), str(store.root)], capture_output=True)
    if bind.returncode:
        pytest.skip("mounting is not permitted here")
    subprocess.run(["mount", "-o", "remount,bind,ro", str(store.root)], check=True)
    yield store.root
    subprocess.run(["umount", "--lazy", str(store.root)], check=True)


def _sha(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_read_by_everything(read_only: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Read-only"):
        (read_only / "probe").touch()
    process = run("-c", READ, read_only)
    assert process.returncode == 0, process.stderr
    commands = {
        "query": (str(read_only), "select count(*) from samples"),
        "store": ("verify", str(read_only)),
        "show": (str(read_only), build.sample(3).uid),
        "report": (str(read_only), "-o", str(tmp_path / "report.html")),
        "export": (str(read_only), str(tmp_path / "rows.jsonl")),
    }
    for name, arguments in commands.items():
        said = run("-m", "mopd_dataplane", name, *arguments)
        assert "Read-only" not in said.stderr, (name, said.stderr)
        assert "Traceback" not in said.stderr, (name, said.stderr)
        assert said.returncode == 0, (name, said.stderr)


def test_a_write_to_it_is_refused_in_a_line(read_only: Path) -> None:
    said = run("-m", "mopd_dataplane", "store", "compact", read_only)
    assert said.returncode != 0
    assert "Traceback" not in said.stderr
    assert "Read-only" in said.stderr or "read-only" in said.stderr
