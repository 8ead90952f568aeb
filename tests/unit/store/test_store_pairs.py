"""Two store commands at once, on one store and into one target: both are done or one is refused, and what is there then
is what one of the two orders gives."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import store_builders as build

from mopd_dataplane.records import Prompt
from mopd_dataplane.store.dataset import Store

DATA = Path(__file__).parents[2] / "data"
SAMPLES = [build.sample(number) for number in range(8)]
COMMANDS: dict[str, tuple[str, ...]] = {
    "copy": ("copy", "STORE", "TARGET"),
    "copy to another place": ("copy", "STORE", "OTHER"),
    "copy --where": ("copy", "STORE", "TARGET", "--where", "domain = 'math'"),
    "delete": ("delete", "STORE", "--where", f"uid = '{SAMPLES[2].uid}'", "--yes"),
    "delete another": ("delete", "STORE", "--where", f"uid = '{SAMPLES[4].uid}'", "--yes"),
    "compact": ("compact", "STORE"),
    "compact --now": ("compact", "STORE", "--now"),
    "repair": ("repair", "STORE"),
    "verify": ("verify", "STORE"),
    "info": ("info", "STORE"),
}
DELETED = {"delete": {SAMPLES[2].uid}, "delete another": {SAMPLES[4].uid}}
REFUSALS = ("is being written by process", "is not empty; give a path where nothing is yet", "no sample fits",
            "is the unfinished copy of another store, or of samples with where")  # fmt: skip
SLOW = ("info", "verify", "repair", "compact", "copy to another place", "delete another")
PAIRS = [
    pytest.param(first, second, marks=pytest.mark.slow if {first, second} & {*SLOW} else ())
    for first, second in combinations_with_replacement(COMMANDS, 2)
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    created = Store.create(tmp_path / "store")
    names = [sample.prompt_id for sample in SAMPLES]
    created.add_prompts(Prompt(prompt_id=name, domain="math", text=name, answer="1") for name in names)
    for sample in SAMPLES:
        created.commit_samples([sample])
    created.snapshot(tag="pinned")
    return created


def start(store: Store, name: str, folder: Path) -> subprocess.Popen[str]:
    folders = {"STORE": store.uri, "TARGET": str(folder / "target"), "OTHER": str(folder / "other")}
    words = [folders.get(word, word) for word in COMMANDS[name]]
    command = [sys.executable, "-m", "mopd_dataplane", "store", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def uids(folder: str | Path) -> set[str]:
    copy = Store.open(folder)
    assert copy.verify().findings == []
    return set(copy.samples(["uid"])["uid"].to_pylist())


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_commands_at_once(store: Store, tmp_path: Path, first: str, second: str) -> None:
    children = [(name, start(store, name, tmp_path)) for name in (first, second)]
    ends = [(name, child.communicate(timeout=300)[1], child.returncode) for name, child in children]
    done = [name for name, _, code in ends if code == 0]
    for name, told, code in ends:
        assert code in (0, 2, 4), f"{name} ended with {code}: {told}"
        if code:
            assert any(text in " ".join(told.split()) for text in REFUSALS), told
            assert name.split()[0] in ("copy", "delete"), told
    assert done, ends
    every = {sample.uid for sample in SAMPLES}
    deleted = set().union(*(DELETED.get(name, set()) for name in done))
    assert uids(store.uri) == every - deleted
    check_target(tmp_path / "target", done, ("copy", "copy --where"), every, deleted)
    check_target(tmp_path / "other", done, ("copy to another place",), every, deleted)


def check_target(target: Path, done: list[str], copies: tuple[str, ...], every: set[str], deleted: set[str]) -> None:
    """A target has what one of the serial orders gives: the copy before a deletion, or after it."""
    copied = [name for name in done if name in copies]
    assert (target / "store.json").exists() == bool(copied)
    for name in copied:
        chosen = {sample.uid for sample in SAMPLES if sample.domain == "math"} if name == "copy --where" else every
        assert uids(target) in (chosen, chosen - deleted)
    assert len(copied) < 2, "two copies into one target are not both done"


@pytest.mark.slow
def test_two_upgrades_into_one_target(tmp_path: Path) -> None:
    with tarfile.open(DATA / "store-format-1.tar.xz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    source, target = tmp_path / "old" / "store", tmp_path / "new"
    command = [sys.executable, "-m", "mopd_dataplane", "store", "upgrade", str(source), str(target)]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [(child.communicate(timeout=300)[1], child.returncode) for child in children]
    assert sorted(code for _, code in ends) in ([0, 2], [0, 4])
    [told] = [told for told, code in ends if code]
    assert any(text in " ".join(told.split()) for text in ("is being written by process", "is a store already")), told
    store = Store.open(target)
    assert store.verify().findings == []
    prompts = store.table("prompts", ["prompt_id"])["prompt_id"].to_pylist()
    assert len(prompts) == len(set(prompts)) > 0
