"""The token log as its users see it: levels, rotation, ownership, full disks, failing disks, damage."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.base.log import segment_file
from mopd_dataplane.base.log.filesystem import mount_of
from mopd_dataplane.base.log.framing import read_segment
from mopd_dataplane.errors import DamagedError, ResourceError
from mopd_dataplane.job import sections
from mopd_dataplane.rollout.log import log_records, ownership
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.log.ownership import claim_file
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.partial_sample import SampleSpec

SETTINGS = sections.Wal(full_disk_wait_s=0)


def spec(name: str) -> SampleSpec:
    return SampleSpec(
        uid=name, prompt_id=name, group_id=name, group_index=0, iteration=1, domain="d", effort="", stage="r",
        writer="w", writer_seq=0, policy="p", temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=100, stop=(),
        tokenizer="t", prompt_ids=(1, 2, 3),
    )  # fmt: skip


def step(handles: list[int], position: int, ended: int = 0) -> log_records.Step:
    count = len(handles)
    tokens = np.array(handles, np.uint32) * 100 + position
    return log_records.Step(
        np.array(handles, np.uint32), np.full(count, position, np.uint32), tokens.astype(np.uint32),
        np.full(count, -0.1 * (position + 1), np.float32), np.full(count, ended, np.uint8),
    )  # fmt: skip


def write(log: TokenLog, ledger: Ledger, *said: log_records.LogRecord) -> int:
    lsn = 0
    for message in said:
        lsn = log.append(message)
        ledger.apply(message)
    return lsn


def state(ledger: Ledger) -> dict[int, tuple[str, list[int], bytes, str]]:
    return {
        handle: (partial.spec.uid, list(partial.tokens), partial.logprobs.tobytes(), partial.finish_reason)
        for handle, partial in ledger.partials.items()
    }


def begun(folder: Path, settings: sections.Wal = SETTINGS, samples: int = 3) -> tuple[TokenLog, Ledger]:
    """A log with open samples that have two tokens each."""
    log, recovered = TokenLog.open(folder, settings)
    ledger = recovered.ledger
    for handle in range(samples):
        write(log, ledger, log_records.Open(handle, spec(f"s{handle}")), log_records.Span(handle, 0, 1, "v1"))
    write(log, ledger, step(list(range(samples)), 0), step(list(range(samples)), 1))
    return log, ledger


def only_segment(folder: Path) -> Path:
    (path,) = folder.glob("*/*.wal")
    return path


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(point)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs needs root: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_what_was_logged_is_recovered_after_a_crash(tmp_path: Path) -> None:
    log, ledger = begun(tmp_path)
    log.abort()
    again, recovered = TokenLog.open(tmp_path, SETTINGS)
    assert state(recovered.ledger) == state(ledger)
    assert recovered.torn_bytes == 0
    again.close()


def test_a_second_crash_right_after_recovery_changes_nothing(tmp_path: Path) -> None:
    log, ledger = begun(tmp_path)
    log.abort()
    for _ in range(3):
        log, recovered = TokenLog.open(tmp_path, SETTINGS)
        assert state(recovered.ledger) == state(ledger)
        log.abort()


def test_recovery_itself_writes_nothing(tmp_path: Path) -> None:
    log, _ = begun(tmp_path)
    log.abort()
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in tmp_path.rglob("*") if file.is_file()}
    recover(tmp_path)
    assert {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in tmp_path.rglob("*") if f.is_file()} == before


def test_durable_waits_for_a_sync_that_started_after_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(segment_file.os, "fdatasync", lambda fd: (syncs.append(os.fstat(fd).st_size), real(fd))[1])
    log, _ = begun(tmp_path, sections.Wal(group_commit_ms=10_000))
    lsn = log.append(log_records.Sync())
    end = only_segment(tmp_path).stat().st_size
    log.wait_durable(lsn)
    assert log.synced_lsn >= lsn
    assert max(syncs) >= end
    log.close()


def test_waiting_for_the_newest_record_ends_even_when_that_is_a_watermark(tmp_path: Path) -> None:
    log, ledger = begun(tmp_path)
    for _ in range(20):
        time.sleep(0.01)
        log.wait_durable(log.appended_lsn)
    log.rotate(ledger)
    log.wait_durable(log.appended_lsn)
    log.close()


def test_the_watermark_is_stated_only_after_the_sync_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = begun(tmp_path, sections.Wal(group_commit_ms=0))
    log.wait_durable(log.appended_lsn)
    synced_lsn = log.synced_lsn
    seen: list[int] = []
    real = os.fdatasync

    def slow(descriptor: int) -> None:
        seen.append(log.synced_lsn)
        real(descriptor)

    monkeypatch.setattr(segment_file.os, "fdatasync", slow)
    log.wait_durable(log.append(step([0, 1, 2], 2)))
    assert seen[0] == synced_lsn
    log.close()


def test_group_commit_syncs_without_anyone_waiting_and_states_the_watermark(tmp_path: Path) -> None:
    log, _ = begun(tmp_path)
    lsn = log.appended_lsn
    deadline = time.monotonic() + 20
    while read_segment(only_segment(tmp_path)).watermark < lsn:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    log.abort()


def test_rotation_carries_what_is_open_and_deletes_the_rest(tmp_path: Path) -> None:
    log, ledger = begun(tmp_path)
    write(log, ledger, step([1], 2, ended=1))
    write(log, ledger, log_records.Finish(1, 3, ledger.partials[1].digest(), "stop"), log_records.Commit((1,)))
    old = only_segment(tmp_path)
    log.rotate(ledger)
    assert only_segment(tmp_path) != old
    write(log, ledger, step([0, 2], 2))
    log.abort()
    recovered = recover(tmp_path)
    assert state(recovered.ledger) == state(ledger)
    assert set(recovered.ledger.partials) == {0, 2}
    assert recovered.ledger.next_handle == 3


def test_long_samples_are_carried_in_several_records(tmp_path: Path) -> None:
    log, ledger = begun(tmp_path, samples=1)
    count = 150_000
    tokens = np.arange(count, dtype=np.int32)
    for first in range(0, count, 50_000):
        part = tokens[first : first + 50_000]
        silent = np.zeros(len(part))
        write(log, ledger, log_records.Tokens(0, 2 + first, part, silent.astype(np.float32), silent.astype(np.uint8)))
    write(log, ledger, log_records.Span(0, count + 2, 2, "v2"))
    log.rotate(ledger)
    log.abort()
    recovered = recover(tmp_path).ledger
    assert state(recovered) == state(ledger)
    assert recovered.partials[0].spans == [(0, 1, "v1"), (count + 2, 2, "v2")]


def test_a_torn_tail_is_cut_at_one_point_for_all(tmp_path: Path) -> None:
    log, _ = begun(tmp_path, sections.Wal(durability="process"))
    log.append(step([0, 1, 2], 2))
    log.abort()
    path = only_segment(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    recovered = recover(tmp_path)
    assert [len(partial) for partial in recovered.ledger.partials.values()] == [2, 2, 2]
    assert recovered.torn_bytes > 0


def test_nothing_behind_a_hole_comes_back(tmp_path: Path) -> None:
    log, _ = begun(tmp_path, sections.Wal(durability="process"))
    middle = only_segment(tmp_path).stat().st_size
    log.append(step([0, 1, 2], 2))
    log.append(step([0, 1, 2], 3))
    log.abort()
    path = only_segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[middle + 40] ^= 1
    path.write_bytes(data)
    assert [len(partial) for partial in recover(tmp_path).ledger.partials.values()] == [2, 2, 2]


def test_damage_below_the_watermark_stops_and_touches_nothing(tmp_path: Path) -> None:
    log, _ = begun(tmp_path)
    log.wait_durable(log.appended_lsn)
    log.append(step([0, 1, 2], 2))
    log.abort()
    path = only_segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DamagedError, match=r"cannot be read, but records up to \d+ were on disk") as caught:
        TokenLog.open(tmp_path, SETTINGS)
    assert caught.value.exit_code == 3
    assert sorted(tmp_path.rglob("*")) == before
    assert path.read_bytes() == bytes(data)


def test_a_missing_newest_segment_folder_is_damage(tmp_path: Path) -> None:
    """The checkpoint of epoch 2 is unreadable and epoch 1 is gone: nothing must be invented."""
    log, _ = begun(tmp_path)
    log.abort()
    log, _ = TokenLog.open(tmp_path, SETTINGS)
    log.abort()
    path = only_segment(tmp_path)
    segment = read_segment(path)
    path.write_bytes(path.read_bytes()[: segment.records[0].end])
    with pytest.raises(DamagedError, match="the log before this segment is missing"):
        recover(tmp_path)


def test_a_log_has_one_writer(tmp_path: Path) -> None:
    log, _ = begun(tmp_path)
    with pytest.raises(ResourceError, match=f"process {os.getpid()} is writing"):
        TokenLog.open(tmp_path, SETTINGS)
    log.close()
    again, _ = TokenLog.open(tmp_path, SETTINGS)
    again.close()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from mopd_dataplane.job import sections\n"
        "from mopd_dataplane.rollout.log.wal import TokenLog\n"
        "log, _ = TokenLog.open(Path(sys.argv[1]), sections.Wal()); print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(ResourceError, match=f"process {child.pid} is writing"):
        TokenLog.open(tmp_path, SETTINGS)
    child.send_signal(signal.SIGKILL)
    child.wait()
    log, _ = TokenLog.open(tmp_path, SETTINGS)
    log.close()


def test_a_zombie_is_fenced_where_locks_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old owner writes on after a takeover that got as far as its fence: none of it counts."""
    zombie, ledger = begun(tmp_path, sections.Wal(group_commit_ms=10_000))
    zombie.wait_durable(zombie.appended_lsn)
    expected = state(ledger)
    (tmp_path / "LOCK").unlink()

    class Died(BaseException):
        pass

    def die(name: str) -> None:
        if name == "wal.base":
            raise Died

    monkeypatch.setattr("mopd_dataplane.rollout.log.wal.fault_point", die)
    with pytest.raises(Died):
        TokenLog.open(tmp_path, SETTINGS)
    monkeypatch.undo()
    (taken_over,) = (tmp_path / "00000002").glob("*.wal")
    fence = read_segment(taken_over).records[0]
    os.truncate(taken_over, fence.end)
    zombie.append(step([0, 1, 2], 2))
    with pytest.raises(ResourceError, match="took over the log"):
        zombie.wait_durable(zombie.appended_lsn)
    (tmp_path / "LOCK").unlink()
    log, recovered = TokenLog.open(tmp_path, SETTINGS)
    assert state(recovered.ledger) == expected
    log.close()
    zombie.abort()


