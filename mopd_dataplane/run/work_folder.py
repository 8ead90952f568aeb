"""The local folder of a job, and its exchange with a store on an object store.

In a folder store both are the same folder, and nothing is moved. On an object store, what is written in place (token
log, checkpoints, policies while they are saved) is written here first and published there whole; what is missing here
is fetched. So any node with the job file and the credentials can continue where another one stopped.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mopd_dataplane.base.files import publish_file, remove_folder
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.remote.artifacts import ArtifactStore
from mopd_dataplane.store.remote.objects import ObjectFiles

_MARK = "work.json"


@dataclass(frozen=True)
class Work:
    """A local folder, and the files of the object store behind it."""

    root: Path
    files: ObjectFiles | None = None
    """None when the store is this folder."""
    artifacts: ArtifactStore | None = None
    """Published folders; None like `files`."""

    def fetch(self, name: str) -> bool:
        """Fetch a published folder unless it is already present. Returns whether it exists locally afterwards.

        A local folder that is not the published one is replaced: every other node uses the published one.
        """
        folder = self.root / name
        if self.artifacts is None or (folder.exists() and not self.artifacts.differs(name, folder)):
            return folder.exists()
        return self.artifacts.fetch(name, folder)

    def publish(self, name: str) -> None:
        """Have a finished local folder in the store too."""
        if self.artifacts is not None:
            self.artifacts.publish(name, self.root / name)

    def remove(self, name: str) -> None:
        """Delete a folder, here and in the store; missing ones are no error."""
        remove_folder(self.root / name)
        if self.artifacts is not None:
            self.artifacts.drop(name)

    def fetch_file(self, name: str) -> bool:
        """Have a file of the store here, unless this folder has one; whether the store has it."""
        if self.files is None:
            return (self.root / name).exists()
        if (self.root / name).exists():
            return self.files.has(name)
        content = self.files.read(name)
        if content is not None:
            publish_file(self.root / name, content)
        return content is not None

    def publish_file(self, name: str) -> None:
        """Have a local file in the store too, in place of an older one."""
        if self.files is not None:
            self.files.upload(name, self.root / name)

    def published(self, parent: str) -> list[str]:
        """Names of the folders directly under a parent, here or in the store."""
        here = self.root / parent
        local = [path.name for path in here.iterdir() if path.is_dir()] if here.is_dir() else []
        return sorted({*local, *(self.artifacts.names(parent) if self.artifacts is not None else ())})


def open_work(store: Store, folder: str) -> Work:
    """The work folder of a store: its own folder, else `folder`, by default runs/staging/<bucket>/<key>.

    Raises MismatchError when the folder belongs to another store.
    """
    if store.root is not None:
        return Work(store.root)
    assert store.files is not None
    parts = urlsplit(store.uri)
    root = Path(folder or f"runs/staging/{parts.netloc}{parts.path}").absolute()
    mark = root / _MARK
    owner = json.loads(mark.read_text()) if mark.is_file() else {"uuid": store.uuid}
    if owner["uuid"] != store.uuid:
        raise MismatchError(
            f"work folder {root} belongs to the store {owner['uuid']}, which was at {owner['uri']}, and the store at "
            f"{store.uri} is {store.uuid}; delete the folder, or name another one: --set work='\"DIR\"'"
        )
    publish_file(mark, json.dumps({"uuid": store.uuid, "uri": store.uri}).encode())
    return Work(root, store.files, ArtifactStore(store.files))
