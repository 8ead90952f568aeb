"""The loader process: `python -m mopd_dataplane.load.server --store URI --socket PATH --spec JSON`.

It owns the store and the shared memory; trainers own nothing but a connection. It serves one thread per trainer and
ends when the last trainer has left or the process that started it is gone.
"""

import argparse
import gc
import json
import os
import resource
import selectors
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from mopd_dataplane.base.files import unlink_socket
from mopd_dataplane.base.memory import available_memory
from mopd_dataplane.errors import DamagedError, InputError, MismatchError, MopdError, ResourceError
from mopd_dataplane.job.parse import parse_section
from mopd_dataplane.load.consumers import Consumer
from mopd_dataplane.load.launch import is_served
from mopd_dataplane.load.loader import Loader
from mopd_dataplane.load.protocol import VERSION, Channel, Message, PeerGone, check_same_user, error_message
from mopd_dataplane.load.ring import Lent, Ring
from mopd_dataplane.load.spec import LoadSpec

POLL_INTERVAL_S = 0.5
"""Pause between checks if anybody still needs this process, in seconds."""
STEP_S = 7 * 86400.0
"""Longest silence of a living trainer, in seconds: it computes a step, or waits for other ranks."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, which a terminal sends to every process of a job."""
YOUNG_OBJECTS = 20_000
"""Allocations between two runs of the garbage collector: packs make thousands a second, and none of them in cycles."""


