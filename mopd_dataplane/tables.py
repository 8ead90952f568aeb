"""The columns: the Arrow schema of every table, one constant each.

The columns of `prompts`, `teachers`, `plans`, `steps` and `changes` are the attributes of their records (records.py).
Every field carries its meaning under the metadata key `doc` and, where one could guess wrong, its `unit`.
`schemas/<table>/v2.json` is generated from here (`make schemas`) and a test fails when the two drift. Evolution is
additive: new nullable columns only. FORMAT_VERSION counts incompatible changes; a store of a newer one is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import get_type_hints

import numpy as np
import pyarrow as pa

from mopd_dataplane import fields, records

FORMAT_VERSION = 2
DATA_STORAGE_VERSION = "2.2"
"""Lance file format, pinned, because the default changes with pylance."""
LIST_STORAGE_VERSION = "2.0"
"""Lance file format of payload in lists: read and written several times faster, a third larger (decision 0003)."""

_STRING = pa.string()
_TIME = pa.timestamp("us", tz="UTC")


def _field(name: str, kind: pa.DataType, doc: str, *, null: bool = False, unit: str = "") -> pa.Field:
    metadata = {"doc": doc, "unit": unit} if unit else {"doc": doc}
    return pa.field(name, kind, nullable=null, metadata=metadata)


def _type(dtype: str) -> pa.DataType:
    """Type of a column by the `dtype` of records.Column."""
    if dtype.startswith("["):
        return pa.list_(_STRING) if dtype == "[]" else _list_of(dtype[1:-1])
    return pa.from_numpy_dtype(np.dtype(dtype)) if dtype else _STRING


def _list_of(dtype: str) -> pa.DataType:
    """Lists of a numpy dtype, without nulls inside."""
    return pa.list_(pa.field("item", _type(dtype), nullable=False))


def _fields(some: Iterable[fields.Field]) -> list[pa.Field]:
    """Columns of per-token fields (fields.py): lists, but for blobs.

    A blob, large bytes read by range, is Lance's by its metadata: declared without importing lance.
    """
    blob = {"unit": "bytes", "blob": "v2"}
    return [
        pa.field(field.column, pa.large_binary(), nullable=False, metadata={"doc": field.doc, **blob})
        if field.blob
        else _field(field.column, _list_of(field.dtype), field.doc, null=field.null, unit=field.unit)
        for field in some
    ]


def _columns(record: type) -> list[pa.Field]:
    """Columns of a record that is a row: of its attributes, in their order."""
    hints = get_type_hints(record, include_extras=True)
    return [
        _field(name, _type(column.dtype), column.doc, null=column.null, unit=column.unit)
        for name, hint in hints.items()
        for column in hint.__metadata__
    ]


_CORRECT = _field(
    "correct", pa.bool_(), "whether the answer is entirely right; null where the reward does not say", null=True
)
_CREATED_AT = _field("created_at", _TIME, "wall clock, informative only")
ROW_CRC = _field("row_crc", pa.uint32(), "crc32c over the row's other columns; how: store/format/row_checksums.py")


@dataclass(frozen=True)
class TableSpec:
    """A table: its columns, and the columns that identify a row (empty: rows have no identity)."""

    name: str
    doc: str
    columns: tuple[pa.Field, ...]
    key: tuple[str, ...]
    heavy: bool = False
    """Per-token payload: read by row for the batch at hand, never scanned whole."""
    storage: str = DATA_STORAGE_VERSION
    """Lance file format."""

    @cached_property
    def schema(self) -> pa.Schema:
        """Columns as callers write and read them."""
        return pa.schema(self.columns)

    @property
    def stored(self) -> pa.Schema:
        """Columns as they are stored: a row of metadata ends with its checksum; payload has one in its metadata."""
        return self.schema if self.heavy else self.schema.append(ROW_CRC)


PROMPTS = TableSpec("prompts", "One row is a prompt.", (*_columns(records.Prompt), _CREATED_AT), key=("prompt_id",))

SAMPLES = TableSpec(
    "samples",
    "One row is a finished sample: its metadata and its commit record. A sample exists when this row is visible.",
    (
        _field("uid", _STRING, "128-bit identity, 32 hex digits"),
        _field("prompt_id", _STRING, "prompt it answers"),
        _field("group_id", _STRING, "samples of one prompt in one iteration share it"),
        _field("group_index", pa.int16(), "position inside the group"),
        _field("iteration", pa.int32(), "iteration of the run that asked for it"),
        _field("domain", _STRING, "domain of the prompt"),
        _field("effort", _STRING, "effort mode of the prompt"),
        _field("stage", _STRING, "job stage that owns the sample; FOLDER/STAGE for a sample of another store"),
        _field("writer", _STRING, "engine replica or importer"),
        _field("writer_seq", pa.int64(), "admission ordinal inside the writer"),
        _field("policy", _STRING, "sampling policy; 'reference' for text that was not sampled"),
        _field("policy_version_first", pa.int32(), "version that sampled the first response token"),
        _field("policy_version_last", pa.int32(), "version that sampled the last response token"),
        _field("temperature", pa.float32(), "sampling temperature"),
        _field("top_p", pa.float32(), "nucleus mass; 1 is off"),
        _field("top_k", pa.int32(), "top-k cut; 0 is off"),
        _field("prompt_len", pa.int32(), "P", unit="tokens"),
        _field("response_len", pa.int32(), "R, tool output included", unit="tokens"),
        _field("total_len", pa.int32(), "L = P + R", unit="tokens"),
        _field("loss_tokens", pa.int32(), "M, response tokens the policy wrote", unit="tokens"),
        _field("turns", pa.int16(), "assistant turns"),
        _field("finish_reason", _STRING, "stop, length, reference, abandoned, or unknown (imports)"),
        _field("interruptions", pa.int16(), "times the generation was interrupted and continued"),
        _field("resume", _STRING, "none, exact or statistical"),
        _field("mean_logprob", pa.float32(), "mean sampler log-prob over loss tokens", null=True, unit="nat"),
        _field("tokenizer", _STRING, "tokenizer digest"),
        _field(
            "payload_row",
            pa.int64(),
            "row id of the payload in `tokens`; from 2^40 on: in another store",
        ),
        _field("payload_crc", pa.int64(), "crc32c over the payload arrays, 0 to 2^32 - 1"),
        _CREATED_AT,
        _field("schema_version", pa.int16(), "FORMAT_VERSION of the writer"),
        _field("version_spans", pa.int32(), "version spans in `tokens`; null for older writers", null=True),
        _field(
            "sampling_mask_len",
            pa.int32(),
            "ids in the sampling masks of `tokens`; null when not recorded",
            null=True,
            unit="ids",
        ),
        _field(
            "experts_width", pa.int32(), "W, expert ids of one token; null when not recorded", null=True, unit="ids"
        ),
        _field(
            "sampler",
            _STRING,
            "name and version of the sampler; 'engine' for an engine's own noise; null when not recorded",
            null=True,
        ),
        _field(
            "repetition",
            pa.float32(),
            "share of the response's runs of four tokens that occurred before in it; null for older writers",
            null=True,
        ),
    ),
    key=("uid",),
)

TOKENS = TableSpec(
    fields.TOKENS,
    "One row is the per-token payload of a sample.",
    (_field("uid", _STRING, "sample it belongs to"), *_fields(fields.of_table(fields.TOKENS))),
    key=("uid",),
    heavy=True,
    storage=LIST_STORAGE_VERSION,
)

TEACHERS = TableSpec("teachers", "One row is a teacher.", (*_columns(records.Teacher), _CREATED_AT), key=("name",))


def signal_spec(kind: str, doc: str, *header: pa.Field) -> TableSpec:
    """Table of a kind of signal: the sample's uid, what describes the arrays, then the arrays (fields.py)."""
    arrays = fields.of_signal(kind)
    columns = (_field("uid", _STRING, "sample it belongs to"), *header, *_fields(arrays))
    storage = DATA_STORAGE_VERSION if any(field.blob for field in arrays) else LIST_STORAGE_VERSION
    return TableSpec(fields.SIGNALS + kind, doc, columns, key=("uid",), heavy=True, storage=storage)


