"""Files that another program is still writing: each complete row becomes a sample once, whatever is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commandline import ENVIRONMENT, command

from mopd_dataplane import Store, open_store
from mopd_dataplane.base.stop_request import StopRequest
from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange import follow
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.follow import follow_rollouts
from mopd_dataplane.interchange.followed_files import FollowedFiles
from mopd_dataplane.interchange.importer import import_rollouts
from mopd_dataplane.interchange.vocabulary import TokenizerVocabulary
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import character_tokenizer

SETTINGS = ImportSettings(format="verl", stage="student", domain="sums")
STEPS, ROWS = 6, 8


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def vocabulary(tokenizer: Path) -> TokenizerVocabulary:
    read = hf.load_tokenizer(tokenizer)
    return TokenizerVocabulary(read, hf.tokenizer_digest(read))


def row(step: int, number: int) -> dict[str, Any]:
    """A row of verl's dump; every fourth answer of a step equals the one before it."""
    answer = number - (number % 4 == 3)
    text = {"input": f"{number // 4} + {step} =", "output": f" {answer}", "gts": "7"}
    return text | {"score": float(answer % 2), "step": step}


def lines(step: int) -> bytes:
    return "".join(json.dumps(row(step, number)) + "\n" for number in range(ROWS)).encode()


def content(store: Store) -> list[tuple[Any, ...]]:
    """What of the samples does not depend on the moment at which they came."""
    table = store.sql(
        "select uid, prompt_id, iteration, total_len, reward, verifier from samples join rewards using (uid) order by 1"
    )
    return [tuple(one.values()) for one in table.to_pylist()]


def imported(home: Path) -> int:
    """Number of samples in a store, which may still be made."""
    return len(content(open_store(str(home)))) if (home / "store.json").exists() else 0


def whole(folder: Path, vocabulary: TokenizerVocabulary, home: Path) -> list[tuple[Any, ...]]:
    """The same files, imported when they are complete."""
    import_rollouts(str(home), folder, SETTINGS, vocabulary)
    return content(open_store(str(home)))


def looked(files: FollowedFiles) -> list[str]:
    return [location.rpartition("/")[2] for location, _ in files.new_rows()]


def test_a_line_comes_once_it_is_ended_and_a_file_that_was_renamed_is_the_same(tmp_path: Path) -> None:
    files, file = FollowedFiles(str(tmp_path)), tmp_path / "1.jsonl"
    assert looked(files) == []
    file.write_bytes(b'{"a": 1}\n\n{"a"')
    assert looked(files) == ["1.jsonl:1"]
    assert looked(files) == []
    with file.open("ab") as more:
        more.write(b': 2}\n{"a": 3}\n')
    file.rename(tmp_path / "old.jsonl")
    (tmp_path / "1.jsonl").write_bytes(b'{"a": 4}\n')
    assert not files.was_rewritten()
    assert looked(files) == ["1.jsonl:1", "old.jsonl:3", "old.jsonl:4"]
    assert looked(files) == []


