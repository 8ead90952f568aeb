"""Records <-> Arrow rows. Shapes and values are checked here, before anything is written."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import payload_crc
from mopd_dataplane.base.sampling_masks import SamplingMasks
from mopd_dataplane.errors import InputError, MismatchError, nearest, require_known
from mopd_dataplane.fields import PAYLOAD, RECORDED, Field, value
from mopd_dataplane.records import FINISH_REASONS, RESUME_KINDS, PlanWindow, Sample, Snapshot, StepMetrics
from mopd_dataplane.store.format.repetition import repetition
from mopd_dataplane.store.format.sample_values import check_values
from mopd_dataplane.tables import FORMAT_VERSION, REWARDS, SAMPLES, TOKENS, TableSpec

_UID = re.compile("[0-9a-f]{32}")
_SAME = tuple(name for name in SAMPLES.schema.names if name in Sample.__dataclass_fields__)
"""Columns of `samples` that are attributes of a sample."""
_PLAN_JSON = ("settings", "snapshot", "stats")
"""Columns of `plans` that hold attributes of a PlanWindow as JSON."""
_PLAN_ARRAYS = ("sample_rows", "pack_starts", "pack_teachers", "step_starts")


def to_rows(spec: TableSpec, records: Iterable[dict[str, Any]]) -> pa.Table:
    """Build Arrow rows of a metadata table; `created_at` is filled in, missing nullable columns are null.

    Raises InputError naming the column that is unknown, missing, or of another type.
    """
    now = datetime.now(UTC)
    filled = [{"created_at": now, **record} if "created_at" in spec.schema.names else record for record in records]
    for name in set().union(*filled) - set(spec.schema.names):
        raise InputError(f"table {spec.name!r} has no column {name!r}: {nearest(name, spec.schema.names)}")
    try:
        rows = pa.Table.from_pylist(filled, schema=spec.schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as error:
        raise InputError(f"table {spec.name!r}: {error}") from error
    for field, column in zip(spec.schema, rows.columns, strict=True):
        if column.null_count and not field.nullable:
            record = filled[column.is_null().to_pylist().index(True)]
            raise InputError(f"table {spec.name!r} needs a value in column {field.name!r}, row {record!r:.200}")
    return rows


def reward_rows(records: Iterable[dict[str, Any]]) -> pa.Table:
    """Build rows of `rewards`. Raises InputError for a reward that is not finite as a float32."""
    rows = to_rows(REWARDS, records)
    rewards = rows["reward"].to_numpy()
    if not (finite := np.isfinite(rewards)).all():
        row = int(np.argmin(finite))
        raise InputError(f"rewards: that of {rows['uid'][row]} is {rewards[row]}; a finite number is needed")
    return rows


def list_column(arrays: Sequence[NDArray[Any] | None], kind: pa.DataType) -> pa.ListArray:
    """Build a list column from one numpy array per row (None is null), in one copy."""
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise InputError(f"{offsets[-1]} values in one batch exceed 2^31 - 1: commit fewer rows at once")
    dtype = kind.value_type.to_pandas_dtype()
    present = [np.asarray(array, dtype) for array in arrays if array is not None]
    values = np.concatenate(present) if present else np.empty(0, dtype)
    nulls = pa.array([array is None for array in arrays]) if any(array is None for array in arrays) else None
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(values, kind.value_type), type=kind, mask=nulls
    )


def check_sample(sample: Sample) -> None:
    """Check lengths, names and log-probs. Raises MismatchError for the first two, EngineError for impossible
    log-probs."""
    where = f"sample {sample.uid}"
    check_values(sample)
    if not _UID.fullmatch(sample.uid):
        raise MismatchError(f"sample uid {sample.uid!r:.80} is not 32 hex digits; use records.sample_uid")
    length = sample.response_len
    starts = np.asarray(sample.version_starts)
    rising = len(starts) < 2 or (starts[1:] > starts[:-1]).all()
    if len(starts) != len(sample.versions) or len(starts) == 0 or starts[0] != 0 or not rising:
        raise MismatchError(
            f"{where}: version_starts {starts.tolist()} and versions {list(sample.versions)} must be of one length, "
            "the first start 0, then rising"
        )
    if starts[-1] > max(length - 1, 0):
        raise MismatchError(f"{where}: a version span starts at {starts[-1]}, past the {length} response tokens")
    for name, allowed in (("finish_reason", FINISH_REASONS), ("resume", RESUME_KINDS)):
        require_known(getattr(sample, name), allowed, f"{where}: {name}", MismatchError)
    _check_sampling_masks(sample, where)
    for name in sample.extra:
        require_known(name, [field.name for field in RECORDED], f"{where}: extra has", MismatchError)


def _check_sampling_masks(sample: Sample, where: str) -> None:
    sizes, ids = sample.sampling_mask_sizes, sample.sampling_mask_ids
    if sizes is None and ids is None:
        return
    if sizes is None or ids is None or len(sizes) != sample.loss_tokens or (sizes < 0).any() or sizes.sum() != len(ids):
        said = [None if array is None else len(array) for array in (sizes, ids)]
        raise MismatchError(
            f"{where}: sampling_mask_sizes and sampling_mask_ids have {said[0]} and {said[1]} values; a size for each "
            f"of the {sample.loss_tokens} loss tokens, at least 0, and as many ids as they sum to"
        )
    drawn = sample.tokens[sample.prompt_len :][np.asarray(sample.loss_mask, bool)]
    if not (good := SamplingMasks(sizes, ids).holds(drawn)).all():
        row = int(np.argmin(good))
        raise MismatchError(f"{where}: loss token {row} is id {drawn[row]}, which its sampling mask does not hold")


def sample_crc(sample: Sample) -> int:
    """Compute payload_crc of the arrays of a sample, in the dtypes in which they are stored."""
    return tokens_crc([_typed(value(sample, field.name), field) for field in (*PAYLOAD, *RECORDED)])


def tokens_crc(arrays: Sequence[NDArray[Any] | None]) -> int:
    """Compute payload_crc of one row of `tokens`: columns of PAYLOAD, then those of RECORDED that are not null."""
    fixed = len(PAYLOAD)
    return payload_crc(*arrays[:fixed], *(array for array in arrays[fixed:] if array is not None))


def _typed(array: NDArray[Any] | None, field: Field) -> NDArray[Any] | None:
    return None if array is None else np.asarray(array, field.dtype).reshape(-1)


def list_views(column: pa.ChunkedArray) -> list[NDArray[Any] | None]:
    """Return one numpy view per row of a list column; None for a null."""
    views: list[NDArray[Any] | None] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy()
        offsets = chunk.offsets.to_numpy()
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        views += [
            values[low:high] if there else None
            for low, high, there in zip(offsets[:-1], offsets[1:], valid, strict=True)
        ]
    return views


def token_rows(samples: Sequence[Sample]) -> pa.Table:
    """Build rows of `tokens`."""
    columns = {"uid": pa.array([sample.uid for sample in samples], pa.string())}
    for field in (*PAYLOAD, *RECORDED):
        kind = TOKENS.schema.field(field.column).type
        columns[field.column] = list_column([_typed(value(sample, field.name), field) for sample in samples], kind)
    return pa.table(columns, schema=TOKENS.schema)


def sample_rows(samples: Sequence[Sample]) -> pa.Table:
    """Build rows of `samples` without the payload; its row id is 0 until placed_rows sets it."""
    return to_rows(SAMPLES, [sample_record(sample) for sample in samples])


def placed_rows(rows: pa.Table, payload_rows: NDArray[np.int64]) -> pa.Table:
    """Set the row ids of the payload in rows of `samples`. payload_rows: [n] row ids in `tokens`."""
    index = rows.schema.get_field_index("payload_row")
    return rows.set_column(index, rows.schema.field(index), pa.array(payload_rows))


def sample_record(sample: Sample) -> dict[str, Any]:
    """Return the values of a row of `samples`, except those that depend on its payload's row."""
    mean, trained = None, sample.loss_tokens
    if sample.logprobs is not None and trained:
        every = trained == sample.response_len
        mean = float(np.mean(sample.logprobs if every else sample.logprobs[np.asarray(sample.loss_mask, bool)]))
    return {name: getattr(sample, name) for name in _SAME} | {
        "policy_version_first": int(sample.versions[0]),
        "policy_version_last": int(sample.versions[-1]),
        "response_len": sample.response_len,
        "total_len": len(sample.tokens),
        "loss_tokens": trained,
        "mean_logprob": mean,
        "version_spans": len(sample.versions),
        **_recorded_sizes(sample),
        "payload_row": 0,
        "payload_crc": sample_crc(sample),
        "schema_version": FORMAT_VERSION,
        "repetition": repetition(sample.tokens[sample.prompt_len :]),
    }