SIGNAL_LOGPROB = signal_spec("logprob", "One row is the teacher's log-prob of each sampled token of a sample.")

SIGNAL_TOPK = signal_spec(
    "topk",
    "One row is the teacher's top-k at each loss-masked position of a sample.",
    _field("k", pa.int16(), "K"),
    _field("topk_source", _STRING, "teacher or student: whose top-k the ids are"),
)

SIGNAL_HIDDEN = signal_spec(
    "hidden",
    "One row is the teacher's last hidden states at each loss-masked position of a sample.",
    _field("codec", _STRING, "fp32, bf16, int8, fp8 or mxfp4"),
    _field("rows", pa.int32(), "M"),
    _field("row_bytes", pa.int32(), "bytes of one position under the codec", unit="bytes"),
)

SIGNAL_ALIGNMENT = signal_spec(
    fields.ALIGNMENT,
    "One row is the response of a sample in the tokens of a teacher with another tokenizer, and the chunks of text "
    "whose ends are ends of tokens on both sides.",
)

SCORES = TableSpec(
    "scores",
    "One row is the signal of one kind by one teacher for one sample. A signal exists when this row is visible.",
    (
        _field("uid", _STRING, "sample"),
        _field("teacher", _STRING, "teacher name"),
        _field("kind", _STRING, "logprob, topk, hidden, alignment, or the name of another package's kind"),
        _field("sample_row", pa.int64(), "row id of the sample in `samples`"),
        _field(
            "payload_row",
            pa.int64(),
            "row id of the payload in signals/<teacher>/<kind>; from 2^40 on: in another store",
        ),
        _field("payload_crc", pa.int64(), "crc32c over the payload, 0 to 2^32 - 1"),
        _field("codec", _STRING, "encoding of the payload"),
        _field("rows", pa.int32(), "positions covered", unit="tokens"),
        _field("bytes", pa.int64(), "payload size", unit="bytes"),
        _field("mean_reverse_kl", pa.float32(), "mean sampler minus teacher log-prob", null=True, unit="nat/token"),
        _field(
            "coverage",
            pa.float32(),
            "for topk: probability that the teacher gives the stored ids, mean over loss tokens; 1 for other "
            "kinds, and for older writers",
        ),
        _field("teacher_digest", _STRING, "weights digest of the teacher"),
        _CREATED_AT,
        _field("logprob_std", pa.float32(), "standard deviation over loss tokens", null=True, unit="nat"),
    ),
    key=("uid", "teacher", "kind"),
)

