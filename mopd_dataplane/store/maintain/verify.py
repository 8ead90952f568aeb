"""The audit: checks that every reference leads to the right row and that all bytes are as committed. Changes
nothing."""

from collections.abc import Generator, Iterator, Mapping
from functools import partial

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format.dataset_format import FREED
from mopd_dataplane.store.format.manifests import crc_of_manifest
from mopd_dataplane.store.format.row_ids import fragment_ids, row_ids
from mopd_dataplane.store.linked.references import ROW_BITS
from mopd_dataplane.store.linked.sources import Sources
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.deletion_records import Deletions
from mopd_dataplane.store.maintain.verify_alignment import audit_alignments
from mopd_dataplane.store.maintain.verify_deleted import (
    Deleted,
    audit_files_of_deleted,
    audit_records,
    audit_rows_of_deleted,
)
from mopd_dataplane.store.maintain.verify_files import audit_files
from mopd_dataplane.store.maintain.verify_linked import audit_linked_samples, audit_linked_signals, own_rows
from mopd_dataplane.store.maintain.verify_payload import (
    LENGTHS,
    UNKNOWN,
    Lengths,
    audit_payload,
    audit_token_stats,
    length_columns,
    signal_lengths,
    signal_payload,
    token_lengths,
    token_payload,
)
from mopd_dataplane.store.maintain.verify_report import Finding, VerifyReport, met
from mopd_dataplane.store.maintain.verify_rows import audit_columns, audit_rows, files_of
from mopd_dataplane.store.read.row_reader import scored_rows, take_offsets
from mopd_dataplane.store.read.snapshot import tags_of
from mopd_dataplane.store.read.tags import tagged
from mopd_dataplane.tables import TABLES, signal_table

_HEADERS = {"topk": ["k", "topk_source"], "hidden": ["codec", "rows", "row_bytes"]}


def verify(location: StoreLocation, tables: Mapping[str, Table], sources: Sources, *, deep: bool) -> VerifyReport:
    """See Store.verify. Every kind of damage becomes a finding; an audit does not fail.

    sources: other stores, which have the payload of linked samples.
    """
    report = VerifyReport()
    opened: dict[str, lance.LanceDataset] = {}
    read: dict[str, set[str]] = {}
    deletions = Deletions(location)

    def audit(name: str, needs: set[str], check: partial[Iterator[Finding]]) -> None:
        """Run a check unless one of the tables it needs cannot be opened."""
        if needs <= opened.keys():
            report.findings.extend(met(name, check))

    for name, table in tables.items():
        audit(name, set(), partial(_newest, table, opened, report.checked))
        audit(name, {name}, partial(_rows, table, opened, read))
        audit(name, {name}, partial(_duplicates, name, opened, table.spec.key))
    audit("samples", {"samples", "tokens"}, partial(_samples, opened, deep))
    audit("samples", {"samples", "tokens"}, partial(audit_linked_samples, sources, opened, deep))
    audit("scores", {"scores", "samples", "teachers"}, partial(_scores, location, opened, deep))
    audit("scores", {"scores", "teachers"}, partial(audit_linked_signals, sources, opened, deep))
    if deep:
        audit("token_stats", {"token_stats", "samples"}, partial(_token_stats, opened))
    audit("rewards", {"rewards", "samples"}, partial(_rewards, opened))
    audit("plans", {"plans", "samples"}, partial(_plans, opened, deletions))
    audit("deletions", set(), partial(audit_records, deletions))
    deleted: list[Deleted] = []
    audit("deletions", set(), partial(_find_deleted, deletions, deleted))
    for name in tables if deleted else ():
        audit(name, {name}, partial(_deleted_rows, name, opened, deleted))
    audit("teachers", {"teachers"}, partial(_heads, location, opened, deep))
    audit("files", set(), partial(_files, location, deep))
    if deep and deleted:
        audit("files", set(), partial(audit_files_of_deleted, location, deleted[0]))
    if deep:
        audit("snapshots", set(), partial(_pins, location, tables, read))
    audit("orphans", set(), partial(_count_orphans, opened, report.orphans))
    return report


