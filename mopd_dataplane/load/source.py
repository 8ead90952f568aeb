"""One planned window of a store: computes how large each pack is, and fills packs into memory that the caller owns.

The metadata of the window's samples is read once, when it is opened. Payload is read only for the requested packs and
the next ones, at the plan's snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane import fields as per_token
from mopd_dataplane.errors import DamagedError, MismatchError
from mopd_dataplane.load.payload import VERSIONS, Payload, Placed
from mopd_dataplane.load.slot_layout import FIELD_BYTES, Field, arrays_of, plan_fields, write_table
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.group_advantages import Outcomes, group_outcomes
from mopd_dataplane.records import PlanWindow, Snapshot
from mopd_dataplane.tables import SAMPLES

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store

LOOKED_UP_FIRST = 1024
"""Number of samples whose payload is looked up when a window is opened; later ones are looked up with their packs."""


class WindowSource:
    """One open window. Not thread-safe: used by one thread at a time."""

    def __init__(self, store: Store, plan: PlanWindow, spec: LoadSpec) -> None:
        self.plan = plan
        self.first_step = 0
        """Steps of the stage before the window."""
        self._store = store
        self._spec = spec
        rows = plan.sample_rows
        store.deletions.raise_if_rows_deleted(rows)
        columns = ["total_len", "loss_tokens", "policy_version_first"]
        if store.has_column("samples", "version_spans", plan.snapshot):
            columns.append("version_spans")
        metadata = store.take_samples(rows, columns, plan.snapshot)
        self.lengths: NDArray[np.int64] = metadata["total_len"].to_numpy().astype(np.int64)
        self.loss_tokens: NDArray[np.int64] = metadata["loss_tokens"].to_numpy().astype(np.int64)
        self._first_versions = metadata["policy_version_first"].to_numpy()
        self._version_spans = self._count_version_spans(metadata)
        self._changes = bool((self._version_spans != 1).any())
        """True if the policy changed in the middle of some response."""
        self._sizes = np.diff(plan.pack_starts)
        """[packs] number of samples of each pack."""
        self._firsts = _starts_in_packs(self.lengths, plan.pack_starts)
        self._counts: dict[str, NDArray[np.int64]] = {}
        """Ragged field → [samples] number of its values in each sample."""
        self._widths: dict[str, int] = {}
        """Recorded field with several values at one position → their number."""
        self._recorded = [
            field for record in per_token.RECORDS if record in spec.recorded for field in self._held(record)
        ]
        self._outcomes = self._rewards() if spec.rewards else None
        self._listed = [kind for kind in spec.signals if not any(field.blob for field in per_token.of_signal(kind))]
        """Kinds of signals that are stored as lists."""
        self._tokens = store.token_reader(rows, plan.snapshot)
        self._hidden = {
            teacher: _HiddenStates(store, plan.snapshot, teacher, scored)
            for teacher, scored in (self._rows_by_teacher() if "hidden" in spec.signals else {}).items()
        }
        self._signals = {
            key: store.signal_reader(*key, scored, plan.snapshot)
            for key, scored in self._listed_signals(self._rows_by_teacher().items()).items()
        }
        self._topk = self._topk_widths() if "topk" in spec.signals else {}
        self._carried = self._carried_fields()
        """Fields of the packs, in slot order."""
        self.looked_up = 0
        """Number of packs whose payload was looked up."""
        self._payload: Payload | None = None
        """Payload that was looked up last, for the next packs."""
        self._parts: dict[int, slice] = {}
        """Pack → slice of its samples in `_payload`."""
        self._to_fill: set[int] = set()
        if self.steps:
            first = int(np.searchsorted(plan.pack_starts[:-1], LOOKED_UP_FIRST))
            self._tokens.look_up(rows[: plan.pack_starts[first]])
            self._locate(range(first), open_files=False)
            self._locate(range(int(plan.step_starts[1])), open_files=True)

    @property
    def steps(self) -> int:
        """Optimizer steps of the window."""
        return len(self.plan.step_starts) - 1

    def totals(self, step: int) -> tuple[int, int]:
        """Return (trained tokens, sequences) of one step over all ranks."""
        first, last = self.plan.pack_starts[self.plan.step_starts[step : step + 2]]
        return int(self.loss_tokens[first:last].sum()), int(last - first)

    def teacher(self, pack: int) -> str:
        """Return the teacher of a pack; empty if the objective needs none."""
        code = int(self.plan.pack_teachers[pack])
        return self.plan.teachers[code] if code >= 0 else ""

    def entry(self, pack: int) -> dict[str, Any]:
        """Describe a pack for the trainer: {"pack", "teacher", "codec", "lengths"}, with the number of tokens of each
        sample."""
        lengths = self.lengths[self._span(pack)].tolist()
        return {"pack": pack, "teacher": self.teacher(pack), "codec": self.codec(pack), "lengths": lengths}

    def fields(self, pack: int) -> tuple[tuple[Field, ...], int]:
        """Return the layout of a pack's arrays in a slot, and its size in bytes."""
        sequences = int(self._sizes[pack])
        counts = {**self._sums[pack], "sample": sequences, "bound": sequences + 1}
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for field in self._carried:
            count = counts[field.name if field.axis == "ragged" else field.pack_axis]
            shape = (count, self._width(field, pack)) if field.width else (count,)
            shapes[field.pack] = (field.dtype, shape)
        return plan_fields(shapes)

    def _carried_fields(self) -> list[per_token.Field]:
        """Return the fields that the spec requests and the window has."""
        carried = [field for field in per_token.FIELDS if not field.table and field.name not in per_token.OTHERS]
        signals = [field for kind in self._spec.signals for field in per_token.of_signal(kind)]
        others = [per_token.BY_NAME[name] for name in self._spec.others]
        return sorted([*per_token.PAYLOAD, *carried, *self._recorded, *others, *signals], key=lambda field: field.blob)

    def _width(self, field: per_token.Field, pack: int) -> int:
        """Return the number of values at one position of a field of a pack."""
        if field.blob and self._hidden:
            return self._hidden[self.teacher(pack)].row_bytes
        return self._widths[field.name] if field.record else self._topk[self.teacher(pack)]

    @cached_property
    def _sums(self) -> list[dict[str, int]]:
        """For each pack, its number of tokens, trained tokens, version spans, and values of each ragged field."""
        counts = {"token": self.lengths, "trained": self.loss_tokens, "span": self._version_spans, **self._counts}
        starts = self.plan.pack_starts[:-1]
        sums = np.stack([np.add.reduceat(count, starts) for count in counts.values()], axis=1).tolist()
        return [dict(zip(counts, row, strict=True)) for row in sums]

    @cached_property
    def largest_pack_bytes(self) -> int:
        """Bytes of a slot that holds any pack of the window."""
        starts = self.plan.pack_starts
        counts = [self.lengths, self.loss_tokens, self.lengths + self.loss_tokens, self.lengths + self._version_spans]
        counts += self._counts.values()
        measures = [np.diff(starts), *(np.add.reduceat(count, starts[:-1]) for count in counts)]
        heaviest = {int(np.argmax(measure)) for measure in measures}
        spare = FIELD_BYTES * len(self.fields(0)[0])
        return max(self.fields(pack)[1] for pack in heaviest) + spare

    def codec(self, pack: int) -> str:
        """Return the codec of a pack's hidden states; empty when it carries none."""
        return self._hidden[self.teacher(pack)].codec if self._hidden else ""

    def needs_read(self, pack: int) -> bool:
        """Check if filling a pack looks up samples or reads hidden states, and so may take long."""
        return bool(self._hidden) or self._payload is None or pack not in self._parts

    def fill(
        self, pack: int, fields: tuple[Field, ...], memory: memoryview, ahead: Callable[[], Sequence[int]]
    ) -> None:
        """Write one pack into its memory, laid out by `fields`.

        Samples that were not looked up yet are looked up together with those of the packs in `ahead()`, which come
        next.
        Raises DamagedError when the payload does not have the lengths that its metadata announces.
        """
        if self._payload is None or pack not in self._parts:
            self._payload = None
            packs = [pack, *ahead()]
            ends = np.cumsum(self._sizes[packs]).tolist()
            self._payload = self._read(packs)
            self._parts = {pack: slice(*ends) for pack, ends in zip(packs, pairwise([0, *ends]), strict=True)}
            self._to_fill = set(packs)
            self.looked_up += len(packs)
        write_table(memory, fields)
        self._fill(pack, self._payload, arrays_of(memory, fields))
        self._to_fill.discard(pack)
        if not self._to_fill:
            self._payload = None

    def _span(self, pack: int) -> slice:
        return slice(int(self.plan.pack_starts[pack]), int(self.plan.pack_starts[pack + 1]))

    def _rows(self, pack: int) -> NDArray[np.int64]:
        return self.plan.sample_rows[self._span(pack)]

    def _rows_by_teacher(self) -> dict[str, NDArray[np.int64]]:
        """Return the sample rows in the packs of each teacher; the name is empty if the objective needs no teacher."""
        plan = self.plan
        sample_teachers = np.repeat(plan.pack_teachers, self._sizes)
        return {
            plan.teachers[code] if code >= 0 else "": plan.sample_rows[sample_teachers == code]
            for code in np.unique(plan.pack_teachers).tolist()
        }

    def _locate(self, packs: Sequence[int], *, open_files: bool) -> None:
        """Look up where the hidden states of these packs are stored, in one request per teacher."""
        rows: dict[str, list[NDArray[np.int64]]] = {}
        for pack in packs if self._hidden else ():
            rows.setdefault(self.teacher(pack), []).append(self._rows(pack))
        for teacher, spans in rows.items():
            self._hidden[teacher].locate(np.concatenate(spans), open_files=open_files)

    def _read(self, packs: Sequence[int]) -> Payload:
        """Look up the payload of these packs, in the order in which it is stored."""
        self._locate(packs, open_files=False)
        rows_by_signal = self._listed_signals((self.teacher(pack), self._rows(pack)) for pack in packs)
        signals = {key: (self._signals[key], np.unique(rows)) for key, rows in rows_by_signal.items()}
        places = np.concatenate([np.arange(s.start, s.stop) for s in map(self._span, packs)])
        placed = Placed(
            self.plan.sample_rows[places], self._firsts[places], self.lengths[places], self._version_spans[places]
        )
        recorded = [*(VERSIONS if self._changes else ()), *per_token.column_names(self._recorded)]
        return Payload(self._tokens, placed, signals, recorded=recorded, verify=self._spec.verify)

    def _listed_signals(
        self, parts: Iterable[tuple[str, NDArray[np.int64]]]
    ) -> dict[tuple[str, str], NDArray[np.int64]]:
        """Return the sample rows that need each listed signal, by (teacher, kind). parts: (teacher, its sample
        rows)."""
        rows_by_signal: dict[tuple[str, str], list[NDArray[np.int64]]] = {}
        others = [(teacher, "logprob") for teacher in self._spec.others.values()]
        for teacher, rows in parts:
            for key in dict.fromkeys([*((teacher, kind) for kind in self._listed), *others]):
                rows_by_signal.setdefault(key, []).append(rows)
        return {key: np.concatenate(rows) for key, rows in rows_by_signal.items()}

    def _fill(self, pack: int, payload: Payload, out: dict[str, Any]) -> None:
        span, part, teacher = self._span(pack), self._parts[pack], self.teacher(pack)
        payload.fill_tokens(part, out)
        if self._changes:
            payload.fill_versions(part, out)
        else:
            out["version_starts"][:], out["versions"][:] = out["cu_seqlens"][:-1], self._first_versions[span]
        for field in self._recorded:
            announced = self._counts[field.name][span].tolist() if field.name in self._counts else []
            payload.fill_recorded(field, part, out[field.pack], announced)
        out["sample_rows"][:] = self._rows(pack)
        out["rewards"][:] = np.nan if self._outcomes is None else self._outcomes.rewards[span]
        out["advantages"][:] = 0.0 if self._outcomes is None else self._outcomes.advantages[span]
        for name, other in self._spec.others.items():
            [logprob] = per_token.of_signal("logprob")
            payload.fill_responses(other, "logprob", logprob, part, out[name])
        for kind in self._listed:
            payload.fill_signal(teacher, kind, part, out)
        if self._hidden:
            self._hidden[teacher].fill(self._rows(pack), out["hidden"].reshape(-1))

    def _count_version_spans(self, metadata: pa.Table) -> NDArray[np.int64]:
        """Return the number of version spans of each sample; it is counted in the payload where older writers left it
        out."""
        if "version_spans" in metadata.column_names and not metadata["version_spans"].null_count:
            return np.asarray(metadata["version_spans"].to_numpy().astype(np.int64))
        versions = self._store.read_tokens(self.plan.sample_rows, ["versions"], self.plan.snapshot)["versions"]
        return np.asarray(pc.list_value_length(versions).to_numpy().astype(np.int64))

    def _held(self, record: str) -> list[per_token.Field]:
        """Return the fields of one record that packs carry: all if some sample of the window has the record, else none.

        Raises MismatchError if samples have different widths of a field.
        """
        some = [field for field in per_token.RECORDED if field.record == record]
        for field in some:
            if not self._store.has_column(per_token.TOKENS, field.column, self.plan.snapshot):
                return []
            if field.count:
                lengths = self._of_samples(field.count).fill_null(0).to_numpy().astype(np.int64)
                if not lengths.any():
                    return []
                self._counts[field.name] = lengths
            if field.width:
                widths = self._of_samples(field.width).drop_null().unique().to_pylist()
                if len(widths) > 1:
                    raise MismatchError(
                        f"samples of one window have {' and '.join(map(str, sorted(widths)))} values of {field.name} a "
                        "token: two models wrote them; plan each model's samples in a stage of their own"
                    )
                if not widths or not widths[0]:
                    return []
                self._widths[field.name] = int(widths[0])
        return some

    def _of_samples(self, column: str) -> pa.ChunkedArray:
        """Return a column of `samples` for the samples of the window; nulls if the snapshot does not have it yet."""
        if not self._store.has_column("samples", column, self.plan.snapshot):
            return pa.chunked_array([pa.nulls(len(self.plan.sample_rows), SAMPLES.schema.field(column).type)])
        return self._store.take_samples(self.plan.sample_rows, [column], self.plan.snapshot)[column]

    def _rewards(self) -> Outcomes:
        plan, spec = self.plan, self._spec
        table = self._store.table("rewards", ["sample_row", "verifier", "reward"], snapshot=plan.snapshot)
        parts = list(self._store.scan_samples(["stage", "group_id"], plan.snapshot))
        rows = np.concatenate([rows for rows, _ in parts])
        # A group is named after its prompt and iteration, so two stages with the same prompt share names of groups.
        groups = pa.chunked_array(
            [pc.binary_join_element_wise(batch["stage"], batch["group_id"], "\0") for _, batch in parts]
        )
        return group_outcomes(
            table, rows, groups, plan.sample_rows, verifier=spec.verifier, divide_by_std=spec.reward_std
        )

    def _topk_widths(self) -> dict[str, int]:
        """Return the k of each teacher of the window. Raises MismatchError if its stored top-k differ in k or
        source."""
        widths = {}
        for teacher, rows in self._rows_by_teacher().items():
            forms = self._signals[teacher, "topk"].topk_forms(np.unique(rows))
            source = self._spec.topk_source
            if len(forms) != 1 or source not in ("", forms[0][1]):
                suffix = f", the {source}'s" if source else ""
                widths_text = ", ".join(f"{k} (the {topk_source}'s likeliest)" for k, topk_source in forms)
                raise MismatchError(
                    f"the stored top-k of teacher {teacher!r} has k = {widths_text}; one k and one source are "
                    f"needed{suffix}: go back to the settings it was scored with, or score the samples under another "
                    "teacher name"
                )
            widths[teacher] = forms[0][0]
        return widths