REWARDS = TableSpec(
    "rewards",
    "One row is the outcome reward of a sample.",
    (
        _field("uid", _STRING, "sample"),
        _field("sample_row", pa.int64(), "row id of the sample in `samples`"),
        _field("verifier", _STRING, "reward function"),
        _field("verifier_version", _STRING, "version of the package it comes from"),
        _field("reward", pa.float32(), "value, by convention in [0, 1]"),
        _field("detail", _STRING, "output of the verifier", null=True),
        _CREATED_AT,
        _CORRECT,
    ),
    key=("uid", "verifier"),
)

PLANS = TableSpec(
    "plans",
    "One row is a planned window: a pure function of (snapshot, seed, settings), recorded before it is used.",
    (*_columns(records.PlanWindow), _CREATED_AT),
    key=("stage", "window"),
)

STEPS = TableSpec(
    "steps", "One row is an optimizer step.", (*_columns(records.StepMetrics), _CREATED_AT), key=("stage", "step")
)

EVALS = TableSpec(
    "evals",
    "One row is a held-out prompt answered by a policy, or its score on a task of lm-eval; never in `samples`.",
    (
        _field("policy", _STRING, "stage whose policy answered"),
        _field("policy_version", pa.int32(), "its version"),
        _field("prompt_id", _STRING, "held-out prompt; for a score, task and settings"),
        _field("domain", _STRING, "domain of the prompt; for a score, the task"),
        _field(
            "reward", pa.float32(), "result of the reward function, partial credit included; or the score", null=True
        ),
        _field("reverse_kl", pa.float32(), "mean student minus teacher log-prob", null=True, unit="nat/token"),
        _field("response", _STRING, "decoded answer; empty for a score"),
        _field("response_len", pa.int32(), "R", unit="tokens"),
        _field("finish_reason", _STRING, "stop, length, or benchmark for a score"),
        _CREATED_AT,
        _CORRECT,
        _field("metric", _STRING, "for a score: metric, filter and settings", null=True),
        _field("stderr", pa.float32(), "for a score: its standard error by lm-eval", null=True),
        _field("documents", pa.int32(), "for a score: number of questions", null=True),
    ),
    key=("policy", "policy_version", "prompt_id"),
)

EVENTS = TableSpec(
    "events",
    "One row is a recorded decision or measurement of the run: stage times, dropped samples, abandoned generations.",
    (
        _field("event_id", _STRING, "unique name, so that a repeated record is one row"),
        _field("stage", _STRING, "job stage"),
        _field("kind", _STRING, "stage_time, drop, abandon, wait, recovery …"),
        _field("iteration", pa.int32(), "iteration; -1 when it has none"),
        _field("value", pa.float64(), "number of the event", null=True),
        _field("detail", _STRING, "JSON"),
        _CREATED_AT,
    ),
    key=("event_id",),
)

LABELS = TableSpec(
    "labels",
    "One row is a label that a reader gave a sample, or removed. The row that was committed last counts.",
    (
        _field("label_id", _STRING, "unique name of the row"),
        _field("uid", _STRING, "sample"),
        _field("label", _STRING, "one word or a few"),
        _field("note", _STRING, "note of the reader; may be empty"),
        _field("author", _STRING, "user name on the reader's machine"),
        _field("removed", pa.bool_(), "true removes the label"),
        _field("created_at", _TIME, "wall clock"),
    ),
    key=("label_id",),
)


CHANGES = TableSpec(
    "changes",
    "One row is a key of the job that got another value after its stage had begun.",
    (*_columns(records.Change), _CREATED_AT),
    key=("ordinal",),
)


