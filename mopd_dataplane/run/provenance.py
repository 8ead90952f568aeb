"""Provenance of published figures: commit, settings, sampler, machine, versions; part of every committed JSON."""

import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopd_dataplane.job.job import Job
from mopd_dataplane.records import Change
from mopd_dataplane.rollout.engines.sampling import SAMPLER

RESULTS = ":(top,exclude)jobs/*/results/*"
"""Files of figures: writing one does not change what it was measured with."""
PACKAGES = ("mopd-dataplane", "torch", "transformers", "tokenizers", "pylance", "numpy", "reasoning-gym")


def provenance(job: Job, *, stages: Sequence[str] = (), changes: Sequence[Change] = ()) -> dict[str, Any]:
    """Commit, versions, machine and date, for a reader who reproduces the figures.

    stages: those that the figures depend on; default all of the job. changes: recorded changes of the job. Needs the
    package's own folder to be a git checkout for `commit`; empty where it is none.
    """
    return {
        "commit": commit(),
        "settings": settings_digest(job, stages),
        **(
            {"changes": [f"{one.stage} from iteration {one.iteration}: {one.text}" for one in changes]}
            if changes
            else {}
        ),
        "sampler": SAMPLER,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "host": {"processor": _processor(), "cores": os.cpu_count(), "machine": platform.machine()},
        "versions": {"python": platform.python_version(), **_versions()},
    }


def settings_digest(job: Job, stages: Sequence[str] = ()) -> str:
    """16 hex digits over what a job file says that figures depend on: not its store, its seed, or unused objectives.

    Keys that the file leaves to their defaults are not counted, so that a new one changes no digest. A prompt source
    that is a module of the job's own folder counts with its text.
    """
    aside = {"store", "work", "seed", "shows", "source", "name", "scale"}
    content = job.model_dump(mode="json", exclude=aside, exclude_unset=True)
    if stages:
        content["stages"] = [stage for stage in content["stages"] if stage["name"] in stages]
    named = {stage.get("objective") for stage in content["stages"]}
    content["objectives"] = {name: value for name, value in content.get("objectives", {}).items() if name in named}
    if own := _own_sources(job):
        content["sources"] = own
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _own_sources(job: Job) -> dict[str, str]:
    """SHA-256 of each module that draws prompts of the job (`package.module:Name`), by the module's name."""
    parts = [domain.source.partition(":") for domain in job.domains.values()]
    named = {module for module, _, attribute in parts if attribute.isidentifier()}  # what follows a URL's colon is none
    specs = {name: importlib.util.find_spec(name) for name in sorted(named)}
    return {
        name: hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
        for name, spec in specs.items()
        if spec is not None and spec.origin is not None
    }


def commit() -> str:
    """Commit of the checkout this package runs from; empty outside of git.

    With `+` behind it when files other than RESULTS differ from it.
    """
    folder = Path(__file__).parent
    try:
        revision = _git(folder, "rev-parse", "HEAD").strip()[:12]
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ":/", RESULTS).strip()
        return revision + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=30
    ).stdout


def _processor() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
