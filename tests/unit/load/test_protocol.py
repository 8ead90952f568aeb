"""The wire: framed JSON with deadlines; a peer that is silent, gone or talks nonsense is an error, never a hang."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from mopd_dataplane.errors import DamagedError, DeadlineError, InputError, MopdError, ResourceError
from mopd_dataplane.load.protocol import MAX_FDS, Channel, PeerGone, check_same_user, error_message, raise_error


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    """Two channels, and the raw socket of the first."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield Channel(left), Channel(right), left
    left.close()
    right.close()


def test_messages_and_their_descriptors_arrive(ends):
    left, right, _ = ends
    read, write = os.pipe()
    left.send({"slot": 1, "text": "é" * 5000}, fds=[write], deadline_s=1)
    left.send({"slot": 2}, deadline_s=1)
    left.send({"slot": 3}, fds=[write] * MAX_FDS, deadline_s=1)
    messages = [right.receive(deadline_s=1) for _ in range(3)]
    assert [message for message, _ in messages] == [{"slot": 1, "text": "é" * 5000}, {"slot": 2}, {"slot": 3}]
    fds = [fd for _, fds in messages for fd in fds]
    assert [len(fds) for _, fds in messages] == [1, 0, MAX_FDS]
    for fd in fds:
        os.write(fd, b"x")
    assert os.read(read, 100) == b"x" * len(fds)
    for open_fd in (read, write, *fds):
        os.close(open_fd)


@pytest.mark.parametrize("announced", [1, -1, "2", None])
def test_descriptors_that_did_not_come_are_damage(ends, announced):
    ends[0].send({"fds": announced}, deadline_s=1)
    with pytest.raises(DamagedError, match="descriptors, but 0 came"):
        ends[1].receive(deadline_s=1)


def test_silence_ends_at_the_deadline(ends):
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="nothing before the deadline"):
        ends[1].receive(deadline_s=0.2)
    assert time.monotonic() - started < 5


def test_half_a_message_is_silence(ends):
    ends[2].sendall(b"\x10\x00\x00\x00{")
    with pytest.raises(DeadlineError):
        ends[1].receive(deadline_s=0.2)


def test_a_peer_that_does_not_read_is_not_waited_for_ever(ends):
    ends[2].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with pytest.raises(DeadlineError, match="read nothing"):
        ends[0].send({"text": "x" * 1_000_000}, deadline_s=0.2)


def test_the_end_of_a_peer_is_seen_at_once_whatever_the_deadline(ends):
    left, right, _ = ends
    threading.Timer(0.2, left.close).start()
    with pytest.raises(PeerGone, match="closed"):
        right.receive(deadline_s=60)


@pytest.mark.parametrize("body", [b"abc", b"[]", b"\xff", b"{}" * 600_000])
def test_nonsense_is_damage(ends, body):
    ends[2].sendall(struct.pack("<I", len(body)) + body[:1000])
    with pytest.raises(DamagedError):
        ends[1].receive(deadline_s=1)


def test_a_descriptor_that_comes_with_nonsense_is_closed(ends):
    read, write = os.pipe()
    socket.send_fds(ends[2], [b"\x03\x00\x00\x00abc"], [write])
    os.close(write)
    with pytest.raises(DamagedError):
        ends[1].receive(deadline_s=1)
    assert os.read(read, 1) == b"", "no writer is left"
    os.close(read)


def test_errors_keep_their_class():
    for kind in (InputError, ResourceError):
        with pytest.raises(kind, match="why"):
            raise_error(error_message(kind("why")))
    with pytest.raises(MopdError, match="why"):
        raise_error({"error": "SystemExit", "message": "why"})
    raise_error({"step": 1})


def test_the_peer_of_the_same_user_is_accepted(ends):
    assert check_same_user(ends[2]) == os.getpid()


def test_another_user_is_refused(ends, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ResourceError, match="may not use the loader of user 12345"):
        check_same_user(ends[2])
