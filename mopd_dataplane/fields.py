"""The registry of per-token fields: one row each. No other file lists their names.

A field is declared once, here. From its row follow its column and schema (tables.py), its checks and checksum (store/),
how it is laid out in a slot and filled (load/), how a pack is cut and what a micro-batch carries (train/), and what an
import and an export read and write (interchange/). A record keeps a field as an attribute where its class declares
one of that name, and in `extra` where it does not, so that a new field needs no change of records.py.

Axes, in the letters of records.py:
    token     [L] every token of a sample          read      [L - 1] every token but the last, which nothing reads
    response  [R] every token after the prompt     trained   [M] every token with loss_mask 1
    ragged    as many values for each trained token as the field named by `sizes` says, token after token
    teacher   [Q] every token of the response in the tokens of a teacher with another tokenizer; no pack carries it
    span      a value for each stretch of one policy version
    sample    [S] one value for each sample of a pack, made by the loader
    bound     [S + 1] where the samples of a pack begin and end, made by the loader
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from mopd_dataplane.errors import UnknownNameError, nearest

Axis = Literal["token", "read", "response", "trained", "ragged", "teacher", "span", "sample", "bound"]

TOKENS = "tokens"
"""Table of what is recorded of every sample."""
SIGNALS = "signals/*/"
"""Tables of what teachers say; the kind of signal follows."""
ALIGNMENT = "alignment"
"""Kind of the signal that records how the tokens of a teacher with another tokenizer lie over the student's."""
INT32 = (-(1 << 31), (1 << 31) - 1)
IDS = (0, INT32[1])


