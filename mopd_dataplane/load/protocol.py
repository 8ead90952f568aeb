"""Messages between the loader and a trainer: length-prefixed JSON over a Unix socket, with file descriptors.

A trainer sends requests and the loader answers each, except `release` and `bye`. While the loader cannot answer yet, it
says so every second ({"wait": reason}), so that silence always means that the loader is gone or stuck.

    hello    rank, world_size, member, members          → ok
    open     window, step                               → steps of the window, base (steps of the stage before it)
    next     used                                       → step, packs, loss_tokens, sequences, and in `lent` the first
                                                          packs if they are small and ready; or end
    pack     step, ordinal, used                        → lent [[ordinal, slot, generation, bytes], …], the requested
                                                          pack and small ones after it; gone: slots to unmap; with the
                                                          fds of slots that are new to the trainer
    stats                                               → what Loader.stats returns
    release  leases [[slot, generation], …]
    bye
"""

import contextlib
import json
import os
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

from mopd_dataplane import errors
from mopd_dataplane.errors import DamagedError, DeadlineError, MopdError, ResourceError

VERSION = 5
MAX_MESSAGE = 1 << 20
READ_BYTES = 1 << 16
HEARTBEAT_S = 1.0
_LENGTH = struct.Struct("<I")
_FD = array("i").itemsize
MAX_FDS = 32
"""Upper bound of the descriptors that come with one message."""
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * _FD)
_CREDENTIALS = struct.Struct("3i")

Message = dict[str, Any]


class PeerGone(DeadlineError):
    """The other end closed the connection or died."""


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read_ahead = bytearray()
        self._fds: deque[int] = deque()
        """Descriptors of messages that were not read yet, in order."""

    def send(self, message: Message, *, fds: Sequence[int] = (), deadline_s: float) -> None:
        """Send one message, with descriptors. Raises PeerGone, or DeadlineError when the peer does not read."""
        body = json.dumps({**message, "fds": len(fds)} if fds else message).encode()
        if len(body) > MAX_MESSAGE:
            raise DamagedError(f"the message has {len(body):,} bytes, at most {MAX_MESSAGE:,} are allowed")
        data = memoryview(_LENGTH.pack(len(body)) + body)
        self._socket.settimeout(deadline_s)
        try:
            sent = socket.send_fds(self._socket, [data], fds) if fds else 0
            self._socket.sendall(data[sent:])
        except TimeoutError:
            raise DeadlineError(f"the process at the other end read nothing for {deadline_s:g} s") from None
        except OSError as error:
            raise PeerGone(f"the process at the other end is gone: {error.strerror}") from error

    def receive(self, *, deadline_s: float) -> tuple[Message, list[int]]:
        """Wait for one message. Returns it and its descriptors.

        Raises PeerGone at the end of the stream, DeadlineError after `deadline_s` seconds of silence.
        """
        try:
            message = self._next(time.monotonic() + deadline_s)
            announced = message.pop("fds", 0)
            if not isinstance(announced, int) or not 0 <= announced <= len(self._fds):
                raise DamagedError(f"a message announces {announced!r} descriptors, but {len(self._fds)} came with it")
        except DamagedError:
            self._drop_fds()
            raise
        return message, [self._fds.popleft() for _ in range(announced)]

    def close(self) -> None:
        """Close the connection; a peer that waits is told that it ended."""
        with contextlib.suppress(OSError):  # the peer may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._drop_fds()

    def _next(self, until: float) -> Message:
        self._read(_LENGTH.size, until)
        (size,) = _LENGTH.unpack_from(self._read_ahead)
        if size > MAX_MESSAGE:
            raise DamagedError(f"message of {size:,} bytes announced, at most {MAX_MESSAGE:,} are allowed")
        end = _LENGTH.size + size
        self._read(end, until)
        body = bytes(self._read_ahead[_LENGTH.size : end])
        del self._read_ahead[:end]
        try:
            message = json.loads(body.decode())  # json would have to guess the encoding of bytes
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"message is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise DamagedError(f"expected a JSON object, found {type(message).__name__}")
        return message

    def _drop_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())

    def _read(self, size: int, until: float) -> None:
        """Read until `size` bytes are in the buffer; bytes beyond them stay for the next message."""
        while len(self._read_ahead) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineError("the process at the other end sent nothing before the deadline")
            self._socket.settimeout(left)
            try:
                data, beside, _, _ = self._socket.recvmsg(READ_BYTES, _FD_SPACE)
            except TimeoutError:
                raise DeadlineError("the process at the other end sent nothing before the deadline") from None
            except OSError as error:
                raise PeerGone(f"the process at the other end is gone: {error.strerror}") from error
            for level, kind, raw in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._fds.extend(array("i", raw[: len(raw) // _FD * _FD]))
            if not data:
                raise PeerGone("the process at the other end closed the connection")
            self._read_ahead += data


def error_message(error: MopdError) -> Message:
    return {"error": type(error).__name__, "message": str(error)}


def raise_error(message: Message) -> None:
    """Raise the error that a message carries, if any."""
    if "error" in message:
        kind = getattr(errors, str(message["error"]), MopdError)
        if not (isinstance(kind, type) and issubclass(kind, MopdError)):
            kind = MopdError
        raise kind(str(message["message"]))


def check_same_user(connection: socket.socket) -> int:
    """Return the process id of the peer. Raises ResourceError unless it runs as this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise ResourceError(f"process {pid} of user {uid} may not use the loader of user {os.getuid()}")
    return int(pid)