def _newest(table: Table, opened: dict[str, lance.LanceDataset], checked: dict[str, int]) -> Iterator[Finding]:
    """Check that the newest version opens, with the manifest that was acknowledged."""
    dataset = table.open()
    checked[table.name] = dataset.count_rows()
    opened[table.name] = dataset
    if problem := table.manifest_damage():
        yield Finding(table.name, -1, "", problem)


def _rows(table: Table, opened: Mapping[str, lance.LanceDataset], read: dict[str, set[str]]) -> Iterator[Finding]:
    """Check that rows of metadata are as committed; payload is read with the metadata that refers to it, and here as
    far as its columns fit together."""
    dataset = opened[table.name]
    read[table.name] = {file for fragment in dataset.get_fragments() for file in files_of(fragment)}
    if table.spec.heavy:
        yield from audit_columns(table.name, dataset)
    else:
        yield from audit_rows(table.name, dataset, table.spec.key)


def _pins(location: StoreLocation, tables: Mapping[str, Table], read: dict[str, set[str]]) -> Iterator[Finding]:
    """Check that every pinned version is as it was pinned; files that only it names are read too.

    read: data files of each table that were audited already, extended here.
    """
    for tag in tags_of(location):
        yield from met(f"snapshots/{tag}.json", partial(_pin, location, tables, tag, read))


def _pin(
    location: StoreLocation, tables: Mapping[str, Table], tag: str, read: dict[str, set[str]]
) -> Iterator[Finding]:
    pinned = location.read_json(f"snapshots/{tag}.json") or {}
    opened: dict[str, lance.LanceDataset] = {}
    for name, version in pinned.get("versions", {}).items():
        crc = pinned.get("manifests", {}).get(name)
        if name in tables:
            yield from met(name, partial(_pinned, location, tables[name], int(version), crc, tag, opened))
        else:
            yield Finding(name, -1, "", f"version {version} of it is pinned, and it is not there")
    for name in opened:
        yield from met(name, partial(_fresh, tables[name], opened, read))


def _pinned(
    location: StoreLocation,
    table: Table,
    version: int,
    crc: str | None,
    tag: str,
    opened: dict[str, lance.LanceDataset],
) -> Iterator[Finding]:
    """Check that the pinned version of a table opens with the manifest that was pinned, and that its tag is in
    place."""
    if crc is not None and location.root is not None:
        actual = f"{crc_of_manifest(location.root / table.name, version):08x}"
        if actual != crc:
            yield Finding(table.name, -1, "", f"manifest of version {version} has crc32c {actual}, {crc} was pinned")
    opened[table.name] = table.open(version)
    at = tagged(opened[table.name]).get(tag)
    if at != version:
        said = "is gone" if at is None else f"is at version {at}"
        yield Finding(table.name, -1, "", f"tag {tag!r} {said}, its snapshot pins version {version}")


def _fresh(table: Table, opened: Mapping[str, lance.LanceDataset], read: dict[str, set[str]]) -> Iterator[Finding]:
    """Check the rows of files that no earlier version has named."""
    seen, dataset = read.setdefault(table.name, set()), opened[table.name]
    fresh = [fragment for fragment in dataset.get_fragments() if not set(files_of(fragment)) <= seen]
    if not fresh:
        return
    if table.spec.heavy:
        yield from audit_columns(table.name, dataset, seen)
        rows = {int(row) for fragment in fresh for row in fragment_ids(fragment).tolist()}
        yield from _pinned_payload(table.name, opened, rows)
    else:
        yield from audit_rows(table.name, dataset, table.spec.key, seen)
    seen.update(file for fragment in fresh for file in files_of(fragment))


def _pinned_payload(name: str, opened: Mapping[str, lance.LanceDataset], rows: set[int]) -> Iterator[Finding]:
    """Check some payload rows of a pinned version, by the metadata of the same snapshot."""
    dataset = opened[name]
    teacher, _, kind = name.removeprefix("signals/").partition("/")
    if name == "tokens" and "samples" in opened:
        samples = opened["samples"]
        metadata = samples.to_table(columns=["uid", "payload_row", "payload_crc", *length_columns(samples)])
        payload = token_payload(dataset)
        lengths = token_lengths(payload.fields, metadata)
    elif kind and {"samples", "scores"} <= opened.keys():
        metadata, payload = scored_rows(opened["scores"], teacher, kind), signal_payload(dataset, kind)
        lengths = signal_lengths(kind, metadata, *_of_samples(opened["samples"], metadata))
    else:
        return
    points = metadata["payload_row"].to_numpy()
    there = np.isin(points, np.array(sorted(rows)))
    some = metadata.filter(pa.array(there))
    places = yield from _echo(name, some, name, dataset, "payload_row", points[there])
    if kind == "hidden":
        places = places[_not_freed(dataset, some, places)]
    yield from audit_payload(name, some, places, payload, lengths[:, there])


