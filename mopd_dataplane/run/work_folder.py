"""The local folder of a job: its policies, and its exchange with a store on an object store.

In a folder store both are the same folder, and nothing is moved. On an object store, what is written in place (token
log, checkpoints, policies while they are saved) is written here first and published there whole; what is missing here
is fetched. So any node with the job file and the credentials can continue where another one stopped.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.models.adapter_files import is_adapter, named_base
from mopd_dataplane.models.hf import load_merged, save_policy
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.store.artifacts import ArtifactStore
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.objects import ObjectFiles

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
        """Have a published folder here; whether it is. One that is here already is left alone."""
        if (self.root / name).exists():
            return True
        return self.artifacts is not None and self.artifacts.fetch(name, self.root / name)

    def publish(self, name: str) -> None:
        """Have a finished local folder in the store too."""
        if self.artifacts is not None:
            self.artifacts.publish(name, self.root / name)

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
            f"work folder {root} belongs to store {owner['uuid']} that lay at {owner['uri']}, {store.uri} is now "
            f"{store.uuid}; delete the folder, or name another one: --set work='\"DIR\"'"
        )
    publish_file(mark, json.dumps({"uuid": store.uuid, "uri": store.uri}).encode())
    return Work(root, store.files, ArtifactStore(store.files))


@dataclass(frozen=True)
class Policies:
    """Folders of one job's policies, `policies/<stage>/v<version>`, where version 0 is what the stage starts from.

    Those that another node published are fetched when they are asked for.
    """

    job: Job
    work: Work

    def initial(self) -> Path:
        """The student as configured, made on first use."""
        if self.job.student.path:
            return model_folder(self.job.student.path, self.job.student.revision)
        name = "policies/init"
        if not self.work.fetch(name):
            make_student(self.job.student, self.work.root / name, seed=self.job.seed)
            self.work.publish(name)
        return self.work.root / name

    def start(self, stage: Stage) -> Path:
        """Folder that a stage starts from: the initial student, or the last version of an earlier stage."""
        return self.initial() if stage.start == "init" else self.last(self.job.stage(stage.start))

    def folder(self, stage: Stage, version: int) -> Path:
        """Folder of one version of a stage's policy."""
        if version == 0:
            return self.start(stage)
        name = f"policies/{stage.name}/v{version}"
        self.work.fetch(name)
        folder = self.work.root / name
        if is_adapter(folder):  # it needs its base, which may be in this store too
            base = (folder / named_base(folder).place).resolve()
            if base.is_relative_to(self.work.root.resolve()):
                self.work.fetch(base.relative_to(self.work.root.resolve()).as_posix())
        return folder

    def merge(self, stage: Stage) -> Path:
        """The last version of a stage as a whole model, made once."""
        version = self.latest(stage)
        name = f"policies/{stage.name}/merged-v{version}"
        if not self.work.fetch(name):
            last = self.folder(stage, version)
            save_policy(load_merged(last, dtype=self.job.student.dtype), last, self.work.root / name)
            self.work.publish(name)
        return self.work.root / name

    def stage_folder(self, stage: Stage) -> Path:
        """Folder in which a stage's trainer writes its versions."""
        return self.work.root / "policies" / stage.name

    def has_begun(self, stage: Stage) -> bool:
        """Whether a stage has trained."""
        return self.stage_folder(stage).exists() or self.latest(stage) > 0

    def latest(self, stage: Stage) -> int:
        """Newest version, here or in the store; 0 when there is none."""
        return max(_versions(self.work.published(f"policies/{stage.name}")), default=0)

    def publish(self, stage: Stage) -> None:
        """Have every version that was trained here in the store too."""
        folder = self.stage_folder(stage)
        for version in _versions(path.name for path in folder.glob("v*")):
            self.work.publish(f"policies/{stage.name}/v{version}")

    def last(self, stage: Stage) -> Path:
        """Folder of the newest version. Raises UnknownNameError when the stage has not trained yet."""
        version = self.latest(stage)
        if version == 0:
            raise UnknownNameError(
                f"stage {stage.name!r} has published no policy under {self.stage_folder(stage)}; "
                f"run it first: mopd run JOB --stage {stage.name}"
            )
        if stage.train.lora.merge == "end":
            return self.merge(stage)
        return self.folder(stage, version)

    def teacher(self, name: str, stage: Stage) -> Path:
        """Weights folder of a teacher, as seen from a stage."""
        teacher = self.job.teachers[name]
        if teacher.source == "student":
            return self.start(stage)
        if teacher.stage is not None:
            return self.last(self.job.stage(teacher.stage))
        return model_folder(teacher.source, teacher.revision)


def _versions(names: Iterable[str]) -> list[int]:
    return sorted(int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdigit())
