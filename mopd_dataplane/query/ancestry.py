"""The run that a store was forked from, and the forks that lie beside it, by what their marks record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mopd_dataplane.errors import MopdError
from mopd_dataplane.store.format.dataset_format import FORKED_FROM, read_mark
from mopd_dataplane.store.location import StoreLocation

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The run that a store was forked from, and the point.

    Example: Origin(uuid="5c…", uri="runs/demo", stage="student", version=12, settings=["rollout.temperature=0.8"]).
    """

    uuid: str
    """Id of the run's store."""
    uri: str
    """Folder of the run: where it lies now if that is beside the fork, else where it lay."""
    stage: str
    version: int
    settings: list[str]
    """Keys of the job that got another value at the point."""
    rewound: bool = False
    """Whether the store has the name of the run, which was taken back to the point."""

    @property
    def point(self) -> str:
        """The point and the settings, in words."""
        changed = f" with {', '.join(self.settings)}" if self.settings else ""
        return f"{self.stage}@{self.version}{changed}"

    @property
    def text(self) -> str:
        """The point, the settings and the run, in words."""
        return f"{self.point} of {self.uri}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Relative:
    """A store in a tree of forks."""

    folder: str
    depth: int
    """0 for the run that no store beside it leads to."""
    origin: Origin | None
    is_this: bool
    """Whether it is the store whose tree it is."""
    is_left: bool = False
    """Whether a run was taken back to a point before its end, so that nothing goes on from that end."""


@dataclass(frozen=True)
class _Marked:
    folder: Path
    uuid: str
    origin: Origin | None


def origin_of(store: Store) -> Origin | None:
    """The run that a store was forked from; None for a store that is no fork."""
    origin = _marked(store.location).origin
    if origin is None or store.root is None:
        return origin
    run = next((other for other in _beside(store.root) if other.uuid == origin.uuid), None)
    return origin if run is None else _at(origin, run.folder)


def tree_of(store: Store) -> list[Relative]:
    """The store with the run that it was forked from, the forks of both, and so on, as far as they lie in one folder;
    each below the one that it was forked from. Empty when there are none."""
    if store.root is None:
        return []
    stores = {other.uuid: other for other in [*_beside(store.root), _marked(store.location)]}
    top = stores[store.uuid]
    while top.origin is not None and top.origin.uuid in stores:
        top = stores[top.origin.uuid]
    tree = list(_below(top, list(stores.values()), 0, store.uuid))
    return tree if len(tree) > 1 else []


def forks_of(store: Store) -> list[Relative]:
    """Forks of a store that lie beside it."""
    if store.root is None:
        return []
    forks = [other for other in _beside(store.root) if other.origin is not None and other.origin.uuid == store.uuid]
    return [Relative(folder=str(fork.folder), depth=1, origin=fork.origin, is_this=False) for fork in forks]


def _below(top: _Marked, stores: list[_Marked], depth: int, this: str) -> Iterator[Relative]:
    """A store and its forks."""
    forks = [other for other in stores if other.origin is not None and other.origin.uuid == top.uuid]
    yield Relative(
        folder=str(top.folder), depth=depth, origin=top.origin, is_this=top.uuid == this,
        is_left=any(fork.origin is not None and fork.origin.rewound for fork in forks),
    )  # fmt: skip
    for fork in forks:
        yield from _below(fork, stores, depth + 1, this)


def _beside(root: Path) -> list[_Marked]:
    """Stores in the folder that a store lies in, without it, in order of name; those that cannot be read are left
    out."""
    stores = []
    for folder in sorted(root.parent.iterdir()):
        if folder != root and not folder.name.startswith(".") and folder.is_dir():
            with suppress(MopdError, OSError):
                stores.append(_marked(StoreLocation(folder)))
    return [other for other in stores if other.uuid]


def _marked(location: StoreLocation) -> _Marked:
    mark = read_mark(location) or {}
    record = mark.get(FORKED_FROM)
    names = ("uuid", "uri", "stage", "version", "settings")
    rewound = bool((record or {}).get("rewound"))
    origin = None if record is None else Origin(**{name: record[name] for name in names}, rewound=rewound)
    return _Marked(Path(location.uri), str(mark.get("uuid", "")), origin)


def _at(origin: Origin, folder: Path) -> Origin:
    return replace(origin, uri=str(folder))