@dataclass(frozen=True, kw_only=True)
class Field:
    """One array of a sample, of a signal or of a pack.

    Example: Field(name="entropy", dtype="<f4", axis="response", table=TOKENS, record="entropy", null=True, doc="…").
    """

    name: str
    """Attribute, or key of `extra`, in records.Sample or records.Signal; at most 24 bytes."""
    dtype: str
    """numpy name, little endian, such as <f4."""
    axis: Axis
    doc: str
    unit: str = ""
    table: str = ""
    """TOKENS, SIGNALS + kind, or empty: not stored, the loader makes it."""
    column: str = ""
    """Column of the table; by default the name."""
    pack: str = ""
    """Name in records.Pack; by default the name."""
    null: bool = False
    """May be null in the store."""
    record: str = ""
    """Name by which a loader is asked for it (LoadSpec.recorded); empty for fields of every pack."""
    width: str = ""
    """Column that says how many values lie at each place of the axis: of `samples` for a field of TOKENS, else of the
    signal's own table. Empty: one value."""
    sizes: str = ""
    """Ragged: name of the field that says how many values each trained token has."""
    count: str = ""
    """Ragged: column of `samples` that says how many values a sample has."""
    blank: int = 0
    """In a pack: the value where the store has none."""
    values: tuple[int, int] | None = None
    """Lowest and highest value allowed; None: any of the dtype."""
    token_ids: bool = False
    """Whether the values are token ids, which a vocabulary bounds."""
    batch: Literal["rows", "body", ""] = "rows"
    """In a micro-batch: rows of the trained tokens (of the samples, for the sample axis); a value for every place of
    the forward pass, which the body reads; or empty, where the micro-batch makes something else of it."""
    blob: bool = False
    """Stored as one run of bytes, with a checksum of its own; last in a slot, whose checksum leaves it out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "column", self.column or self.name)
        object.__setattr__(self, "pack", self.pack or self.name)

    @property
    def pack_axis(self) -> Axis:
        """Axis in a pack: a value for every token of the pack where the store has one for some of them."""
        return "token" if self.axis in ("read", "response") else self.axis

    @property
    def is_float(self) -> bool:
        return self.dtype[1] == "f"


FIELDS: tuple[Field, ...] = (
    Field(
        name="tokens", dtype="<i4", axis="token", table=TOKENS, values=IDS, token_ids=True, batch="",
        doc="[L] prompt then response",
    ),
    Field(
        name="logprobs", pack="sampler_logprobs", dtype="<f4", axis="response", table=TOKENS, null=True, unit="nat",
        doc="[R] sampler log-prob as sampled; 0 where loss_mask is 0; null when not sampled or not recorded",
    ),
    Field(
        name="loss_mask", dtype="|u1", axis="response", table=TOKENS, values=(0, 1), batch="",
        doc="[R] 1 where the policy wrote",
    ),
    Field(
        name="version_starts", dtype="<i4", axis="span", table=TOKENS, values=IDS, batch="",
        doc="[spans] response position where each policy version starts",
    ),
    Field(
        name="versions", dtype="<i4", axis="span", table=TOKENS, values=INT32, batch="", doc="[spans] policy versions"
    ),
    Field(
        name="sampling_mask_sizes", dtype="<i4", axis="trained", table=TOKENS, null=True, record="sampling_mask",
        values=IDS, batch="", unit="ids",
        doc="[M] ids in the sampling mask of each trained token; 0 for the whole vocabulary; null if not recorded",
    ),
    Field(
        name="sampling_mask_ids", dtype="<i4", axis="ragged", table=TOKENS, null=True, record="sampling_mask",
        sizes="sampling_mask_sizes", count="sampling_mask_len", values=IDS, token_ids=True, batch="",
        doc="[sum of sampling_mask_sizes] the ids of these masks, token after token; null if not recorded",
    ),
    Field(
        name="experts", dtype="<i2", axis="read", table=TOKENS, null=True, record="experts", width="experts_width",
        blank=-1, values=(0, 32767), batch="body",
        doc="[(L - 1) * W] expert ids of every token but the last, layer after layer; null if not recorded",
    ),
    Field(name="cu_seqlens", dtype="<i4", axis="bound", batch="", doc="where the samples of the pack begin and end"),
    Field(name="sample_rows", dtype="<i8", axis="sample", doc="row id in `samples`"),
    Field(name="rewards", dtype="<f4", axis="sample", doc="outcome reward; NaN where a sample has none"),
    Field(name="advantages", dtype="<f4", axis="sample", doc="group-relative advantage; 0 where there is none"),
    Field(
        name="logprob", pack="teacher_logprobs", dtype="<f4", axis="response", table=SIGNALS + "logprob", unit="nat",
        doc="[R] teacher log-prob; 0 where loss_mask is 0",
    ),
    Field(
        name="reference_logprobs", dtype="<f4", axis="response", unit="nat",
        doc="log-prob under the reference policy of ExOPD, from the log-prob signal of another teacher",
    ),
    Field(
        name="helped_logprobs", dtype="<f4", axis="response", unit="nat",
        doc="log-prob under the teacher with a prompt that helps it (Cal-OPD), from the signal of another teacher",
    ),
    Field(
        name="misled_logprobs", dtype="<f4", axis="response", unit="nat",
        doc="log-prob under the teacher with a prompt that misleads it (Cal-OPD), from the signal of another teacher",
    ),
    Field(
        name="topk_ids", column="ids", dtype="<i4", axis="trained", table=SIGNALS + "topk", width="k", token_ids=True,
        doc="[M * K] token ids; -1 in a slot that is not used",
    ),
    Field(
        name="topk_logprobs", column="logprobs", dtype="<f4", axis="trained", table=SIGNALS + "topk", width="k",
        unit="nat", doc="[M * K] teacher log-probs",
    ),
    Field(
        name="hidden", dtype="|u1", axis="trained", table=SIGNALS + "hidden", width="row_bytes", blob=True,
        doc="[M, row_bytes] codec bytes, one contiguous run per position",
    ),
    Field(
        name="student_chunk_ends", dtype="|u1", axis="response", table=SIGNALS + ALIGNMENT, values=(0, 1), batch="",
        doc="[R] 1 where a chunk ends: the text up to this token ends with a token of the teacher too",
    ),
    Field(
        name="teacher_tokens", dtype="<i4", axis="teacher", table=SIGNALS + ALIGNMENT, values=IDS, batch="",
        doc="[Q] token ids of the response in the teacher's own tokenizer",
    ),
    Field(
        name="teacher_chunk_ends", dtype="|u1", axis="teacher", table=SIGNALS + ALIGNMENT, values=(0, 1), batch="",
        doc="[Q] 1 where the same chunk ends in the teacher's tokens",
    ),
)  # fmt: skip
"""Every field. The stored ones of one table are in the order of its checksum."""

SIGNAL_KINDS = tuple(dict.fromkeys(f.table.removeprefix(SIGNALS) for f in FIELDS if f.table.startswith(SIGNALS)))
"""Kinds of signals that have fields here."""
PACK_KINDS = tuple(kind for kind in SIGNAL_KINDS if kind != ALIGNMENT)
"""Those of them that packs can carry and objectives can use."""
OTHERS = ("reference_logprobs", "helped_logprobs", "misled_logprobs")
"""Fields that the log-prob signals of other teachers than the sample's own fill."""
DTYPES = tuple(sorted({field.dtype for field in FIELDS}))
"""Types that a slot may hold."""
BY_NAME = {field.name: field for field in FIELDS}
PLUGIN_KIND = re.compile("[a-z][a-z0-9_]{0,23}")
"""Names that a kind of signal of another package may have."""
PLUGIN_COLUMN = "values"
"""Column of its table."""
_TAKEN = frozenset(
    (ALIGNMENT, PLUGIN_COLUMN, *(name for field in FIELDS for name in (field.name, field.pack, field.column)))
)