def _recorded_sizes(sample: Sample) -> dict[str, int | None]:
    """Return the columns of `samples` with the sizes of recorded fields; null for fields that are not recorded."""
    sizes: dict[str, int | None] = {}
    for field in RECORDED:
        array = value(sample, field.name)
        if field.width:
            sizes[field.width] = None if array is None else array.shape[1]
        if field.count:
            sizes[field.count] = None if array is None else len(array)
    return sizes


def step_record(step: StepMetrics) -> dict[str, Any]:
    """Return the row of `steps` of a step."""
    divergence = None if np.isnan(step.reverse_kl) else step.reverse_kl
    return asdict(step) | {"extra": json.dumps(step.extra, sort_keys=True), "reverse_kl": divergence}


def plan_record(plan: PlanWindow) -> dict[str, Any]:
    """Return the row of `plans` of a plan."""
    same = {column.name: getattr(plan, column.name) for column in fields(plan)}
    parts = {"settings": plan.settings, "snapshot": asdict(plan.snapshot), "stats": plan.stats}
    return same | {name: json.dumps(parts[name], sort_keys=True) for name in _PLAN_JSON}


def plan_of(row: pa.Table) -> PlanWindow:
    """Return the plan in a single row of `plans`."""
    arrays = {name: np.asarray(row[name].combine_chunks()[0].values.to_numpy()) for name in _PLAN_ARRAYS}
    columns = [column.name for column in fields(PlanWindow) if column.name not in arrays]
    plain = row.select(columns).to_pylist()[0]
    plain |= {name: json.loads(plain[name]) for name in _PLAN_JSON}
    return PlanWindow(**plain | arrays | {"snapshot": Snapshot(**plain["snapshot"])})
