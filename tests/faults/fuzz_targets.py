"""Parsers under coverage-guided fuzzing: `python fuzz_targets.py TARGET FOLDER [libFuzzer options]`.

A target takes any bytes and may raise only what the parser promises. libFuzzer reports everything else, a call that
takes over five seconds (a busy machine holds a process for one), and memory that grows by more than 64 MiB over what
the imports took.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mopd_dataplane"]):  # before anything else imports the package
    from story import story

    if sys.argv[1] == "cursor":  # torch, which only this target needs, takes its time
        from mopd_dataplane.train.checkpoint import latest_checkpoint

    from mopd_dataplane.base.log.framing import SegmentHeader, pack_record
    from mopd_dataplane.errors import DamagedError, DeadlineError, MismatchError
    from mopd_dataplane.load.protocol import Channel
    from mopd_dataplane.load.slot_layout import read_header, slot_crc
    from mopd_dataplane.rollout.log import log_records
    from mopd_dataplane.rollout.log.ledger import Ledger
    from mopd_dataplane.rollout.log.recovery import recover

MEMORY_MIB = 64
SCRATCH = Path(sys.argv[2])
"""Where inputs that are files are written; whoever started this removes it."""


def segment_bytes(data: bytes) -> None:
    """A segment file of any bytes, some behind a good header."""
    header = SegmentHeader(1, bytes(16), 0, 1, 0).pack() if data[:1] == b"h" else b""
    recovered(header + data[1:])


def records(data: bytes) -> None:
    """A well-framed log whose records say anything: kind, length, body, again and again."""
    header = SegmentHeader(1, bytes(16), 0, 1, 0)
    opening = (log_records.Fence(0, 0, 0), log_records.Base(0, 0))
    bodies = [(message.kind, message.encode()) for message in opening]
    while len(data) > 2:
        kind, size = data[0] % 16, int.from_bytes(data[1:3], "little") % 512
        bodies.append((kind, data[3 : 3 + size]))
        data = data[3 + size :]
    framed = [pack_record(header.salt, lsn, 0, 1, kind, body) for lsn, (kind, body) in enumerate(bodies, start=1)]
    recovered(header.pack() + b"".join(framed))


def recovered(content: bytes) -> None:
    """Recover a log of one segment."""
    epoch_dir = SCRATCH / "log" / "00000001"
    epoch_dir.mkdir(parents=True, exist_ok=True)
    (epoch_dir / f"{0:016x}.wal").write_bytes(content)
    with contextlib.suppress(DamagedError):
        recover(epoch_dir.parent)


def tool_records(data: bytes) -> None:
    """What the log says of commands: any JSON where a call should be."""
    ledger = Ledger()
    for part in data.split(b"\0"):
        with contextlib.suppress(ValueError, KeyError):
            ledger.apply(log_records.decode(log_records.Tool.kind, struct.pack("<II", 0, len(part) % 3) + part))


def cursor(data: bytes) -> None:
    """The trainer's position: any state.json, any pointer."""
    text, _, name = data.partition(b"\0")
    checkpoint_dir = SCRATCH / "checkpoints"
    (checkpoint_dir / "step-00000001").mkdir(parents=True, exist_ok=True)
    (checkpoint_dir / "step-00000001" / "state.json").write_bytes(text)
    (checkpoint_dir / "latest").write_bytes(name or b"step-00000001")
    with contextlib.suppress(DamagedError, MismatchError):
        latest_checkpoint(checkpoint_dir)


def protocol(data: bytes) -> None:
    """A conversation: any bytes on the socket, some behind an honest length."""
    ours, theirs = socket.socketpair()
    theirs.sendall((struct.pack("<I", len(data) - 1) if data[:1] == b"l" else b"") + data[1:])
    theirs.close()
    channel = Channel(ours)
    try:
        for _ in range(4):
            channel.receive(deadline_s=0.5)
    except (DamagedError, DeadlineError):
        pass
    finally:
        channel.close()


def slot(data: bytes) -> None:
    """Shared memory that holds anything."""
    memory = memoryview(bytearray(b"MOPS\x01\x00" + data + bytes(max(0, 512 - len(data)))))
    with contextlib.suppress(DamagedError):
        header = read_header(memory)
        slot_crc(memory, header.fields)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (segment_bytes, records, tool_records, cursor, protocol, slot)
}


def seeds(target: str) -> Iterator[bytes]:
    """Inputs that a target takes, to begin with."""
    call = b'{"position": 0, "command": {"argv": ["a"], "timeout_s": 1.0}, "result": null}'
    if target == "records":
        for number in range(6):
            said = [(message.kind, message.encode()) for message in story(number, 12)]
            said.insert(2, (log_records.Tool.kind, struct.pack("<II", 0, 0) + call))
            yield b"".join(bytes([kind]) + len(body).to_bytes(2, "little") + body for kind, body in said)
    yield {
        "tool_records": call,
        "cursor": b'{"format": 1, "position": {"step": 1}, "identity": {"stage": "s"}, "digests": {}}',
        "protocol": b'l{"op": "next"}',
    }.get(target, b"h")


def main() -> None:
    """Fuzz one target, from the inputs found before; options behind its name go to libFuzzer."""
    target = TARGETS[sys.argv[1]]
    corpus = SCRATCH / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(sys.argv[1])):
        (corpus / str(number)).write_bytes(seed)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    options = ["-timeout=5", f"-rss_limit_mb={used + MEMORY_MIB}", "-print_final_stats=1", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *options, *sys.argv[3:], str(corpus)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
