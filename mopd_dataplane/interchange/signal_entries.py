"""Teachers' signals of a sample, as entries of an exported row and back.

An entry is complete in itself: it names its teacher with every digest, so that a row may be copied from file to file.
"""

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mopd_dataplane.errors import InputError, UnknownNameError, nearest, require_known
from mopd_dataplane.fields import PLUGIN_COLUMN, SIGNAL_KINDS, Field, arguments, of_signal, value
from mopd_dataplane.interchange.row_files import Fields, floats, integer, integers, number, objects, stored, text
from mopd_dataplane.records import Signal, Snapshot, Teacher
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import FREED, check_teacher
from mopd_dataplane.tables import TEACHERS

_ARRAYS = tuple(field for kind in SIGNAL_KINDS for field in of_signal(kind))
_FACTS = ("mean_reverse_kl", "logprob_std")
_OF_TEACHER = [field for field in TEACHERS.schema if field.name not in ("head_file", "created_at")]

ENTRY = pa.struct(
    [
        ("teacher", pa.struct([(field.name, field.type) for field in _OF_TEACHER])),
        ("kind", pa.string()), ("codec", pa.string()), ("topk_source", pa.string()), ("width", pa.int32()),
        *(
            (field.name, pa.large_binary() if field.blob else pa.list_(pa.from_numpy_dtype(np.dtype(field.dtype))))
            for field in _ARRAYS
        ),
        (PLUGIN_COLUMN, pa.list_(pa.float32())),
        *((name, pa.float32()) for name in _FACTS),
    ]
)  # fmt: skip
"""One signal of one sample. width: number of values per position (K, or bytes of a hidden state), if there are several;
arrays are flat, row after row. values: [R], for a kind of another package."""


@dataclass(frozen=True)
class TeacherSignal:
    """A signal of an imported row, with its teacher.

    Example: TeacherSignal(Teacher(name="reference", …), Signal(uid="", sample_row=-1, kind="logprob", logprob=…)).
    """

    teacher: Teacher
    """The teacher, with empty `head_file`: its LM head, if any, is beside the imported file."""
    signal: Signal
    """The signal; `uid` and `sample_row` are filled in once the sample has them."""

    @property
    def nbytes(self) -> int:
        """Size of its arrays in bytes."""
        return sum(np.asarray(value(self.signal, f.name)).nbytes for f in of_signal(self.signal.kind))


class SignalsOut:
    """Reads the exported kinds of signals of a store, as entries."""

    def __init__(self, store: Store, snapshot: Snapshot, kinds: Sequence[str], teachers: Sequence[str]) -> None:
        """Open the signals. kinds: of SIGNAL_KINDS, or another package's in the store. teachers: names; none means all.

        Raises UnknownNameError for a teacher, InputError for a kind.
        """
        by_name = store.teachers()
        for name in teachers:
            if name not in by_name:
                raise UnknownNameError(f"no teacher {name!r} in {store.uri}: {nearest(name, by_name)}")
        self._store, self._snapshot = store, snapshot
        self.kinds = tuple(kinds)
        self.teachers = {name: by_name[name] for name in (teachers or by_name)}
        self._facts: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        columns = ["sample_row", "teacher", "kind", *_FACTS]
        for row in store.table("scores", columns, snapshot=snapshot).to_pylist() if kinds else ():
            key = row.pop("teacher"), row.pop("kind")
            self._facts.setdefault(key, {})[row.pop("sample_row")] = row
        there = dict.fromkeys((*SIGNAL_KINDS, *(kind for _, kind in self._facts)))
        for kind in kinds:
            require_known(kind, there, "no signal", InputError)

    def has(self, teacher: str, kind: str) -> bool:
        """Check if a teacher has a signal of this kind for any sample."""
        return (teacher, kind) in self._facts

    def of(self, rows: Sequence[int]) -> list[list[dict[str, Any]]]:
        """Return the entries of each of these rows of `samples`; hidden states that were freed are left out.

        Raises DamagedError when a checksum differs.
        """
        entries: list[list[dict[str, Any]]] = [[] for _ in rows]
        for name, teacher in self.teachers.items():
            for kind in self.kinds:
                facts = self._facts.get((name, kind), {})
                places = [index for index, row in enumerate(rows) if row in facts]
                if places:
                    chosen = [rows[index] for index in places]
                    for index, entry in zip(places, self._entries(teacher, kind, chosen), strict=True):
                        if entry is not None:
                            entries[index].append(entry | facts[rows[index]])
        return entries

    def _entries(self, teacher: Teacher, kind: str, rows: list[int]) -> list[dict[str, Any] | None]:
        store, snapshot = self._store, self._snapshot
        scored = store.signal_rows(teacher.name, kind, rows, snapshot)
        headers = store.signal_headers(teacher.name, kind, scored, snapshot).to_pylist()
        here = [index for index, header in enumerate(headers) if header.get("codec") != FREED]
        arrays = store.read_signal(teacher.name, kind, [rows[index] for index in here], snapshot, verify=True)
        entries: list[dict[str, Any] | None] = [None] * len(rows)
        identity = {key: value for key, value in asdict(teacher).items() if key != "head_file"}
        for index, values in zip(here, arrays, strict=True):
            several = values if isinstance(values, tuple) else (values,)
            flat = {
                entry_key(field): array.tobytes() if field.blob else array.reshape(-1).tolist()
                for field, array in zip(of_signal(kind), several, strict=True)
            }
            entries[index] = {
                "teacher": identity, "kind": kind, "codec": scored["codec"][index].as_py(),
                "topk_source": headers[index].get("topk_source"),
                "width": several[0].shape[1] if several[0].ndim > 1 else None, **flat,
            }  # fmt: skip
        return entries