@pytest.mark.parametrize("new", [b"", b'{"a": 1}\n', b'{"b": 1}\n{"a": 2}\n{"a": 3}\n'], ids=["empty", "cut", "other"])
def test_a_file_that_was_written_anew_is_read_again_with_all_others(tmp_path: Path, new: bytes) -> None:
    files = FollowedFiles(str(tmp_path))
    (tmp_path / "1.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n')
    (tmp_path / "2.jsonl").write_bytes(b'{"c": 1}\n')
    assert len(looked(files)) == 3
    (tmp_path / "1.jsonl").write_bytes(new)
    assert files.was_rewritten()
    assert looked(files) == [*(f"1.jsonl:{number + 1}" for number in range(new.count(b"\n"))), "2.jsonl:1"]
    assert not files.was_rewritten()


def test_a_parquet_file_comes_when_it_is_whole_and_again_when_it_has_grown(tmp_path: Path) -> None:
    files, file = FollowedFiles(str(tmp_path)), tmp_path / "1.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "whole")
    done = (tmp_path / "whole").read_bytes()
    file.write_bytes(done[:-9])
    assert looked(files) == []
    assert list(files.waiting) == [str(file)]
    file.write_bytes(done)
    assert not files.was_rewritten(), "nothing of it was read before"
    assert looked(files) == ["1.parquet:1", "1.parquet:2"]
    assert (looked(files), files.waiting) == ([], {})
    pq.write_table(pa.table({"a": [1, 2, 3]}), file)
    assert files.was_rewritten()
    assert len(looked(files)) == 3


class Stop(StopRequest):
    """Requests the stop after some looks; between them, something happens."""

    def __init__(self, *events: Callable[[], object]) -> None:
        super().__init__()
        self._events = list(events)

    @property
    def is_requested(self) -> bool:  # type: ignore[override]
        if not self._events:
            return True
        self._events.pop(0)()
        return False


def test_rows_that_come_piece_by_piece_are_those_of_the_whole_files(
    tmp_path: Path, vocabulary: TokenizerVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut between any two bytes, rotated, and one file written anew with more rows; equal answers stay apart."""
    monkeypatch.setattr(follow, "LOOK_S", 0.0)
    dumps, store = tmp_path / "dumps", tmp_path / "store"
    dumps.mkdir()
    first, second = lines(0), lines(1)

    def put(name: str, more: bytes, mode: str = "ab") -> Callable[[], object]:
        def act() -> None:
            with (dumps / name).open(mode) as file:
                file.write(more)

        return act

    events = [
        lambda: None, put("0.jsonl", first[:70]), put("0.jsonl", first[70:200]), lambda: None,
        put("0.jsonl", first[200:]), put("1.jsonl", second[:150]), put("1.jsonl", second, "wb"),
        lambda: (dumps / "0.jsonl").rename(dumps / "0-old.jsonl"), put("0.jsonl", lines(2)),
    ]  # fmt: skip
    report = follow_rollouts(str(store), str(dumps), SETTINGS, vocabulary, stop=Stop(*events))
    assert (report.samples, report.inserted) == (3 * ROWS, 3 * ROWS)
    expected = whole(dumps, vocabulary, tmp_path / "whole")
    assert content(open_store(str(store))) == expected
    assert len(expected) == 3 * ROWS
    again = follow_rollouts(str(store), str(dumps), SETTINGS, vocabulary, stop=Stop())
    assert (again.samples, again.inserted) == (3 * ROWS, 0)
    assert open_store(str(store)).verify().ok


def test_a_row_that_cannot_be_imported_is_named_and_what_came_before_it_stays(
    tmp_path: Path, vocabulary: TokenizerVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "LOOK_S", 0.0)
    file, store = tmp_path / "0.jsonl", str(tmp_path / "store")
    file.write_bytes(lines(0))

    def spoil() -> None:
        with file.open("ab") as more:
            more.write(b'{"input": 7}\n')

    with pytest.raises(InputError, match=rf"0\.jsonl:{ROWS + 1}: "):
        follow_rollouts(store, str(file), SETTINGS, vocabulary, stop=Stop(lambda: None, spoil, lambda: None))
    assert len(content(open_store(store))) == ROWS
    file.write_bytes(lines(0) + lines(1))
    follow_rollouts(store, str(file), SETTINGS, vocabulary, stop=Stop())
    assert len(content(open_store(store))) == 2 * ROWS
    with pytest.raises(InputError, match="only files on this machine are followed"):
        follow_rollouts(store, "s3://bucket/dumps", SETTINGS, vocabulary, stop=Stop())


@pytest.mark.slow
def test_killed_at_random_moments_it_has_each_row_once(
    tmp_path: Path, tokenizer: Path, vocabulary: TokenizerVocabulary
) -> None:
    """The framework writes piece by piece in a thread; the command is killed with SIGKILL, and at last stopped."""
    draw, dumps, store = random.Random(3), tmp_path / "dumps", tmp_path / "store"
    dumps.mkdir()
    told = ("--store", store, "--tokenizer", tokenizer, "--stage", "student", "--domain", "sums")
    words = command("import", "verl", dumps, "--follow", *told, "--json")

    def write() -> None:
        for step in range(STEPS):
            rest = lines(step)
            while rest:
                size = draw.randint(1, 120)
                with (dumps / f"{step}.jsonl").open("ab") as file:
                    file.write(rest[:size])
                rest = rest[size:]
                time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(3):
        child = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        time.sleep(draw.uniform(2.0, 6.0))
        child.kill()
        child.wait()
    child = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    writer.join()
    until = time.monotonic() + 120
    while time.monotonic() < until and (
        not (store / "store.json").exists() or len(content(open_store(str(store)))) < STEPS * ROWS
    ):
        time.sleep(0.5)
    os.kill(child.pid, signal.SIGINT)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    assert json.loads(said)["samples"] == STEPS * ROWS
    assert content(open_store(str(store))) == whole(dumps, vocabulary, tmp_path / "whole")
    assert open_store(str(store)).verify().ok