def _starts_in_packs(lengths: NDArray[np.int64], pack_starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each sample the index in its pack of its first token: [samples]."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    return starts - np.repeat(starts[pack_starts[:-1]], np.diff(pack_starts))


class _HiddenStates:
    """Reader of one teacher's hidden states for a window's samples."""

    def __init__(self, store: Store, snapshot: Snapshot, teacher: str, sample_rows: NDArray[np.int64]) -> None:
        """Read where the states of these samples are. Raises MismatchError unless all have one codec and width."""
        rows = np.unique(sample_rows)
        signal_rows = store.signal_rows(teacher, "hidden", rows, snapshot)
        sizes, counts = signal_rows["bytes"].to_numpy(), signal_rows["rows"].to_numpy()
        widths, codecs = np.unique(sizes // np.maximum(counts, 1)), set(signal_rows["codec"].to_pylist())
        if len(widths) != 1 or len(codecs) != 1:
            raise MismatchError(
                f"hidden states of teacher {teacher!r} come in codecs {sorted(codecs)} and {widths.tolist()} bytes "
                "a token; one window must have one: score them again under one name"
            )
        self.row_bytes, self.codec = int(widths[0]), str(codecs.pop())
        self._teacher = teacher
        places = zip(signal_rows["payload_row"].to_pylist(), sizes.tolist(), strict=True)
        self._places = dict(zip(rows.tolist(), places, strict=True))
        self._reader = store.hidden_reader(teacher, snapshot)

    def locate(self, rows: NDArray[np.int64], *, open_files: bool) -> None:
        """Look up in one request where the states of these samples are stored."""
        payload_rows = [self._places[row][0] for row in rows.tolist()]
        self._reader.locate(payload_rows)
        if open_files:
            self._reader.open_files(payload_rows)

    def fill(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Read the states of the samples one after the other into `out`."""
        payload_rows, sizes = zip(*(self._places[row] for row in rows.tolist()), strict=True)
        if (total := sum(sizes)) != len(out):
            said = f"{total:,} bytes, the pack expects {len(out):,}"
            raise DamagedError(f"hidden states of teacher {self._teacher!r}: {said}")
        self._reader.read_whole(payload_rows, sizes, memoryview(out.data))
