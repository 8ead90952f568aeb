"""A whole store of format 1 copied into one of format 2: its tables, and everything that lies beside them.

The source is never changed. After a kill the same call continues: what the target has of the tables is compared with
the source, and what lies beside them is made again. The target opens as a store when it is complete.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.base.files import file_digest, make_folder, publish_file
from mopd_dataplane.base.sealed_json import seal, seal_line
from mopd_dataplane.errors import DamagedError, InputError, MismatchError
from mopd_dataplane.job.job import Job
from mopd_dataplane.run.whole_copy import copy_log_folder
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import write_mark
from mopd_dataplane.store.location import MARK, StoreLocation
from mopd_dataplane.store.maintain.copy_target import one_writer
from mopd_dataplane.store.maintain.upgrade import PROGRESS, link_file, old_snapshots, open_source, upgrade_tables
from mopd_dataplane.store.maintain.verify import verify

_WEIGHTS = ("policies", "discriminators")
_FOLDERS = (*_WEIGHTS, "heads", "checkpoints", "wal")
"""Folders beside the tables."""
_CHECKPOINT_FORMAT = 3
_LEFT = ("mopd_digest.json",)
"""Files of format 1 that format 2 has no use for."""
_STAGE_KEYS = {"overlap": "concurrent"}
_SCORE_KEYS = {"topk_support": "topk_source"}
_DIVERGENCE_KEYS = {"overlap": "topk_agreement"}


def upgrade_store(source: str | Path, target: str | Path) -> Iterator[str]:
    """Copy a store of format 1; names each part that is done.

    Raises InputError for places that cannot be used, MismatchError for another format or another half-made target,
    DamagedError naming what of the source is damaged.
    """
    old, location = _folder(source), StoreLocation(target)
    root = _folder(target)
    if root == old or root.is_relative_to(old) or old.is_relative_to(root):
        raise InputError(
            f"{target} and {source} are one folder, or one lies in the other; give a folder outside of both"
        )
    open_source(old)
    with one_writer(location):
        yield from _upgrade(old, location, root)


def _upgrade(old: Path, location: StoreLocation, root: Path) -> Iterator[str]:
    versions = _begin(old, location, root)
    yield from upgrade_tables(old, location, versions)
    for folder in _FOLDERS:  # of a killed call: files of these names may be others in the source by now
        shutil.rmtree(root / folder, ignore_errors=True)
    for name, work in _FILES.items():
        work(old, root)
        fault_point(f"upgrade.{name}")
        yield name
    report = verify(location, {name: Table(location, name) for name in versions}, Store(location).sources, deep=True)
    if not report.ok:
        said = "; ".join(f"{f.table} row {f.row} {f.uid}: {f.problem}" for f in report.findings[:3])
        raise DamagedError(
            f"{old} is damaged, so its copy is no store yet: {said}; verify the source with the version that wrote "
            "it, repair it, delete the copy, and upgrade again"
        )
    old_mark = json.loads((old / MARK).read_text())
    promised = {"single_writer": True} if old_mark.get("single_writer") else {}
    write_mark(location, upgraded_from=str(old_mark.get("uuid", "")), **promised)
    location.remove(PROGRESS)
    yield "checked"


def _folder(name: str | Path) -> Path:
    root = StoreLocation(name).root
    if root is None:
        raise InputError(f"{name} is an object store; copy the store to a folder, upgrade it there, and copy it back")
    return root


def _begin(old: Path, location: StoreLocation, root: Path) -> dict[str, int]:
    """Versions of the source's tables that are copied: those of the first call, when this one goes on."""
    if (root / MARK).exists():
        raise InputError(f"{root} is a store already; give another folder")
    begun = location.read_json(PROGRESS)
    now, pins = open_source(old), old_snapshots(old)
    identity = json.loads((old / MARK).read_text()).get("uuid", "")
    if begun is None:
        if root.exists() and any(root.iterdir()):
            raise InputError(f"{root} is not empty; give a folder that does not exist")
        location.write_json(PROGRESS, {"source": str(old), "uuid": identity, "versions": now, "snapshots": pins})
        return now
    if begun["uuid"] != identity:
        raise MismatchError(
            f"{root} is the unfinished copy of {begun['source']}, not of {old}; delete it, or give another folder"
        )
    if (begun["versions"], begun["snapshots"]) != (now, pins):
        raise MismatchError(f"{old} was written to since its copy {root} began; delete the copy and start again")
    return now


