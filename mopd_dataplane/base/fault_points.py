"""Named points where tests can make a process die.

Product code calls `fault_point("commit.payload")` between two writes. It does nothing until a test process installs an
observer; no environment variable, option or file can install one.
"""

from collections.abc import Callable

_observer: Callable[[str], None] | None = None


def fault_point(name: str) -> None:
    """Tell the observer, if any, that the process has reached the fault point `name`."""
    if _observer is not None:
        _observer(name)


def observe(observer: Callable[[str], None] | None) -> None:
    """Install the observer of every fault point of this process; None removes it."""
    global _observer
    _observer = observer
