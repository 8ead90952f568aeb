"""Commands on a store itself: contents, verification, compaction, copies, deletion and upgrade."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, Typer, confirm

from mopd_dataplane.cli.answers import StoreUri
from mopd_dataplane.cli.output import note, plain, print_facts, print_json
from mopd_dataplane.cli.register import AsJson, register
from mopd_dataplane.cli.rows import print_fitting
from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.query.text import size

if TYPE_CHECKING:
    from mopd_dataplane.run.delete import Preview
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.maintain.deletion_records import Deletion

AUDIT_FAILED = 1
MOST_REASONS = 3
"""Reasons that `compact` gives for the bytes that a table keeps, the heaviest first."""
LEFT_BEHIND = "plans, snapshots, checkpoints and the token log"


def info(store: StoreUri, as_json: AsJson = False) -> None:
    """Show what a store holds: tables, rows, versions, bytes, and bytes that can be freed.

    Of a run with iterations left, also what they will add to the tables at the mean of those so far; of one with
    group_commit, how busy the process is that commits for all writers.
    """
    from dataclasses import asdict

    from mopd_dataplane import open_store
    from mopd_dataplane.query.ancestry import forks_of, origin_of
    from mopd_dataplane.query.still_to_write import still_to_write
    from mopd_dataplane.store.format.dataset_format import FORKED_FROM
    from mopd_dataplane.store.group_commit.load import read_load
    from mopd_dataplane.store.group_commit.mailbox import open_mailbox

    opened = open_store(store)
    name_unfinished(opened)
    facts = plain(opened.info()) | {"forks": [fork.folder for fork in forks_of(opened)]}
    left = still_to_write(opened, facts["tables"])
    group = read_load(open_mailbox(opened.root, opened.files))
    if as_json:
        group_commit = None if group is None else asdict(group) | {"load": group.load}
        still = [one._asdict() | {"bytes": round(one.bytes)} for one in left]
        print_json({**facts, "still_to_write": still, "group_commit": group_commit})
        return
    tables, snapshots = facts.pop("tables"), facts.pop("snapshots")
    if (origin := origin_of(opened)) is not None:
        facts[FORKED_FROM] = origin.text
    facts["forks"] = ", ".join(facts["forks"]) or "none beside it"
    # Names end in the iteration: one line says which stages are pinned how often, --json every name.
    pinned = Counter(name.rpartition("-")[0] or name for name in snapshots)
    print_facts({**facts, "snapshots": ", ".join(f"{count} of {stage}" for stage, count in pinned.items()) or "none"})
    shown = [
        [name, row["rows"], size(row["bytes"]), size(row["freeable_bytes"]), row["files"], row["version"]]
        for name, row in tables.items()
    ]
    print_fitting(("table", "rows", "size", "freeable", "files", "version"), shown)
    note(f"{size(sum(row['bytes'] for row in tables.values()))} in all; --json says bytes")
    for one in left:
        note(
            f"{one.stage}: {one.done:,} of {one.iterations:,} iterations; the others will add about "
            f"{size(round(one.bytes))}, {size(round(one.iteration_bytes))} each"
        )
    if group is not None:
        note(f"group commit: load {group.load:.2f} over {group.seconds:,.1f} s, {group.rounds:,} rounds of commits")


def verify(
    store: StoreUri,
    fast: Annotated[bool, Option("--fast", help="Skip payload checksums: check metadata and references.")] = False,
    as_json: AsJson = False,
) -> None:
    """Audit a store row by row: counts, digests, references, payload checksums.

    Exit code 0 when it is sound, 1 when something is wrong. Nothing is changed. Rows left over by interrupted commits
    are counted; no query returns them, and they are harmless.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.store.maintain.verify_apart import verify_apart

    audit = verify_apart(open_store(store), deep=not fast)
    if as_json:
        print_json({"ok": audit.ok, **plain(audit)})
    else:
        checked = [[name, rows, audit.orphans.get(name, 0)] for name, rows in audit.checked.items()]
        print_fitting(("table", "rows checked", "left over"), checked)
        if audit.findings:
            findings = [[f.table, f.row, f.uid, f.problem] for f in audit.findings]
            print_fitting(("table", "row", "uid", "problem"), findings)
        note("sound" if audit.ok else f"{len(audit.findings)} wrong; restore them from a copy, or score them again")
    if not audit.ok:
        raise Exit(AUDIT_FAILED)


