"""Table name -> Lance schema, and the refusal of datasets whose format does not match this version."""

import json
import re
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import lance
import pyarrow as pa

from mopd_dataplane.base.sealed_json import SEAL, unseal
from mopd_dataplane.errors import InputError, MismatchError, UnknownNameError, nearest
from mopd_dataplane.records import Teacher
from mopd_dataplane.store.location import MARK, StoreLocation
from mopd_dataplane.tables import FORMAT_VERSION, QUEUE, SIGNALS, TABLES, TableSpec, plugin_signal, signal_table

FORMAT_KEY = b"mopd:format_version"
TABLE_KEY = b"mopd:table"
PRIMARY_KEY = b"lance-schema:unenforced-primary-key"
PRIMARY_KEY_POSITION = b"lance-schema:unenforced-primary-key:position"
FREED = "freed"
"""Codec in rows of hidden states that were freed; see free_hidden.py."""
FORKED_FROM = "forked_from"
"""Key of a store's mark that names the run and the point that it was forked from."""
TEACHER_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def spec_of(name: str) -> TableSpec:
    """Return the spec of a dataset name. Raises UnknownNameError naming the nearest table."""
    if name in TABLES:
        return TABLES[name]
    folder, _, rest = name.partition("/")
    teacher, _, kind = rest.partition("/")
    if folder == "signals" and TEACHER_NAME.fullmatch(teacher) and kind:
        return SIGNALS.get(kind) or plugin_signal(kind)
    if folder == "queues" and TEACHER_NAME.fullmatch(rest):
        return QUEUE
    names = [*TABLES, *(f"signals/<teacher>/{kind}" for kind in SIGNALS), "queues/<name>"]
    raise UnknownNameError(f"no table {name!r}: {nearest(name, names)}")


def sql_name(name: str) -> str:
    """Return the name of a dataset inside SQL.

    >>> sql_name("signals/math-7b/topk")
    'signals_math-7b_topk'
    """
    return name.replace("/", "_")


def is_table(name: str) -> bool:
    """Check if a dataset may have this name: a store's folders may hold foreign files."""
    try:
        spec_of(name)
    except UnknownNameError:
        return False
    return True


def check_teacher(teacher: Teacher) -> None:
    """Check that a teacher's name can name a folder and that its head file is inside the store. Raises InputError."""
    if not TEACHER_NAME.fullmatch(teacher.name):
        raise InputError(
            f"teacher name {teacher.name!r:.80}: 1 to 64 of a-z, 0-9, '_', '.', '-', a letter or digit first"
        )
    path = PurePosixPath(teacher.head_file)
    if path.is_absolute() or ".." in path.parts or "\0" in teacher.head_file:
        raise InputError(f"teacher {teacher.name!r}: head file {teacher.head_file!r:.80} does not lie inside the store")


def lance_schema(spec: TableSpec, name: str) -> pa.Schema:
    """Return the schema on disk: key columns marked, blob columns translated, the format version recorded."""
    fields = [_on_disk(field, spec) for field in spec.stored]
    return pa.schema(fields, {FORMAT_KEY: str(FORMAT_VERSION).encode(), TABLE_KEY: name.encode()})


def blob_columns(spec: TableSpec) -> tuple[str, ...]:
    """Return the columns whose bytes are outside the rows and are read by range."""
    return tuple(field.name for field in spec.schema if field.metadata.get(b"blob") == b"v2")


def _on_disk(field: pa.Field, spec: TableSpec) -> pa.Field:
    metadata = dict(field.metadata)
    if metadata.pop(b"blob", None) == b"v2":
        blob = lance.blob_field(
            field.name, nullable=field.nullable, dedicated_size_threshold=1 << 40, pack_file_size_threshold=1 << 30
        )
        return blob.with_metadata({**metadata, **blob.metadata})
    if field.name in spec.key:
        metadata[PRIMARY_KEY] = b"true"
        metadata[PRIMARY_KEY_POSITION] = str(spec.key.index(field.name) + 1).encode()
    return field.with_metadata(metadata)


def check_format(version: int, where: str) -> None:
    """Check the format version of a store or dataset. Raises MismatchError naming both versions."""
    if version == FORMAT_VERSION:
        return
    step = "upgrade mopd-dataplane" if version > FORMAT_VERSION else "run `mopd store upgrade SRC DST`, which copies it"
    raise MismatchError(f"{where} has format version {version}, this version reads {FORMAT_VERSION}; {step}")


def check_dataset(dataset: lance.LanceDataset, spec: TableSpec) -> None:
    """Check that a dataset has this format, stable row ids, and these columns, apart from further nullable ones.

    Raises MismatchError if not.
    """
    where, schema = dataset.uri, dataset.schema
    metadata = schema.metadata or {}
    if FORMAT_KEY not in metadata:
        raise MismatchError(f"{where} has no {FORMAT_KEY.decode()} in its schema metadata: mopd did not write it")
    check_format(int(metadata[FORMAT_KEY]), where)
    expected = lance_schema(spec, spec.name)
    problems = [text for field in expected if (text := _column_problem(field, schema))]
    unknown = (field.name for field in schema if field.name not in expected.names and not field.nullable)
    problems += [f"column {name!r} is not known and not nullable" for name in unknown]
    if problems:
        raise MismatchError(f"{where} does not have the columns of {spec.name!r}: " + "; ".join(problems))
    if not dataset.has_stable_row_ids:
        raise MismatchError(f"{where} was made without stable row ids; run `mopd store upgrade SRC DST`")


def read_mark(location: StoreLocation) -> dict[str, Any] | None:
    """Read store.json. Returns None without one. Raises MismatchError and DamagedError as Store.open does."""
    content = location.read(MARK)
    if content is None:
        return None
    version = FORMAT_VERSION
    with suppress(ValueError, TypeError, LookupError, RecursionError):
        unsealed = json.loads(content)  # the mark of the first format has no checksum
        if SEAL not in unsealed and type(unsealed["format_version"]) is int:
            version = unsealed["format_version"]
    check_format(version, location.uri)
    mark = unseal(content, location.of(MARK))
    check_format(int(mark["format_version"]), location.uri)
    return mark


def write_mark(location: StoreLocation, **more: object) -> str:
    """Write store.json, the last file of a new store, with a random id; durable on return.

    Returns the id of the store: that of another process if both created it at the same time.
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    mark = {"format_version": FORMAT_VERSION, "created": created, "uuid": str(uuid.uuid4())} | more
    if not location.create_json(MARK, mark):
        mark = location.read_json(MARK) or mark
    return str(mark["uuid"])


def signal_tables(location: StoreLocation) -> list[str]:
    """Return the names of the tables of signals in a store."""
    return [
        name
        for teacher in location.children("signals")
        for kind in location.children(f"signals/{teacher}")
        if is_table(name := signal_table(teacher, kind))
    ]


def _column_problem(field: pa.Field, schema: pa.Schema) -> str:
    if field.name not in schema.names:
        return "" if field.nullable else f"column {field.name!r} is missing"
    have = schema.field(field.name)
    if have.type != field.type or have.nullable != field.nullable:
        return f"column {field.name!r} is {_shape(have)}, expected {_shape(field)}"
    if have.metadata and (PRIMARY_KEY in have.metadata) != (PRIMARY_KEY in (field.metadata or {})):
        return f"column {field.name!r} differs in its primary-key mark"
    return ""


def _shape(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"