def of_table(table: str) -> tuple[Field, ...]:
    """Stored fields of a table, in the order of its checksum."""
    return tuple(field for field in FIELDS if field.table == table)


def of_signal(kind: str) -> tuple[Field, ...]:
    """Fields of a kind of signal, in the order of its checksum.

    A kind that has none here is another package's, with one number for each response token. Raises UnknownNameError for
    a name that no kind may have.
    """
    return of_table(SIGNALS + kind) or (plugin_field(kind),)


@lru_cache(maxsize=64)
def plugin_field(kind: str) -> Field:
    """The one field of a kind of signal of another package; it follows from the name, so that a store is read without
    the package. Raises UnknownNameError for a name that no kind may have."""
    if not PLUGIN_KIND.fullmatch(kind) or kind in _TAKEN:
        raise UnknownNameError(
            f"no signal {kind!r:.40}: {nearest(kind, PACK_KINDS)}; a signal of another package has a name of 1 to 24 "
            "characters of a-z, 0-9 and '_' that begins with a letter and is not a field of docs/fields.md"
        )
    return Field(
        name=kind, column=PLUGIN_COLUMN, dtype="<f4", axis="response", table=SIGNALS + kind,
        doc="[R] value of another package's kind of signal for each response token; 0 where loss_mask is 0",
    )  # fmt: skip


def in_record(record: Any) -> tuple[Field, ...]:
    """Every field that a Pack or a MicroBatch may hold: those of the registry, and other packages' in its `extra`."""
    here = {field.pack for field in FIELDS} if record.extra else ()
    return (*FIELDS, *(plugin_field(name) for name in record.extra if name not in here))


PAYLOAD = tuple(field for field in of_table(TOKENS) if not field.record)
"""Payload fields of every sample."""
RECORDED = tuple(field for field in of_table(TOKENS) if field.record)
"""Optional payload fields of a sample; a null one has no part in the checksum."""
RECORDS = tuple(dict.fromkeys(field.record for field in RECORDED))
"""Optional records that a loader can be asked for, see LoadSpec.recorded."""


def column_names(some: Iterable[Field]) -> tuple[str, ...]:
    return tuple(field.column for field in some)


def value(record: Any, name: str) -> Any:
    """A field of a record: its attribute, or what its `extra` has by that name; None where it has none."""
    return getattr(record, name) if name in type(record).__dataclass_fields__ else record.extra.get(name)


def arguments(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name as arguments of a record: those that its class does not declare together as `extra`."""
    declared = record.__dataclass_fields__  # type: ignore[attr-defined]
    own = {name: value for name, value in values.items() if name in declared}
    extra = {name: value for name, value in values.items() if name not in declared}
    return own | ({"extra": extra} if extra else {})
