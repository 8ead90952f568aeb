"""Which folder holds which policy: `policies/<stage>/v<version>`, version 0 being where the stage starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.jobfile import Job, Stage
from mopd_dataplane.run.student import make_student


@dataclass(frozen=True)
class Policies:
    """Policy folders of one job under its store root."""

    job: Job
    root: Path

    def initial(self) -> Path:
        """The student as configured, made on first use."""
        return make_student(self.job.student, self.root / "policies" / "init", seed=self.job.seed)

    def start(self, stage: Stage) -> Path:
        """Where a stage starts: the initial student, or the last version of an earlier stage."""
        return self.initial() if stage.start == "init" else self.last(self.job.stage(stage.start))

    def folder(self, stage: Stage, version: int) -> Path:
        """Folder of one version of a stage's policy."""
        return self.start(stage) if version == 0 else self.stage_folder(stage) / f"v{version}"

    def stage_folder(self, stage: Stage) -> Path:
        """Where a stage publishes its versions."""
        return self.root / "policies" / stage.name

    def latest(self, stage: Stage) -> int:
        """Newest published version; 0 when the stage has published none."""
        versions = [int(folder.name[1:]) for folder in self.stage_folder(stage).glob("v*") if folder.name[1:].isdigit()]
        return max(versions, default=0)

    def last(self, stage: Stage) -> Path:
        """Folder of the newest version. Raises UnknownNameError when the stage has not trained yet."""
        version = self.latest(stage)
        if version == 0:
            raise UnknownNameError(
                f"stage {stage.name!r} has published no policy under {self.stage_folder(stage)}; "
                f"run it first: mopd run JOB --stage {stage.name}"
            )
        return self.folder(stage, version)

    def teacher(self, name: str, stage: Stage) -> Path:
        """Weights folder of a teacher, as seen from a stage."""
        source = self.job.teachers[name].source
        if source == "student":
            return self.start(stage)
        if source.startswith("stage:"):
            return self.last(self.job.stage(source.removeprefix("stage:")))
        return Path(source)
