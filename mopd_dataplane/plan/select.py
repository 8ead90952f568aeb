"""Selection of the samples to train on: each is selected, or counted under the first reason against it."""

from collections.abc import Mapping

import numpy as np

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.shuffle import Ints, Mask

_NEXT_STEPS = {
    "no_loss_tokens": "no_loss_tokens: their loss_mask is 0 everywhere; look at one with mopd show",
    "unscorable": (
        "unscorable: mend the reward and score them again with mopd reward JOB --missing, or name a teacher that knows "
        "all of their tokens"
    ),
}
"""Advice for samples that are left out, by reason."""


def select(
    columns: Columns, settings: sections.Plan, *, group_size: int = 1, policy_version: int | None = None
) -> tuple[Columns, dict[str, Ints]]:
    """Apply every filter. Returns the selected samples in admission order, and the rows of the others by reason.

    group_size > 1: a group is planned whole or not at all, apart from unscorable answers. policy_version: the version
    that will train; with `max_staleness` and `stale = "drop"`, samples older than the bound are left out.
    Raises InputError for a sample over `pack_tokens` when `overlong = "error"`, and when no sample remains.
    """
    keep, dropped = usable(columns, settings, group_size=group_size, policy_version=policy_version)
    if not keep.any():
        counts = ", ".join(f"{reason} {len(rows):,}" for reason, rows in dropped.items()) or "no samples at all"
        steps = "".join(f"; {step}" for reason, step in _NEXT_STEPS.items() if reason in dropped)
        if columns.first_unmet.any():
            steps += "; look at what a condition leaves with mopd query, and loosen plan.where"
        raise InputError(f"nothing to train on: {len(columns):,} samples, of which {counts}{steps}")
    return columns.take(keep) if dropped else columns, dropped


def usable(
    columns: Columns, settings: sections.Plan, *, group_size: int, policy_version: int | None
) -> tuple[Mask, dict[str, Ints]]:
    """Apply every filter as `select` does, also where nothing is left: ([n] whether a sample is selected, rows of the
    others by reason)."""
    keep = np.ones(len(columns), dtype=bool)
    unsettled = {"missing_signal": ~columns.has_signals, "missing_reward": ~columns.has_reward}
    dropped = leave_out(
        unusable(columns, settings, policy_version) | unsettled | unmet_conditions(columns), columns, keep
    )
    if group_size > 1:
        dropped |= leave_out({"broken_group": ~whole_groups(columns, keep, group_size)}, columns, keep)
    return keep, dropped


def first_groups(columns: Columns, most: int) -> tuple[Columns, dict[str, Ints]]:
    """Take the first `most` groups in the order of admission: (their samples, rows of the others by reason)."""
    _, firsts, codes = np.unique(columns.groups, return_index=True, return_inverse=True)
    keep = firsts[codes] < np.append(np.sort(firsts), len(columns))[min(most, len(firsts))]
    dropped = leave_out({"until": ~keep}, columns, np.ones(len(columns), dtype=bool))
    return columns.take(keep) if dropped else columns, dropped


def unusable(columns: Columns, settings: sections.Plan, policy_version: int | None) -> dict[str, Mask]:
    """Find the samples that no later signal can make usable: a mask [n] for each reason.

    Raises InputError for a sample over `pack_tokens` when `overlong = "error"`.
    """
    stale = np.zeros(len(columns), dtype=bool)
    if policy_version is not None and settings.max_staleness and settings.stale == "drop":
        stale = policy_version - columns.version_first > settings.max_staleness
    overlong = columns.total_len > settings.pack_tokens
    if settings.overlong == "error" and overlong.any():
        over = columns.take(overlong)
        longest = int(over.total_len.max())
        raise InputError(
            f"sample row {int(over.sample_rows[0])} has {int(over.total_len[0]):,} tokens and pack_tokens is "
            f"{settings.pack_tokens:,} ({len(over):,} samples are over it, the longest has {longest:,}); "
            f'set plan.pack_tokens to at least {longest}, or plan.overlong = "drop" to leave them out on record'
        )
    return {
        "abandoned": columns.abandoned,
        "unscorable": columns.unscorable,
        "no_loss_tokens": columns.loss_tokens < 1,
        "overlong": overlong,
        "stale": stale,
    }


def unmet_conditions(columns: Columns) -> dict[str, Mask]:
    """Find the samples that do not meet a condition of [plan]: a mask [n] for each reason of `columns.conditions`."""
    return {reason: columns.first_unmet == number for number, reason in enumerate(columns.conditions, start=1)}


def leave_out(reasons: Mapping[str, Mask], columns: Columns, keep: Mask) -> dict[str, Ints]:
    """Remove the samples with a reason against them from `keep`. Returns their rows, each under its first reason."""
    dropped = {}
    for reason, fails in reasons.items():
        hit = keep & fails
        if hit.any():
            dropped[reason] = columns.sample_rows[hit]
            keep &= ~hit
    return dropped


def whole_groups(columns: Columns, keep: Mask, group_size: int) -> Mask:
    """Return whether all scorable members of the sample's group are in `keep`: [n] bool."""
    _, codes = np.unique(columns.groups, return_inverse=True)
    whole: Mask = np.bincount(codes, weights=keep)[codes] + columns.group_unscorable >= group_size
    return whole
