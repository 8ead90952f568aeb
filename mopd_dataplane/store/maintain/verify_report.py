"""The report of an audit (findings, rows checked, orphans), and the announcement of its steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from mopd_dataplane.base.files import out_of_descriptors
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.format.lance_errors import is_panic


@dataclass(frozen=True)
class Finding:
    """One damaged or inconsistent row or file.

    Example: Finding(table="tokens", row=17, uid="9f0c…", problem="crc32c 00c0ffee, committed was 1badb002").
    """

    table: str
    """Table, or file of the store."""
    row: int
    """Row id; -1 for the whole table or file."""
    uid: str
    """Sample or other key; empty when unknown."""
    problem: str


@dataclass(frozen=True)
class VerifyReport:
    """Result of an audit."""

    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    """Number of rows checked per table."""
    orphans: dict[str, int] = field(default_factory=dict)
    """Number of payload rows to which no metadata row points: left by interrupted commits, in no query result,
    harmless."""

    @property
    def ok(self) -> bool:
        """True if there are no findings."""
        return not self.findings


Watcher = Callable[[str, str, int], str]
"""Called before each step of an audit with table, step and row. Returns the reason to leave it out; empty to take
it."""
_watchers: list[Watcher] = []


def watch(watcher: Watcher) -> None:
    """Announce every later step of an audit in this process to a watcher; see verify_apart.py."""
    _watchers[:] = [watcher]


def left_out(table: str, step: str, row: int = -1) -> str:
    """Announce a step. Returns the reason to leave it out; empty to take it."""
    return _watchers[0](table, step, row) if _watchers else ""


def damage(error: BaseException) -> str:
    """Return the text of an error over damaged data. Re-raises any other: an interrupt, or no descriptors left."""
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
    if isinstance(error, ResourceError):
        raise error
    if failure := out_of_descriptors("the audit", error):
        raise failure from None
    return str(error)


def met(name: str, check: partial[Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check, and one more if it could not be completed."""
    if why := left_out(name, check.func.__name__):
        yield Finding(name, -1, "", why)
        return
    try:
        yield from check()
    except BaseException as error:
        yield Finding(name, -1, "", f"cannot be audited to its end: {damage(error)}")