def _files(location: StoreLocation, deep: bool) -> Iterator[Finding]:
    for name, problem in audit_files(location, deep=deep):
        yield Finding(name, -1, "", problem)


def _duplicates(name: str, opened: Mapping[str, lance.LanceDataset], key: tuple[str, ...]) -> Iterator[Finding]:
    """Find keys that more than one row has; payload tables may hold orphans of equal uid."""
    if TABLES.get(name) is None or TABLES[name].heavy:
        return
    rows = opened[name].to_table(columns=list(key), with_row_id=True)
    counted = rows.group_by(list(key)).aggregate([("_rowid", "count"), ("_rowid", "max")])
    for row in counted.filter(pa.compute.greater(counted["_rowid_count"], 1)).to_pylist():
        shown = ", ".join(str(row[part]) for part in key)
        yield Finding(name, row["_rowid_max"], str(row[key[0]]), f"key ({shown}) is in {row['_rowid_count']} rows")


def _samples(opened: Mapping[str, lance.LanceDataset], deep: bool) -> Iterator[Finding]:
    """Check that each sample's payload row belongs to it; deep: with the committed bytes and lengths."""
    columns = ["uid", "payload_row", "payload_crc", *length_columns(opened["samples"])]
    samples, numbers = opened["samples"].to_table(columns=columns), row_ids(opened["samples"]).ids()
    fitting = yield from _lengths(samples, numbers)
    own = own_rows(samples)
    samples, numbers, fitting = samples.take(pa.array(own)), numbers[own], fitting[own]
    sound = yield from _echo("samples", samples, "tokens", opened["tokens"], "payload_row", numbers)
    if deep:
        payload = token_payload(opened["tokens"])
        lengths = np.where(fitting, token_lengths(payload.fields, samples), UNKNOWN)
        yield from audit_payload("tokens", samples, sound, payload, lengths)


def _lengths(samples: pa.Table, numbers: NDArray[np.int64]) -> Generator[Finding, None, NDArray[np.bool_]]:
    """Check P + R = L and 0 <= M <= R. Returns whether the lengths of each sample fit together: [n] bool."""
    prompt, response, total, scored = (samples[name].to_numpy() for name in LENGTHS)
    fitting: NDArray[np.bool_] = (prompt + response == total) & (scored <= response) & (scored >= 0) & (prompt >= 0)
    for row in np.flatnonzero(~fitting).tolist():
        problem = (
            f"prompt_len {prompt[row]}, response_len {response[row]}, total_len {total[row]} and loss_tokens "
            f"{scored[row]} do not fit together"
        )
        yield Finding("samples", int(numbers[row]), samples["uid"][row].as_py(), problem)
    return fitting


def _of_samples(samples: lance.LanceDataset, scores: pa.Table) -> tuple[Lengths, Lengths]:
    """Return R and M, each [n], of the samples that rows of `scores` name; UNKNOWN for a row that names none."""
    offsets = row_ids(samples).find(scores["sample_row"].to_numpy())
    there = offsets >= 0
    metadata = take_offsets(samples, offsets[there], ["response_len", "loss_tokens"])
    response, trained = np.full((2, len(offsets)), UNKNOWN, np.int64)
    response[there], trained[there] = metadata["response_len"].to_numpy(), metadata["loss_tokens"].to_numpy()
    return response, trained


