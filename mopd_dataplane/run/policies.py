"""Folders of policies: `policies/<stage>/v<version>`, where version 0 is what the stage starts from, and the averages
of teachers that follow them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.models.adapter_files import is_adapter, named_base
from mopd_dataplane.models.average import is_average_up_to, save_average
from mopd_dataplane.models.hf import load_merged, save_policy
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.run.work_folder import Work

AVERAGE = "average-"
"""Beginning of the name of an averaged folder; the teacher and the version follow."""


@dataclass(frozen=True)
class Policies:
    """Policy folders of one job in its work folder; those that another node published are fetched when asked for."""

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
        return self.initial() if stage.start == "init" else self.latest_folder(self.job.stage(stage.start))

    def folder(self, stage: Stage, version: int) -> Path:
        """Folder of one version of a stage's policy. Raises UnknownNameError for one that is not stored."""
        if version == 0:
            return self.start(stage)
        name = f"policies/{stage.name}/v{version}"
        folder = self.work.root / name
        if not self.work.fetch(name):
            raise UnknownNameError(
                f"policy {stage.name} v{version} is not stored: {_stored(self.stored(stage))}; retain.policies says "
                "how many stay, and retain.checkpoints_every which stay for good"
            )
        if is_adapter(folder):  # it needs its base, which may be in this store too
            base = (folder / named_base(folder).location).resolve()
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

    def stored(self, stage: Stage) -> list[int]:
        """Versions of a stage that are here or in the store, sorted."""
        return versions_of(self.work.published(f"policies/{stage.name}"))

    def latest(self, stage: Stage) -> int:
        """Newest version, here or in the store; 0 when there is none."""
        return max(self.stored(stage), default=0)

    def remove(self, stage: Stage, version: int) -> None:
        """Delete one version, here and in the store."""
        self.work.remove(f"policies/{stage.name}/v{version}")

    def base(self, stage: Stage) -> Path | None:
        """Folder of the weights under the adapters of a stage; None for a stage that trained none."""
        version = self.latest(stage)
        if not version or not stage.train.lora.r:
            return None
        newest = self.folder(stage, version)
        return (newest / named_base(newest).location).resolve()

    def publish(self, stage: Stage) -> None:
        """Have every version that was trained here in the store too."""
        folder = self.stage_folder(stage)
        for version in versions_of(path.name for path in folder.glob("v*")):
            self.work.publish(f"policies/{stage.name}/v{version}")

    def latest_folder(self, stage: Stage) -> Path:
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

    def followed(self, name: str, stage: Stage, iteration: int) -> int:
        """Version of the stage's policy that a following teacher has, or has averaged in last, in an iteration."""
        return iteration - iteration % self.job.teachers[name].follows

    def average(self, name: str, stage: Stage, version: int) -> Path:
        """The moving average that a following teacher is at a version of the stage's policy, made once.

        Raises UnknownNameError if policies that it is made of are not stored any more.
        """
        teacher, missing, last = self.job.teachers[name], [], version
        while last and not self._has_average(name, stage, last):
            missing.append(last)
            last -= teacher.follows
        folder = self.work.root / _average(name, stage, last) if last else self.folder(stage, 0)
        for later in reversed(missing):
            own = _average(name, stage, later)
            save_average(folder, self.folder(stage, later), teacher.average, self.work.root / own)
            self.work.publish(own)
            folder = self.work.root / own
        return folder

    def _has_average(self, name: str, stage: Stage, version: int) -> bool:
        """Fetch an average unless it is already here. Returns whether it exists; one of another policy is removed."""
        own = _average(name, stage, version)
        if not self.work.fetch(own):
            return False
        if version not in self.stored(stage):  # retention removed it; the average was compared with it before
            return True
        if not is_average_up_to(self.work.root / own, self.folder(stage, version)):
            self.work.remove(own)
            return False
        return True

    def averages(self, stage: Stage) -> list[tuple[str, int]]:
        """(teacher, version) of the averages of a stage that are here or in the store."""
        names = [name for name in self.work.published(f"policies/{stage.name}") if name.startswith(AVERAGE)]
        pairs = (name.removeprefix(AVERAGE).rpartition("-v") for name in names)
        return [(teacher, int(version)) for teacher, _, version in pairs if version.isdigit()]

    def remove_average(self, name: str, stage: Stage, version: int) -> None:
        """Delete an average, here and in the store."""
        self.work.remove(_average(name, stage, version))

    def teacher(self, name: str, stage: Stage, iteration: int | None = None) -> Path:
        """Weights folder of a teacher, as seen from a stage. Raises MismatchError for one that has only a url.

        iteration: of the samples that it scores, for a teacher that follows the policy; default the next one.
        """
        teacher = self.job.teachers[name]
        if teacher.is_remote:
            raise MismatchError(
                f"teacher {name!r} has weights behind {teacher.url} only, and they are needed here; give "
                f"teachers.{name}.source"
            )
        if teacher.follows:
            version = self.followed(name, stage, self.latest(stage) if iteration is None else iteration)
            return self.folder(stage, version) if teacher.average == 1 else self.average(name, stage, version)
        if teacher.source == "student":
            return self.start(stage)
        if teacher.stage is not None:
            return self.latest_folder(self.job.stage(teacher.stage))
        return model_folder(teacher.source, teacher.revision)


def _average(name: str, stage: Stage, version: int) -> str:
    """Folder of a teacher's average, relative to the store."""
    return f"policies/{stage.name}/{AVERAGE}{name}-v{version}"


def _stored(versions: list[int]) -> str:
    """The versions of a stage in words."""
    if not versions:
        return "the stage has none"
    return f"of v1 to v{versions[-1]}, {len(versions)} are, as v{versions[0]}"


def versions_of(names: Iterable[str]) -> list[int]:
    """Versions by the names of their folders, sorted; other names are left out."""
    return sorted(int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdigit())
