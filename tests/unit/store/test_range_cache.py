"""The node's cache of byte ranges: what it gives back, how much it takes, and what it survives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from mopd_dataplane.store.remote import range_cache as caches
from mopd_dataplane.store.remote.range_cache import BLOCK, RangeCache, open_cache

SIZE = 100_000
"""Bytes of a range in these tests: 25 blocks with its header."""
TAKES = 25 * BLOCK


def content(key: str, size: int = SIZE) -> bytes:
    return (key.encode() * (size // len(key) + 1))[:size]


def read(cache: RangeCache, key: str, size: int = SIZE) -> bytes | None:
    target = bytearray(size)
    return bytes(target) if cache.read(key, memoryview(target)) else None


def keep(cache: RangeCache, *keys: str) -> None:
    for key in keys:
        cache.keep(key, memoryview(content(key)))


def taken(folder: Path) -> int:
    """Bytes of all files in whole blocks, those half written included."""
    return sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in folder.glob("*/*") if path.is_file())


CHILD = f"""
import os, random, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_range_cache as t
from mopd_dataplane.base import fault_points
from pathlib import Path
cache = t.RangeCache(Path(sys.argv[1]), int(sys.argv[2]))
"""


def child(body: str, *arguments: object, wrap: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*wrap, sys.executable, "-c", CHILD + body, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_range_comes_back_as_it_was_kept_and_only_under_its_key(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "c", 1 << 20)
    assert read(cache, "a") is None
    keep(cache, "a")
    assert read(cache, "a") == content("a")
    assert read(cache, "b") is None
    assert read(RangeCache(tmp_path / "c", 1 << 20), "a") == content("a"), "another process finds it"
    stats = cache.stats()
    assert (stats["hits"], stats["misses"], stats["read_bytes"], stats["kept_bytes"]) == (1, 2, SIZE, SIZE)
    assert stats["bytes"] == TAKES == taken(tmp_path / "c")


def test_the_bound_holds_and_what_was_read_last_stays(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "c", 10 * TAKES)
    for number in range(40):
        keep(cache, f"range {number}")
        assert taken(tmp_path / "c") <= cache.stats()["bytes"] <= 10 * TAKES
        assert read(cache, "range 0") == content("range 0"), f"read again and again, gone after {number}"
        time.sleep(0.005)  # the file system's clock ticks every few milliseconds
    assert read(cache, "range 39") is not None
    assert read(cache, "range 1") is None
    cache.keep("larger than all", memoryview(bytes(11 * TAKES)))
    assert read(cache, "range 39") is not None, "a range that can never fit makes no room"


@pytest.mark.parametrize("change", ["bit", "header", "short", "empty", "renamed"])
def test_a_damaged_range_is_found_and_fetched_again(tmp_path: Path, change: str) -> None:
    cache = RangeCache(tmp_path / "c", 1 << 20)
    keep(cache, "a")
    [file] = [path for path in (tmp_path / "c").glob("*/*") if path.is_file()]
    stored = bytearray(file.read_bytes())
    if change == "renamed":
        keep(cache, "b")
        cache._path("b").replace(file)
    elif change in ("bit", "header"):
        stored[SIZE // 2 if change == "bit" else 9] ^= 4
        file.write_bytes(stored)
    else:
        file.write_bytes(stored[: SIZE // 2] if change == "short" else b"")
    assert read(cache, "a") is None
    assert cache.stats()["damaged"] == 1
    keep(cache, "a")
    assert read(cache, "a") == content("a")


@pytest.mark.parametrize("point", ["cache.begun", "cache.written"])
def test_a_process_that_is_killed_while_it_keeps_a_range_leaves_nothing_to_read(tmp_path: Path, point: str) -> None:
    body = """
t.keep(cache, "before")
fault_points.observe(lambda place: os.kill(os.getpid(), signal.SIGKILL) if place == sys.argv[3] else None)
t.keep(cache, "a")
"""
    process = child(body, tmp_path / "c", 1 << 20, point)
    assert process.wait(30) == -9, process.stderr.read()
    assert list((tmp_path / "c").glob("*/.*")), "it died with a file half written"
    cache = RangeCache(tmp_path / "c", 1 << 20)
    assert read(cache, "a") is None
    assert read(cache, "before") == content("before")
    assert cache.stats()["bytes"] == taken(tmp_path / "c") == TAKES, "the half file is gone and not counted"
    keep(cache, "a")
    assert read(cache, "a") == content("a")


def test_processes_share_one_folder_and_one_bound(tmp_path: Path) -> None:
    body = """