def _scores(location: StoreLocation, opened: Mapping[str, lance.LanceDataset], deep: bool) -> Iterator[Finding]:
    """Check that each score names its sample, its teacher as stored, and a payload row that holds its signal."""
    scores, numbers = opened["scores"].to_table(), row_ids(opened["scores"]).ids()
    named = yield from _echo("scores", scores, "samples", opened["samples"], "sample_row", numbers)
    response, trained = _of_samples(opened["samples"], scores)
    covered = scores["rows"].to_numpy()
    for row in named[covered[named] != trained[named]].tolist():
        problem = f"covers {covered[row]} tokens, its sample has {trained[row]} loss tokens"
        yield Finding("scores", int(numbers[row]), scores["uid"][row].as_py(), problem)
    teachers = opened["teachers"].to_table(columns=["name", "weights_digest"]).to_pydict()
    digests = dict(zip(teachers["name"], teachers["weights_digest"], strict=True))
    own = own_rows(scores)
    by = ["teacher", "kind", "teacher_digest"]
    placed = scores.select(by).append_column("place", pa.array(np.arange(scores.num_rows)))
    groups = placed.group_by(by).aggregate([("place", "list")])
    for teacher, kind, digest, places in zip(*(groups[column] for column in (*by, "place_list")), strict=True):
        teacher, kind, digest = teacher.as_py(), kind.as_py(), digest.as_py()
        name, chosen = signal_table(teacher, kind), np.intersect1d(places.values.to_numpy(), own)
        if digests.get(teacher) != digest:
            problem = f"scored by {teacher!r} with digest {digest}, but the table teachers has {digests.get(teacher)}"
            yield from (Finding("scores", int(numbers[at]), scores["uid"][at].as_py(), problem) for at in chosen)
        if name not in opened and len(chosen):
            problem = f"points to {name!r}, which cannot be read"
            yield from (Finding("scores", int(numbers[at]), scores["uid"][at].as_py(), problem) for at in chosen)
        if name not in opened or not len(chosen):
            continue
        some = scores.take(pa.array(chosen))
        sound = yield from _echo("scores", some, name, opened[name], "payload_row", numbers[chosen])
        yield from _headers(name, opened[name], some, sound, kind)
        if deep:
            there = sound if kind != "hidden" else sound[_not_freed(opened[name], some, sound)]
            lengths = signal_lengths(kind, some, response[chosen], trained[chosen])
            yield from audit_payload(name, some, there, signal_payload(opened[name], kind), lengths)
        if deep and kind == ALIGNMENT:
            yield from audit_alignments(location, opened, teacher, some, sound)


def _headers(
    name: str, signals: lance.LanceDataset, scores: pa.Table, places: NDArray[np.int64], kind: str
) -> Iterator[Finding]:
    """Check that the headers of a payload row agree with its score."""
    if kind not in _HEADERS or not len(places):
        return
    points = scores["payload_row"].to_numpy()[places]
    there = signals.to_table(columns=_HEADERS[kind]).take(pa.array(row_ids(signals).offsets(points))).to_pylist()
    said = scores.select(["uid", "codec", "rows", "bytes"]).take(pa.array(places)).to_pylist()
    for point, row, score in zip(points.tolist(), there, said, strict=True):
        if kind == "topk":
            fits = row["topk_source"] in ("teacher", "student") and score["rows"] * row["k"] * 8 == score["bytes"]
        elif row["codec"] == FREED:
            fits = row["rows"] == score["rows"] and row["row_bytes"] == 0
        else:
            fits = (row["codec"], row["rows"]) == (score["codec"], score["rows"])
            fits = fits and row["rows"] * row["row_bytes"] == score["bytes"]
        if not fits:
            yield Finding(name, point, score["uid"], f"holds {row}, but its row of `scores` says {score}")


