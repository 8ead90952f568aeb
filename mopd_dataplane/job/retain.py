"""The section `[retain]`: how long a run keeps what it no longer trains on."""

from pydantic import Field

from mopd_dataplane.job.section import ChangeClass, Section


class Retain(Section):
    """Retention of hidden states (most bytes of a store), per-token statistics, checkpoints, policies and snapshots."""

    change = ChangeClass.FREE
    hidden_passes: int = Field(default=0, ge=0)
    """Freed once their sample was trained on this often (passes over a window count), or was dropped for good; 0 is
    without limit."""
    hidden_versions: int = Field(default=0, ge=0)
    """Freed once the newest policy is more than this many versions newer than the one that began the sample; 0 is
    without limit."""
    stats_versions: int = Field(default=0, ge=0)
    """Per-token statistics are freed in the same way, while their means stay; 0 keeps them without limit."""
    checkpoints_every: int = Field(default=0, ge=0)
    """The checkpoint of every so many policy versions stays, so that `mopd fork` and `mopd rewind` can begin there: 1
    keeps that of every version, 0 those of the last two alone. 12 bytes a trained parameter each; in a folder."""
    best_checkpoints: int = Field(default=0, ge=0)
    """The checkpoints of so many versions stay too: of those evaluated so far, the ones with the highest mean reward of
    held-out answers."""
    policies: int = Field(default=0, ge=0)
    """So many newest policy versions of a stage stay, besides those whose checkpoints stay; 0 keeps all. A concurrent
    stage keeps at least `plan.max_staleness` + 2, all where that has no bound, and those evaluated at its end."""
    snapshots: int = Field(default=0, ge=0)
    """The snapshots of so many trained windows stay pinned, besides those of windows that a kill may bring back; 0
    keeps all. What only a released one names leaves the disk: its window cannot be loaded again or shown as it was."""