draw = random.Random(sys.argv[3])
for number in range(100):
    key = f"{draw.randrange(10)} of {sys.argv[3] if number % 2 else 'all'}"
    assert t.read(cache, key) in (None, t.content(key)), key
    t.keep(cache, key)
    with cache._exclusive() as mine:  # else the other one makes room between two looks
        assert not mine or t.taken(Path(sys.argv[1])) <= cache.stats()["bytes"] <= int(sys.argv[2])
print(cache.stats()["hits"])
"""
    processes = [child(body, tmp_path / "c", 12 * TAKES, name) for name in ("left", "right")]
    for process in processes:
        said, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        assert int(said) > 0
    assert RangeCache(tmp_path / "c", 12 * TAKES).stats()["bytes"] == taken(tmp_path / "c") <= 12 * TAKES


def test_a_process_that_is_stopped_while_it_keeps_a_range_holds_up_nobody(tmp_path: Path) -> None:
    body = """
t.keep(cache, "kept")
fault_points.observe(lambda place: os.kill(os.getpid(), signal.SIGSTOP))
t.keep(cache, "a")
"""
    process = child(body, tmp_path / "c", 1 << 20)
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        started = time.monotonic()
        cache = RangeCache(tmp_path / "c", 1 << 20)
        keep(cache, "b")
        assert read(cache, "kept") == content("kept")
        assert time.monotonic() - started < 10 * caches.LOCK_S
        assert read(cache, "b") is None
    finally:
        process.kill()
        process.wait(30)
    keep(cache, "b")
    assert read(cache, "b") == content("b")


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    others = [
        tmp_path / "c" / name
        for name in (".hidden", "ab/.hidden", "ab/model.bin", "data/model.bin", "data/" + "0" * 30)
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SIZE))
    cache = RangeCache(tmp_path / "c", 4 * TAKES)
    assert cache.stats()["bytes"] == 0
    for number in range(10):
        keep(cache, f"range {number}")
    assert all(path.is_file() for path in others)


def small_disk() -> tuple[str, ...]:
    """What runs a command where it may mount; skips the test where nothing may."""
    for own in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        if shutil.which("unshare") and not subprocess.run([*own, "true"], capture_output=True).returncode:
            return tuple(own)
    pytest.skip("neither root nor user namespaces here: no small disk can be mounted")


def test_a_full_disk_is_said_once_and_reading_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir(mode=0o700)
    body = """
for number in range(30):
    t.keep(cache, f"range {number}")
assert t.read(cache, "range 0") == t.content("range 0")
assert not list(Path(sys.argv[1]).glob("*/.*"))
print(cache.stats()["kept_bytes"], cache.stats()["bytes"] == t.taken(Path(sys.argv[1])))
"""
    mount = ("sh", "-c", f'mount -t tmpfs -o size=1m,mode=700 tmpfs {folder} && exec "$@"', "sh")
    process = child(body, folder, 1 << 30, wrap=(*small_disk(), *mount))
    said, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    kept_bytes, exact = said.split()
    assert 5 * SIZE <= int(kept_bytes) < (1 << 20)
    assert exact == "True"
    assert error.count("No space left on device") == 1
    assert "lower load.cache_bytes" in error


def test_a_folder_that_cannot_be_used_is_a_warning_and_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match=r"not kept in .*set load\.cache_dir"):
        assert open_cache(str(tmp_path / "file" / "below"), None) is None
    (tmp_path / "open" / "ranges").mkdir(parents=True)
    (tmp_path / "open" / "ranges").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert open_cache(str(tmp_path / "open"), None) is None


def test_a_folder_that_goes_away_ends_keeping_and_nothing_else(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "c", 2 * TAKES)
    keep(cache, "a", "b")
    shutil.rmtree(tmp_path / "c")
    assert read(cache, "a") is None
    with pytest.warns(RuntimeWarning, match="nothing more is kept") as said:
        keep(cache, "c", "d")
    assert len(said) == 1


def test_the_default_place_and_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = open_cache("", None)
        assert open_cache("", 0) is None
    assert cache is not None
    assert (tmp_path / "mopd" / "ranges").stat().st_mode & 0o777 == 0o700
    assert cache.max_bytes == pytest.approx(shutil.disk_usage(tmp_path).free / 4, rel=0.1)