def _not_freed(hidden: lance.LanceDataset, scores: pa.Table, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether the states to which these rows of `scores` point are still there: [n] bool."""
    offsets = row_ids(hidden).offsets(scores["payload_row"].to_numpy()[places])
    codecs = hidden.to_table(columns=["codec"])["codec"].take(pa.array(offsets))
    return np.asarray(pa.compute.not_equal(codecs, FREED))


def _token_stats(opened: Mapping[str, lance.LanceDataset]) -> Iterator[Finding]:
    yield from audit_token_stats(opened["token_stats"], opened["samples"])


def _rewards(opened: Mapping[str, lance.LanceDataset]) -> Iterator[Finding]:
    rewards, numbers = opened["rewards"].to_table(columns=["uid", "sample_row"]), row_ids(opened["rewards"]).ids()
    yield from _echo("rewards", rewards, "samples", opened["samples"], "sample_row", numbers)


def _find_deleted(deletions: Deletions, deleted: list[Deleted]) -> Iterator[Finding]:
    """Collect the deleted samples and prompts, for the searches that follow."""
    deleted.append(Deleted(deletions))
    yield from ()


def _deleted_rows(name: str, opened: Mapping[str, lance.LanceDataset], deleted: list[Deleted]) -> Iterator[Finding]:
    yield from audit_rows_of_deleted(name, opened[name], deleted[0])


def _plans(opened: Mapping[str, lance.LanceDataset], deletions: Deletions) -> Iterator[Finding]:
    """Check that each planned sample exists or was deleted."""
    ids, gone = row_ids(opened["samples"]), deletions.rows()
    plans = opened["plans"].to_table(columns=["stage", "window", "sample_rows"], with_row_id=True)
    for plan in plans.to_pylist():
        planned = np.asarray(plan["sample_rows"], np.int64)
        absent = planned[(ids.find(planned) < 0) & ~np.isin(planned, gone)]
        if len(absent):
            problem = f"window {plan['window']} plans sample row {absent[0]}, `samples` has {ids.total} rows"
            yield Finding("plans", plan["_rowid"], plan["stage"], problem)


def _heads(location: StoreLocation, opened: Mapping[str, lance.LanceDataset], deep: bool) -> Iterator[Finding]:
    """Check that each teacher's LM head file exists (an import may lack one); deep: with the recorded digest."""
    recorded = opened["teachers"].to_table(columns=["name", "head_file", "head_digest"], with_row_id=True)
    for teacher in recorded.to_pylist():
        name, row = teacher["head_file"], teacher["_rowid"]
        if not name:
            continue
        if not location.has(name):
            yield Finding("teachers", row, teacher["name"], f"head file {name} is missing")
        elif deep and (digest := location.sha256(name)) != teacher["head_digest"]:
            problem = f"head file {name} has sha256 {digest}, but {teacher['head_digest']} was recorded"
            yield Finding("teachers", row, teacher["name"], problem)


def _count_orphans(opened: Mapping[str, lance.LanceDataset], counts: dict[str, int]) -> Iterator[Finding]:
    """Count payload rows to which no metadata row points, by table: no findings, since they are harmless."""
    own = f"payload_row < {1 << ROW_BITS}"
    used = {"tokens": opened["samples"].count_rows(own)} if {"samples", "tokens"} <= opened.keys() else {}
    for name in opened:
        folder, _, rest = name.partition("/")
        if folder == "signals" and "scores" in opened:
            teacher, _, kind = rest.partition("/")
            used[name] = opened["scores"].count_rows(f"teacher = '{teacher}' and kind = '{kind}' and {own}")
    left = {name: opened[name].count_rows() - count for name, count in used.items()}
    counts.update({name: count for name, count in left.items() if count})
    yield from ()


def _echo(
    name: str, rows: pa.Table, target_name: str, target: lance.LanceDataset, pointer: str, numbers: NDArray[np.int64]
) -> Generator[Finding, None, NDArray[np.int64]]:
    """Check that the row each pointer names has the same uid. Returns the indices of `rows` that are sound.

    numbers: [n] row id of each of `rows`.
    """
    points = rows[pointer].to_numpy()
    total, offsets = target.count_rows(), row_ids(target).find(points)
    inside = offsets >= 0
    uids = rows["uid"].to_numpy(zero_copy_only=False)
    there = target.to_table(columns=["uid"])["uid"].take(pa.array(np.maximum(offsets, 0))) if total else uids
    same = inside & (np.asarray(there) == uids)
    for row in np.flatnonzero(~same).tolist():
        detail = f"which holds {there[row]}" if inside[row] else f"which has {total} rows"
        problem = f"{pointer} points to row {points[row]} of {target_name!r}, {detail}"
        yield Finding(name, int(numbers[row]), uids[row], problem)
    return np.flatnonzero(same)