def _carry_weights(old: Path, root: Path) -> None:
    """Policies and discriminators: the same files, and what each was."""
    for parent in _WEIGHTS:
        folders = [path for path in (old / parent).glob("*/v*") if path.is_dir()]
        folders += [path for path in [old / "policies" / "init"] if parent == "policies" and path.is_dir()]
        for folder in folders:
            _carry_folder(folder, root / folder.relative_to(old), identities=parent == "policies")


def _carry_folder(
    folder: Path, target: Path, *, identities: bool, change: Callable[[Path], None] = lambda staging: None
) -> None:
    def fill(staging: Path) -> None:
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _LEFT):
            link_file(file, staging / file.relative_to(folder))
        change(staging)
        write_checksums(staging, identities=identities)

    make_folder(target, fill)


def _carry_checkpoints(old: Path, root: Path) -> None:
    for stage in sorted(path for path in (old / "checkpoints").glob("*") if path.is_dir()):
        target = root / "checkpoints" / stage.name
        for folder in sorted(stage.glob("step-*")):
            _carry_folder(folder, target / folder.name, identities=False, change=_checkpoint)
        if (newest := stage / "latest").is_file():
            name = newest.read_text().strip()
            if not re.fullmatch(r"step-\d{8,}", name) or not (stage / name).is_dir():
                raise DamagedError(f"{newest} names {name!r:.80}, which is not there; restore it from a copy")
            publish_file(target / "latest", seal({"checkpoint": name}))
        if (metrics := stage / "metrics.jsonl").is_file():
            lines = metrics.read_text().split("\n")[:-1]
            publish_file(target / "metrics.jsonl", "".join(f"{seal_line(json.loads(x))}\n" for x in lines).encode())


def _checkpoint(staging: Path) -> None:
    """Write state.json in the form of format 2, after checking the shards against it. Raises DamagedError."""
    state = json.loads((staging / "state.json").read_text())
    for name, digest in state.pop("digests").items():
        if (digest_now := file_digest(staging / name)) != digest:
            raise DamagedError(f"checkpoint shard {name} has sha256 {digest_now[:16]}…, {digest[:16]}… was written")
    _rename(state["identity"]["objective"].get("divergence"), _DIVERGENCE_KEYS)
    for part in staging.glob("shard-*.json"):
        part.unlink()
    (staging / "state.json").unlink()  # a link to the source's
    (staging / "state.json").write_text(json.dumps({**state, "format": _CHECKPOINT_FORMAT}, indent=1))


def _carry_job(old: Path, root: Path) -> None:
    """Copy the store's job.json under the keys of format 2. One that cannot be read is copied unchanged, and refused
    with the reason when a job opens the store."""
    if not (old / "job.json").is_file():
        return
    job = json.loads((old / "job.json").read_text())
    for objective in (job.get("objectives") or {}).values():
        _rename(objective.get("divergence"), _DIVERGENCE_KEYS)
    for stage in job.get("stages", []):
        _rename(stage, _STAGE_KEYS)
        _rename(stage.get("score"), _SCORE_KEYS)
        recorded = stage.get("rollout", {}).get("record")
        if isinstance(recorded, list):
            stage["rollout"]["record"] = ["sampling_mask" if what == "support" else what for what in recorded]
    job["store"] = str(root)
    with suppress(ValidationError):
        job = Job.model_validate(job).model_dump(mode="json")
    publish_file(root / "job.json", seal(job))


def _rename(table: Any, names: dict[str, str]) -> None:
    """Rename keys of a table to those of format 2."""
    if isinstance(table, dict):
        for old in names.keys() & table.keys():
            table[names[old]] = table.pop(old)


def _carry_heads(old: Path, root: Path) -> None:
    for file in (old / "heads").glob("*.safetensors"):
        link_file(file, root / "heads" / file.name)


_FILES: dict[str, Callable[[Path, Path], None]] = {
    "heads": _carry_heads,
    "policies": _carry_weights,
    "checkpoints": _carry_checkpoints,
    "job": _carry_job,
    "log": lambda old, root: copy_log_folder(old / "wal", root / "wal"),  # its readers know the names of format 1
}
