"""Gives the tables of a store to a new store under second names of their files, in seconds whatever their size.

Lance never rewrites a data file in place, and neither does this package: both stores may append, delete, compact and
clean up, and neither changes what the other reads. Manifests are copied instead of linked: readers lock the manifest of
the version that they have open, and a lock belongs to the file, whatever its name.
"""

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.shared_files import SharedFiles
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.copy_tables import PinnedTables, version_files
from mopd_dataplane.store.read.tags import tag_file

_LINKED = ("data", "_deletions")
"""Folders of a table whose files are linked."""


def share_tables(source: Store, location: StoreLocation, pinned: PinnedTables, shared: SharedFiles) -> None:
    """Link the newest and the pinned versions of every table into a new store in a folder, with their snapshots.

    Raises DamagedError for a manifest that is not the one that was acknowledged.
    """
    for name, versions in pinned.datasets.items():
        if problem := source.table_handle(name).manifest_damage():  # its copy would be acknowledged
            raise DamagedError(f"{source.location.of(name)}: {problem}; nothing is taken of it, restore it from a copy")
        for dataset in versions.values():
            for file in version_files(source.location, name, dataset):
                _give(source, location, file, shared, is_linked=file.removeprefix(f"{name}/").startswith(_LINKED))
    for tag, pin in pinned.pins.items():
        for name in pin:
            _give(source, location, f"{name}/{tag_file(tag)}", shared, is_linked=False)
        _give(source, location, f"snapshots/{tag}.json", shared, is_linked=False)
    for name in pinned.datasets:
        table = Table(location, name)
        table.make_durable(table.open())


def _give(source: Store, location: StoreLocation, name: str, shared: SharedFiles, *, is_linked: bool) -> None:
    """Link one file into the new store, or copy it, unless it is there."""
    target = location.local(name)
    if is_linked:
        shared.share(source.path(name), target)
    elif not target.exists():
        publish_file(target, source.path(name).read_bytes())