def test_an_epoch_number_is_never_used_twice(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        log, _ = TokenLog.open(tmp_path, SETTINGS)
        seen.append(log.epoch)
        log.close(forget=True)
        assert not list(tmp_path.glob("*/*.wal"))
    claim_file(tmp_path, 4).write_text("{}")
    log, _ = TokenLog.open(tmp_path, SETTINGS)
    assert [*seen, log.epoch] == [1, 2, 3, 5]
    assert ownership.claimed_epochs(tmp_path) == [5]  # of a thousand calls, one file stays
    log.close()


def test_a_process_that_paused_before_its_claim_gets_no_used_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        log, _ = TokenLog.open(tmp_path, SETTINGS)
        log.close(forget=True)
    read, stale = ownership.claimed_epochs, iter([[1, 2]])
    monkeypatch.setattr(ownership, "claimed_epochs", lambda folder: next(stale, None) or read(folder))
    assert ownership.claim_epoch(tmp_path) == 6
    assert sorted(read(tmp_path)) == [5, 6]


def test_a_failed_sync_kills_the_log_and_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = begun(tmp_path, sections.Wal(group_commit_ms=10_000))
    calls = []

    def fail(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(segment_file.os, "fdatasync", fail)
    lsn = log.append(log_records.Sync())
    with pytest.raises(ResourceError, match="not tried again"):
        log.wait_durable(lsn)
    with pytest.raises(ResourceError, match="not tried again"):
        log.append(log_records.Sync())
    with pytest.raises(ResourceError, match="not tried again"):
        log.rotate(Ledger())
    with pytest.raises(ResourceError, match="not tried again"):
        log.close()
    assert len(calls) == 1


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(segment_file.os, "write", lambda fd, data: real(fd, bytes(data[:7])))
    log, ledger = begun(tmp_path)
    log.abort()
    assert state(recover(tmp_path).ledger) == state(ledger)


def test_a_full_disk_pauses_and_then_goes_on(tmpfs: Path) -> None:
    said: list[str] = []
    log, recovered = TokenLog.open(tmpfs / "log", sections.Wal(full_disk_wait_s=60), notice=said.append)
    ledger = recovered.ledger
    write(log, ledger, log_records.Open(0, spec("s")), log_records.Span(0, 0, 1, "v"))
    filler = tmpfs / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        _ = [file.write(bytes(1 << 16)) == 1 << 16 or file.write(b"x") for _ in range(32)]
    threading.Timer(0.6, filler.unlink).start()
    big = np.zeros(30_000)
    began = time.monotonic()
    write(log, ledger, log_records.Tokens(0, 0, big.astype(np.int32), big.astype(np.float32), big.astype(np.uint8)))
    assert time.monotonic() - began > 0.3
    assert said == [s for s in said if "full" in s or "space again" in s]
    assert "generation pauses" in said[0]
    assert "continues" in said[-1]
    log.abort()
    assert state(recover(tmpfs / "log").ledger) == state(ledger)


def test_a_disk_that_stays_full_is_an_error_and_keeps_the_log(tmpfs: Path) -> None:
    log, recovered = TokenLog.open(tmpfs / "log", sections.Wal(full_disk_wait_s=0.3))
    ledger = recovered.ledger
    write(log, ledger, log_records.Open(0, spec("s")), log_records.Span(0, 0, 1, "v"), step([0], 0))
    big = np.zeros(100_000)
    run = log_records.Tokens(0, 1, big.astype(np.int32), big.astype(np.float32), big.astype(np.uint8))
    with pytest.raises(ResourceError, match=r"has been full for 0.3 s; free some space"):
        _ = [log.append(run) for _ in range(32)]
    log.abort()
    recovered_drafts = recover(tmpfs / "log").ledger.partials
    assert list(recovered_drafts[0].tokens)[:1] == [0]


def test_levels_follow_the_file_system(tmpfs: Path, tmp_path: Path) -> None:
    assert mount_of(tmpfs / "x").kind == "tmpfs"
    assert mount_of(tmpfs / "x").level == "logged"
    log, _ = TokenLog.open(tmpfs / "log", SETTINGS)
    assert log.level == "logged"
    log.close()
    log, _ = TokenLog.open(tmp_path / "log", sections.Wal(durability="process"))
    assert log.level == "logged"
    log.wait_durable(log.appended_lsn)
    log.close()


def test_a_record_is_synced_when_the_log_says_so(tmp_path: Path) -> None:
    if mount_of(tmp_path).level != "durable":
        pytest.skip(f"{mount_of(tmp_path).kind} cannot promise durable")
    log, _ = begun(tmp_path / "log", sections.Wal(group_commit_ms=60_000))
    lsn = log.append(log_records.Sync())
    assert (log.level, log.synced_lsn < lsn) == ("durable", True)
    log.wait_durable(lsn)
    assert log.synced_lsn >= lsn
    log.close()
    log, _ = begun(tmp_path / "kernel", sections.Wal(durability="process"))
    log.wait_durable(log.append(log_records.Sync()))
    assert log.level == "logged"
    log.close()


def test_a_segment_that_cannot_be_created_pauses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log, ledger = begun(tmp_path, sections.Wal(full_disk_wait_s=60))
    log._notice = said.append
    failures = iter([OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Quota exceeded")])
    real = os.open

    def full(path: object, *flags: int) -> int:
        for error in failures:
            raise error
        return real(path, *flags)  # type: ignore[arg-type]

    monkeypatch.setattr(segment_file.os, "open", full)
    log.rotate(ledger)
    monkeypatch.undo()
    assert [text.rpartition(": ")[2] for text in said] == [
        "generation pauses until there is space", "generation continues",
    ]  # fmt: skip
    log.abort()
    assert state(recover(tmp_path).ledger) == state(ledger)


@pytest.mark.parametrize(
    ("kind", "level"),
    [("ext4", "durable"), ("xfs", "durable"), ("overlay", "logged"), ("nfs4", "logged"), ("fuse.sshfs", "logged")],
)
def test_levels_of_mounts(kind: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        f"2 1 0:5 / /data\\040set rw,noatime shared:3 - {kind} source rw\n"
        "3 1 0:6 / /data rw - proc source rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self: table)
    mount = mount_of(Path("/data set/run/wal"))
    assert (mount.point, mount.kind, mount.options, mount.level) == ("/data set", kind, "rw,noatime", level)


def test_a_closed_log_leaves_no_descriptor(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    log, ledger = begun(tmp_path)
    log.rotate(ledger)
    log.close()
    log, _ = TokenLog.open(tmp_path, SETTINGS)
    log.abort()
    shutil.rmtree(tmp_path / "00000002")
    assert set(os.listdir("/proc/self/fd")) == before