def compact(
    store: StoreUri,
    now: Annotated[
        bool, Option("--now", help="Drop recent versions too, except those that a process has open.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge small files and drop versions no snapshot pins; no row changes.

    Prints for each table what was freed, and why the rest stays: which snapshot pins it, or which process reads it.
    """
    from mopd_dataplane import open_store

    opened = open_store(store)
    name_unfinished(opened)
    facts = opened.compact(now=now)
    if as_json:
        print_json(plain(facts))
        return
    rows = [
        [name, row["files_merged"], row["versions_dropped"], size(row["bytes_freed"]), size(row["bytes"])]
        for name, row in facts.items()
    ]
    print_fitting(("table", "files merged", "versions dropped", "freed", "size"), rows)
    for name, row in facts.items():
        listed = sorted((reason for reason in row["kept"] if reason["bytes"]), key=lambda reason: -reason["bytes"])
        if listed:
            reasons = [f"{size(reason['bytes'])} ({reason['why']})" for reason in listed[:MOST_REASONS]]
            if rest := listed[MOST_REASONS:]:
                reasons.append(
                    f"{size(sum(reason['bytes'] for reason in rest))} for {len(rest)} more (--json names them)"
                )
            note(f"{name} keeps {', '.join(reasons)}")


def upgrade(
    source: Annotated[str, Argument(metavar="SRC", help="Store of format 1; it is never changed.")],
    target: Annotated[str, Argument(metavar="DST", help="Folder of the new store of format 2.")],
) -> None:
    """Copy a store of format 1 into a store of format 2, with snapshots, plans, checkpoints and the token log.

    Samples keep their uids, rows their ids and versions their numbers. Metadata and tokens are copied, hidden states
    and weights are hard-linked where possible. The copy is verified before it opens as a store. After a kill, the same
    command continues.
    """
    from mopd_dataplane.run.upgrade import upgrade_store

    for part in upgrade_store(source, target):
        note(f"{part}: done")
    note(f"{target} is a store of today's format; {source} is as it was")


def copy(
    source: StoreUri,
    target: Annotated[str, Argument(metavar="DST", help="Folder or URI of the copy; nothing may be there yet.")],
    where: Annotated[
        str, Option("--where", help="Only samples that meet this condition, \"domain = 'math' and reward > 0\".")
    ] = "",
) -> None:
    """Copy a store, or samples of it with everything that refers to them, into a folder or onto an object store.

    A whole store is copied as it is, with snapshots, plans, checkpoints and the token log: an interrupted job continues
    in the copy. A job may run meanwhile. With --where, tokens, signals, rewards and labels are copied with their
    samples, and prompts without a copied sample are left out; rows get new ids, so plans, snapshots, checkpoints and
    the token log, which name rows, are left out too. Every checksum is compared before the copy opens as a store. After
    a kill, the same command continues.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.run.whole_copy import copy_whole
    from mopd_dataplane.store.maintain.copy_samples import copy_samples

    opened = open_store(source)
    name_unfinished(opened)
    for part in copy_samples(opened, target, where) if where else copy_whole(opened, target):
        note(part)
    if where:
        note(f"left behind, because rows are numbered anew: {LEFT_BEHIND}")
    note(f"{target} is a store; {source} is as it was")


def delete(
    store: StoreUri,
    where: Annotated[str, Option("--where", help="Samples to delete: a condition, \"prompt_id = 'p17'\".")],
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be deleted; change nothing.")] = False,
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete samples with everything that refers to them; `compact --now` then frees their bytes on disk.

    A prompt is deleted with the last of its samples, and its held-out answers with it. If no sample meets the
    condition, it is applied to the table `prompts` instead: prompts that meet it and have no samples are deleted.
    Snapshots that hold one of them are released. Plans stay, since they hold numbers only; those that used the samples,
    and the policies trained on them, are listed. After a kill, the same command continues.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.query.ancestry import tree_of
    from mopd_dataplane.run import delete as deleting

    opened = open_store(store)
    continued = 0
    for deletion in [] if dry_run else opened.deletions.unfinished():
        if deletion.where != where:
            note(_unfinished(opened, deletion))
            continue
        note(f"deletion of {deletion.began} goes on: {len(deletion.uids):,} samples, {len(deletion.prompts):,} prompts")
        for part in deleting.resume(opened, deletion):
            note(part)
        continued += 1
    try:
        chosen, facts = deleting.preview(opened, where)
    except UnknownNameError:
        if not continued:
            raise
        if as_json:
            print_json({"deleted": True, "continued": continued})
        return
    if not as_json:
        _show_preview(facts)
    if not dry_run:
        _confirm(f"delete {facts.samples:,} samples and {facts.prompts:,} prompts of {opened.uri} for good?", yes)
        for part in deleting.delete(opened, chosen, where):
            note(part)
        note(f"deleted; their bytes leave the disk with: mopd store compact {opened.uri} --now")
        others = [other.folder for other in tree_of(opened) if not other.is_this]
        if others:
            note(f"not deleted from the stores that share files with it, which may have them too: {', '.join(others)}")
    if as_json:
        print_json({"deleted": not dry_run, "continued": continued, **plain(facts)})


def repair(store: StoreUri, as_json: AsJson = False) -> None:
    """Remove rows of deleted samples and prompts that a killed writer left behind; `store verify` names them.

    Deletions that an earlier version of this package left unfinished are finished. Any other unfinished deletion is
    named, and continues with its own command.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.run import delete as deleting

    opened = open_store(store)
    name_unfinished(opened)
    parts = list(deleting.repair(opened))
    if as_json:
        print_json({"removed": parts})
        return
    for part in parts:
        note(part)
    note("repaired" if parts else "no row of a deleted sample or prompt is left")


def name_unfinished(store: Store) -> None:
    """Tell the user which deletions are unfinished, and how to finish them."""
    for deletion in store.deletions.unfinished():
        note(_unfinished(store, deletion))


def _unfinished(store: Store, deletion: Deletion) -> str:
    command = f"mopd store delete {store.uri} --where {shlex.quote(deletion.where)}"
    return (
        f"a deletion of {len(deletion.uids):,} samples and {len(deletion.prompts):,} prompts, begun {deletion.began}, "
        f"is not finished; unless another process is at it, finish it: "
        f"{command if deletion.where else f'mopd store repair {store.uri}'}"
    )


def _show_preview(facts: Preview) -> None:
    print_fitting(("table", "rows that go"), list(facts.rows.items()))
    if facts.uses:
        columns = ("stage", "window", "samples", "steps", "trained on them from version")
        uses = [
            [u.stage, u.window, u.samples, u.steps, "none" if u.first_version is None else u.first_version]
            for u in facts.uses
        ]
        print_fitting(columns, uses)
        note("policies stay as they are: each later version, and what was trained from it, has seen them too")
    if facts.snapshots:
        note(f"snapshots that hold them and are given up: {', '.join(facts.snapshots)}")


def _confirm(question: str, yes: bool) -> None:
    """Raise InputError unless somebody says yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{question} There is no terminal to ask on: give --yes, or look first with --dry-run")
    if not confirm(question, err=True):
        raise InputError("nothing was deleted")


def add_to(app: Typer) -> None:
    group = Typer(no_args_is_help=True, rich_markup_mode="rich")
    register(group, info, "mopd store info runs/quickstart")
    register(group, verify, "mopd store verify runs/quickstart --json")
    register(group, compact, "mopd store compact runs/quickstart --now")
    register(group, copy, "mopd store copy runs/quickstart s3://bucket/math --where \"domain = 'math'\"")
    register(group, delete, "mopd store delete runs/quickstart --where \"stage = 'student'\" --dry-run")
    register(group, repair, "mopd store repair runs/quickstart")
    register(group, upgrade, "mopd store upgrade runs/old runs/new")
    app.add_typer(group, name="store", rich_help_panel="Answers", help="Inspect, audit and tidy a store.")
