"""One writer per log: a lock for as long as the process lives, and an epoch number that is never used twice.

The lock is flock, which the kernel releases at the death of the process, however it dies. (POSIX record locks are
released by an unrelated close() of the same file.) The epoch is claimed with O_EXCL, so even where locks do not work,
two writers never share a file, and the older one notices.
"""

import json
import os
from pathlib import Path

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import fsync, try_lock
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.rollout.log.recovery import epoch_folders

LOCK = "LOCK"
"""File of a log folder that its writer locks."""


def take_lock(folder: Path) -> int:
    """Lock a log folder. Returns the descriptor that holds the lock. Raises ResourceError naming the holder."""
    descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not try_lock(descriptor):
        holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ResourceError(
            f"process {holder} is writing the log {folder}; wait for it to end, or stop it, then run again"
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def claim_epoch(folder: Path, *, above: int = 0) -> int:
    """Claim the next epoch, durably. above: the newest epoch that was claimed elsewhere."""
    claims = folder / "epoch"
    make_folder(claims)
    epoch = max([above, *claimed_epochs(folder), *epoch_folders(folder)]) + 1
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    owner = json.dumps({"pid": os.getpid(), "boot": boot}).encode()
    while True:
        path = claim_file(folder, epoch)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            epoch += 1
            continue
        with open(descriptor, "wb") as file:
            file.write(owner)
        # A process that paused before its claim may get a number that was used and dropped; the newest claim stays.
        if (newest := max(claimed_epochs(folder), default=epoch)) > epoch:
            path.unlink(missing_ok=True)  # the owner of the newest may have dropped it already
            epoch = newest + 1
            continue
        fault_point("wal.epoch.claimed")
        fsync(path)
        fsync(claims)
        return epoch


def claim_file(folder: Path, epoch: int) -> Path:
    """Return the path of the file that claims an epoch."""
    return folder / "epoch" / f"{epoch}.json"


def claimed_epochs(folder: Path) -> list[int]:
    """Epochs whose claims are there; those before the newest go when its owner has begun."""
    return [int(file.stem) for file in (folder / "epoch").glob("*.json") if file.stem.isdigit()]


def drop_claims(folder: Path, *, before: int) -> None:
    """Remove the claims of earlier epochs. before: an epoch whose own claim stays."""
    for epoch in claimed_epochs(folder):
        if epoch < before:
            claim_file(folder, epoch).unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a private folder and sync its name into its parent."""
    folder.mkdir(exist_ok=True, mode=0o700)
    fsync(folder.parent)