class Server:
    """Accepts trainers on a Unix socket and answers them from a Loader."""

    def __init__(self, loader: Loader, spec: LoadSpec, path: Path) -> None:
        self._loader = loader
        self._spec = spec
        self._path = path
        self._threads: list[threading.Thread] = []
        self._served = 0
        self._listener = listen(path)

    def run(self, parent: int) -> None:
        """Serve until the last trainer has left, or `parent` is no longer this process's parent."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while os.getppid() == parent:
                if selector.select(POLL_INTERVAL_S):
                    connection, _ = self._listener.accept()
                    self._served += 1
                    thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                    thread.start()
                    self._threads.append(thread)
                    continue  # others may wait to be accepted: stop only when nobody does
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                if self._served and not self._threads:
                    return

    def close(self) -> None:
        """Stop listening and reading ahead, and remove the socket."""
        self._listener.close()
        self._loader.close()
        unlink_socket(self._path)

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            check_same_user(connection)
            _Conversation(channel, self._loader, self._spec).run()
        except PeerGone:
            pass  # a trainer may end at any moment; its slots are taken back
        except MopdError as error:
            print(f"loader: a trainer was dropped: {error}", file=sys.stderr)
        finally:
            channel.close()


class _Conversation:
    """One trainer's requests, answered in order."""

    def __init__(self, channel: Channel, loader: Loader, spec: LoadSpec) -> None:
        self._channel = channel
        self._loader = loader
        self._spec = spec
        self._consumer: Consumer | None = None
        self._known_slots: set[int] = set()

    def run(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive(deadline_s=STEP_S)
                if message.get("op") == "bye":
                    return
                try:
                    self._answer(message)
                except PeerGone:
                    raise
                except MopdError as error:
                    self._send(error_message(error))
                except (KeyError, TypeError, ValueError) as error:
                    self._send(error_message(DamagedError(f"request {message.get('op')!r} is malformed: {error!r}")))
        finally:
            if self._consumer is not None:
                self._loader.leave(self._consumer)

    def _answer(self, message: Message) -> None:
        operation = message["op"]
        if operation == "hello":
            self._hello(message)
            return
        if self._consumer is None:
            raise InputError("the first message must be hello")
        if operation == "plan":
            self._send(self._loader.planned(int(message["window"]), self._beat))
        elif operation == "stats":
            self._send(self._loader.stats())
        elif operation == "open":
            steps, base = self._loader.open(self._consumer, int(message["window"]), int(message["step"]), self._beat)
            self._send({"steps": steps, "base": base})
        elif operation == "next":
            self._next(self._consumer, _ages(message["used"]))
        elif operation == "pack":
            position = (int(message["step"]), int(message["ordinal"]))
            lent = self._loader.claim(self._consumer, *position, self._beat, _ages(message["used"]))
            self._send_lent({}, lent)
        elif operation == "release":
            leases = [(int(slot), int(generation)) for slot, generation in message["leases"]]
            self._loader.release(self._consumer, leases)
        else:
            raise InputError(f"unknown request {operation!r}")

    def _hello(self, message: Message) -> None:
        if message["version"] != VERSION:
            raise MismatchError(f"the trainer speaks protocol version {message['version']}, the loader {VERSION}")
        if self._consumer is not None:
            raise InputError("hello was already sent")
        member_ids = [int(message[name]) for name in ("rank", "world_size", "member", "members")]
        self._consumer = self._loader.join(*member_ids)
        self._send({"pid": os.getpid(), "stage": self._spec.stage, "deadline_s": self._spec.deadline_s})

    def _next(self, consumer: Consumer, used: list[float]) -> None:
        answer = self._loader.advance(consumer, used)
        if answer is None:
            self._send({"end": True})
            return
        source, step, packs, lent = answer
        loss_tokens, sequences = source.totals(step)
        entries = [source.entry(pack) for pack in packs]
        self._send_lent({"step": step, "packs": entries, "loss_tokens": loss_tokens, "sequences": sequences}, lent)

    def _send_lent(self, answer: Message, lent: Lent) -> None:
        """Send an answer with the lent slots, and the descriptors of those that are new to this trainer."""
        answer["lent"] = [[body, slot.id, slot.generation, slot.capacity] for body, slot in lent]
        if gone := self._loader.retired(self._known_slots):
            answer["gone"] = sorted(gone)
            self._known_slots -= gone
        fds = [slot.fd for _, slot in lent if slot.id not in self._known_slots]
        self._known_slots.update(slot.id for _, slot in lent)
        self._channel.send(answer, fds=fds, deadline_s=self._spec.deadline_s)

    def _beat(self, reason: str) -> None:
        self._send({"wait": reason})

    def _send(self, message: Message) -> None:
        self._channel.send(message, deadline_s=self._spec.deadline_s)


def _ages(values: list[Any]) -> list[float]:
    """Convert the `used` list of a message to seconds since packs were used. Raises ValueError for other types."""
    ages = [float(age) for age in values]
    if not all(age >= 0 for age in ages):
        raise ValueError(f"ages must not be negative, found {ages}")
    return ages


def listen(path: Path) -> socket.socket:
    """Open a listening Unix socket that only this user can connect to.

    Raises InputError for a path too long for a socket, ResourceError when another loader listens there.
    """
    if len(os.fsencode(path)) > 107:
        raise InputError(f"socket path of {len(os.fsencode(path))} bytes, at most 107 are possible: {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_socket() and is_served(path):
        raise ResourceError(f"another loader listens on {path}; use another socket or stop it")
    unlink_socket(path)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ResourceError(error.errno, f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def main(arguments: list[str] | None = None) -> int:
    """Serve one stage of a store. Prints one JSON line on stdout that says that the loader is ready, or why it is
    not."""
    parser = argparse.ArgumentParser(prog="python -m mopd_dataplane.load.server", description=main.__doc__)
    parser.add_argument("--store", required=True, help="store URI")
    parser.add_argument("--socket", required=True, type=Path, help="Unix socket to listen on")
    parser.add_argument("--spec", required=True, help="JSON of load.spec.LoadSpec")
    options = parser.parse_args(arguments)
    try:
        return _serve(options.store, options.socket, options.spec)
    except KeyboardInterrupt:
        return INTERRUPTED


def _serve(uri: str, path: Path, settings: str) -> int:
    parent = os.getppid()  # before anything slow, during which the parent may end
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.remote.range_cache import open_cache

    gc.set_threshold(YOUNG_OBJECTS)
    _allow_open_files()
    try:
        spec, store = parse_section(LoadSpec, settings, "loader spec"), Store.open(uri)
        if store.root is None or store.sources.are_remote():
            store.use_cache(open_cache(spec.cache_dir, spec.cache_bytes))
        most = spec.ring_bytes or available_memory() // 2
        ring = Ring(max_bytes=most, slot_bytes=spec.slot_bytes, poison=spec.poison)
        server = Server(Loader(store, spec, ring), spec, path)
    except MopdError as error:
        print(json.dumps(error_message(error)), flush=True)
        return error.exit_code
    print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
    try:
        server.run(parent)
    finally:
        server.close()
    return 0


def _allow_open_files() -> None:
    """Raise the limit of open files: each slot is one, and so is each file of a store that is read in place."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # continue with the limit as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
