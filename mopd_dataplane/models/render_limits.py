"""Bounds on the time and memory of rendering a chat template, which is a foreign program."""

import ctypes
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.errors import InputError

RENDER_S = 10.0
"""Longest time of rendering one conversation, in seconds."""
RENDER_BYTES = 1 << 30
"""Bytes by which the process may grow between the first two checks of a rendering and its end."""
RENDER_CHARACTERS = 1 << 26
"""Most characters of a rendered conversation."""
POLL_INTERVAL_S = 0.05
"""Pause between checks in seconds. A rendering that ends before its second check is not bounded, and costs nothing."""


class RenderLimitError(InputError):
    """A chat template takes too much time or memory."""


@dataclass(slots=True)
class _Rendering:
    """A rendering that runs in a thread."""

    begin: float
    resident_bytes: int = 0
    """Resident memory of the process at the first check."""
    is_stopped: bool = False


class _Watcher:
    """One thread that checks every rendering, and raises RenderLimitError in the thread of one beyond its bounds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renderings: dict[int, _Rendering] = {}
        self._thread: threading.Thread | None = None

    def begin(self, ident: int) -> None:
        with self._lock:
            self._renderings[ident] = _Rendering(time.monotonic())
            if self._thread is None or not self._thread.is_alive():  # after a fork the parent's thread is gone
                self._thread = threading.Thread(target=self._look, name="template limits", daemon=True)
                self._thread.start()

    def end(self, ident: int) -> bool:
        """End a rendering, taking back an exception that has not arrived yet. Returns True if the rendering was
        stopped."""
        with self._lock:
            rendering = self._renderings.pop(ident, None)
            if rendering is None or not rendering.is_stopped:
                return False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)
            return True

    def _look(self) -> None:
        while True:
            time.sleep(POLL_INTERVAL_S)
            with self._lock:
                if not self._renderings:
                    self._thread = None
                    return
                now, resident = time.monotonic(), _resident_bytes()
                for ident, rendering in self._renderings.items():
                    if not rendering.resident_bytes:
                        rendering.resident_bytes = resident
                    too_long = now - rendering.begin > RENDER_S
                    too_large = resident - rendering.resident_bytes > RENDER_BYTES
                    if (too_long or too_large) and not rendering.is_stopped:
                        rendering.is_stopped = True
                        stop = ctypes.py_object(RenderLimitError)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), stop)


_watcher = _Watcher()


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Raise RenderLimitError in the block when it takes longer, or more memory, than a chat template may."""
    ident, is_stopped = threading.get_ident(), False
    _watcher.begin(ident)
    try:
        yield
    except (RenderLimitError, MemoryError):
        is_stopped = True
    finally:
        is_stopped |= _watcher.end(ident)
    if is_stopped:
        raise RenderLimitError(
            f"the chat template takes more than {RENDER_S:g} s or {RENDER_BYTES >> 20:,} MiB for one conversation; "
            "mend the template, or give a tokenizer with another one"
        )


def check_rendered(text: str) -> str:
    """Return a rendered text. Raises RenderLimitError when it is longer than RENDER_CHARACTERS."""
    if len(text) > RENDER_CHARACTERS:
        raise RenderLimitError(
            f"the chat template writes {len(text):,} characters for one conversation; at most {RENDER_CHARACTERS:,} "
            "are taken: mend the template, or give a tokenizer with another one"
        )
    return text


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