def signals_in(fields: Fields, location: str) -> list[TeacherSignal]:
    """Parse the signals of an exported row. Raises InputError with the location for entries that no export writes."""
    return [
        _said(entry, f"{location}: signals[{number_}]")
        for number_, entry in enumerate(objects(fields, "signals", location))
    ]


def _said(entry: Fields, location: str) -> TeacherSignal:
    kind = text(entry, "kind", location)
    try:
        described_by = of_signal(kind)
    except UnknownNameError as error:
        raise InputError(f"{location}: {error}") from None
    described = entry.get("teacher")
    if not isinstance(described, dict):
        raise InputError(f"{location}: field 'teacher' is {described!r:.60}, expected an object that names the teacher")
    width = integer(entry, "width", location, default=0)
    arrays = {}
    for field in described_by:
        array = _bytes(entry, field.name, location) if field.blob else _numbers(entry, field, location)
        if field.width and (width < 1 or len(array) % width):
            raise InputError(
                f"{location}: {field.name} has {len(array)} values, which is no multiple of the field 'width', {width}"
            )
        arrays[field.name] = array.reshape(-1, width) if field.width else array
    return TeacherSignal(
        _teacher(described, location),
        Signal(
            uid="", sample_row=-1, kind=kind, codec=text(entry, "codec", location, default="fp32"),
            topk_source=text(entry, "topk_source", location, default="teacher"),
            mean_reverse_kl=number(entry, "mean_reverse_kl", location),
            logprob_std=number(entry, "logprob_std", location),
            **arguments(Signal, arrays),
        ),
    )  # fmt: skip


def entry_key(field: Field) -> str:
    """Return the key of a field in an entry; fields of other packages share one."""
    return PLUGIN_COLUMN if field.column == PLUGIN_COLUMN else field.name


def _numbers(entry: Fields, field: Field, location: str) -> np.ndarray:
    read, key = floats if field.is_float else integers, entry_key(field)
    return np.array(read(entry.get(key), key, location), field.dtype)


def _bytes(entry: Fields, name: str, location: str) -> np.ndarray:
    value = entry.get(name)
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except ValueError:
            raise InputError(f"{location}: {name} is no base64 text") from None
    if not isinstance(value, bytes):
        raise InputError(f"{location}: field {name!r} is {value!r:.60}, expected bytes")
    return np.frombuffer(value, np.uint8)


def _teacher(described: Fields, location: str) -> Teacher:
    fields = {field.name: stored(described, field, location) for field in _OF_TEACHER}
    values: dict[str, Any] = {name: 0.0 if value is None else value for name, value in fields.items()}
    teacher = Teacher(**values, head_file="")
    try:
        check_teacher(teacher)
    except InputError as error:
        raise InputError(f"{location}: {error}") from None
    return teacher