LINKS = TableSpec(
    "links",
    "One row is a sample of another store that a stage trains on. Its metadata is in `samples`, its payload there.",
    (
        _field("stage", _STRING, "job stage that trains on it"),
        _field("uid", _STRING, "sample"),
        _field("store", _STRING, "location of the other store"),
        _CREATED_AT,
    ),
    key=("stage", "uid"),
)


def _halves(name: str, doc: str, unit: str = "nat") -> pa.Field:
    return _field(name, _list_of("f2"), f"[M] {doc}; null when not computed or freed", null=True, unit=unit)


TOKEN_STATS = TableSpec(
    "token_stats",
    "One row holds statistics of each trained token from one pass over a sample, in scoring or in a training step.",
    (
        _field("uid", _STRING, "sample"),
        _field("stage", _STRING, "job stage that scored or trained"),
        _field("step", pa.int32(), "optimizer step of the stage; -1 for scoring"),
        _field("teacher", _STRING, "teacher whose distribution was computed; empty for none"),
        _field("sample_row", pa.int64(), "row id of the sample in `samples`"),
        _field("policy_version", pa.int32(), "version the step starts from; -1 for scoring"),
        _field("tokens", pa.int32(), "M", unit="tokens"),
        _field("bytes", pa.int64(), "bytes of the lists; 0 once they are freed", unit="bytes"),
        _field("mean_abs_gap", pa.float32(), "mean of |logprob_gap|", null=True, unit="nat"),
        _field("mean_student_entropy", pa.float32(), "mean of student_entropy", null=True, unit="nat"),
        _field("mean_teacher_entropy", pa.float32(), "mean of teacher_entropy", null=True, unit="nat"),
        _halves("logprob_gap", "trainer's log-prob before the step minus the sampler's (0 where not recorded)"),
        _halves("student_entropy", "entropy of the student's distribution before the step"),
        _halves("teacher_entropy", "entropy of the teacher's distribution"),
        _halves("reverse_kl", "exact KL(student | teacher) over the vocabulary"),
        _halves("forward_kl", "exact KL(teacher | student) over the vocabulary"),
        _halves("top1_agreement", "1 where both have the same likeliest token, else 0", unit=""),
        _CREATED_AT,
    ),
    key=("uid", "stage", "step", "teacher"),
    storage=LIST_STORAGE_VERSION,
)

QUEUE = TableSpec(
    "queue",
    "One row is one write to a queue that another framework puts its data through: the last row of a key is its value.",
    (
        _field("sample", pa.int64(), "the framework's number of the sample"),
        _field("field", _STRING, "name of the value"),
        _field(
            "kind",
            _STRING,
            "tensor, msgpack, cleared: the key has no value any more, or folded: sample is -1, "
            "value is the last record of each log that the dataset has",
        ),
        _field("dtype", _STRING, "of a tensor, as torch names it; else empty"),
        _field("shape", pa.list_(pa.int64()), "of a tensor; else empty"),
        _field("value", pa.large_binary(), "a tensor's bytes in row-major order, or a msgpack document"),
        _field("crc", pa.uint32(), "crc32c of value"),
        _field("put_at", _TIME, "wall clock, informative only"),
        _field("log", _STRING, "log of the process that put it; with seq the identity of the write", null=True),
        _field("seq", pa.int64(), "number of the write in that log", null=True),
    ),
    key=(),
    heavy=True,
)
"""One dataset per queue, at queues/<name>."""

TABLES: dict[str, TableSpec] = {
    spec.name: spec
    for spec in (
        PROMPTS, SAMPLES, TOKENS, TEACHERS, SCORES, REWARDS, PLANS, STEPS, TOKEN_STATS, EVALS, EVENTS, LABELS, CHANGES,
        LINKS,
    )
}  # fmt: skip
"""The fixed tables, in the order of the flow."""

LATER = frozenset({TOKEN_STATS.name, CHANGES.name, LINKS.name})
"""Fixed tables that a store made by an older version may lack until something is written to them."""

SIGNALS: dict[str, TableSpec] = {
    spec.name.removeprefix(fields.SIGNALS): spec
    for spec in (SIGNAL_LOGPROB, SIGNAL_TOPK, SIGNAL_HIDDEN, SIGNAL_ALIGNMENT)
}
"""One dataset per (teacher, kind), at signals/<teacher>/<kind>; other packages' kinds: see plugin_signal."""


@lru_cache(maxsize=64)
def plugin_signal(kind: str) -> TableSpec:
    """Table of another package's kind of signal. Raises UnknownNameError for a name that no kind may have."""
    return signal_spec(kind, "One row is what another package's kind of signal says of a sample's response tokens.")


def signal_table(teacher: str, kind: str) -> str:
    """Name of the dataset that holds one teacher's signal of one kind."""
    return f"signals/{teacher}/{kind}"
