"""Arrays of other dimensions or lengths than their field has are refused at every door, and found in a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import store_builders as build
from replacing import replace_rows

from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.fields import PAYLOAD, RECORDED, of_signal
from mopd_dataplane.records import Sample
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import tokens_crc

RESPONSE = 4
Row = dict[str, Any]


def recorded(number: int = 0, **changes: object) -> Sample:
    """A sample with every recorded field."""
    plain = build.sample(number, response=RESPONSE)
    drawn = plain.tokens[5:][plain.loss_mask.astype(bool)]
    fields: dict[str, object] = {
        "sampling_mask_sizes": np.ones(len(drawn), np.int32),
        "sampling_mask_ids": drawn.copy(),
        "experts": np.zeros((RESPONSE + 4, 3), np.int16),
    }
    return dataclasses.replace(plain, **(fields | changes))  # type: ignore[arg-type]


def other_shapes(array: np.ndarray) -> list[np.ndarray]:
    """The same values in more dimensions, in none, and one value less and more."""
    longer = np.concatenate([array, array[-1:]])
    return [array[None], array[..., None], np.array(array.reshape(-1)[0]), array[:-1], longer, array[:0]]


@pytest.mark.parametrize("name", [field.name for field in (*PAYLOAD, *RECORDED)])
@pytest.mark.parametrize("shape", range(6))
def test_a_sample_with_an_array_of_another_shape_is_refused_and_nothing_is_written(
    store: Store, name: str, shape: int
) -> None:
    wrong = other_shapes(getattr(recorded(), name))[shape]
    with pytest.raises(MismatchError) as refused:
        store.commit_samples([recorded(1), recorded(**{name: wrong})])
    assert build.sample(0).uid in str(refused.value)
    assert store.samples().num_rows == store.table("tokens").num_rows == 0


def test_a_matrix_of_tokens_is_not_ten_ids(store: Store) -> None:
    plain = build.sample(0, response=0, logprobs=None)
    with pytest.raises(MismatchError, match=r"tokens has shape \[5, 2\]; 1 dimension is needed: \[L\] prompt then"):
        store.commit_samples([dataclasses.replace(plain, tokens=np.zeros((5, 2), np.int32))])


@pytest.fixture
def scored(store: Store) -> Store:
    """One sample and a teacher."""
    store.commit_samples([recorded()])
    store.add_teacher(build.teacher("t", head_file=""))
    return store


@pytest.mark.parametrize("kind", ["logprob", "topk", "hidden"])
@pytest.mark.parametrize("shape", range(6))
def test_a_signal_of_another_shape_is_refused_and_nothing_is_written(scored: Store, kind: str, shape: int) -> None:
    good = build.signal(recorded(), 0, kind)
    for field in of_signal(kind):
        wrong = other_shapes(getattr(good, field.name))[shape]
        with pytest.raises(MismatchError, match=f"{field.name} has shape"):
            scored.commit_signals("t", kind, [dataclasses.replace(good, **{field.name: wrong})])
    assert scored.table("scores").num_rows == 0
    assert f"signals/t/{kind}" not in scored.names()


TRAINED = recorded().loss_tokens
WRONG_VALUES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("logprob", {"logprob": [0.0] * RESPONSE}, MismatchError, "a numpy array is needed"),
    ("logprob", {"logprob": np.array(["a"] * RESPONSE)}, MismatchError, "holds <U1 values; numbers are needed"),
    ("logprob", {"logprob": np.full(RESPONSE, -1e300)}, EngineError, "a number beyond 3.4e"),
    ("topk", {"topk_ids": np.full((TRAINED, 4), 1 << 40)}, MismatchError, "topk_ids holds 1099511627776"),
    ("topk", {"topk_ids": np.full((TRAINED, 4), 1.5)}, MismatchError, "whole numbers are needed"),
    ("topk", {"topk_ids": np.zeros((TRAINED, 0), np.int32)}, MismatchError, "0 values a row; allowed: 1 to 32767"),
    ("topk", {"topk_ids": np.zeros((TRAINED, 1 << 15), np.int32)}, MismatchError, "32768 values a row"),
    ("hidden", {"hidden": np.zeros((TRAINED, 0), np.uint8)}, MismatchError, "0 values a row"),
]


@pytest.mark.parametrize(("kind", "change", "error", "message"), WRONG_VALUES)
def test_values_that_no_column_holds_are_refused(
    scored: Store, kind: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scored.commit_signals("t", kind, [dataclasses.replace(build.signal(recorded(), 0, kind), **change)])
    assert scored.table("scores").num_rows == 0


@pytest.mark.parametrize(
    "values", [np.zeros((TRAINED, 2)), np.zeros(TRAINED + 1), np.array("x"), [0.0] * TRAINED, np.array(["x"] * TRAINED)]
)
def test_statistics_of_another_shape_are_refused(scored: Store, values: Any) -> None:
    with pytest.raises(MismatchError, match="student_entropy of sample"):
        write_token_stats(scored, [TokenStats(sample_row=0, stage="s", values={"student_entropy": values})])
    assert scored.table("token_stats").num_rows == 0


def rewrite(store: Store, table: str, change: Callable[[Row], Row]) -> None:
    """Change the first row of a table behind the library's back."""
    dataset = store.dataset(table)
    first, *others = dataset.to_table().to_pylist()
    replace_rows(f"{store.uri}/{table}", pa.Table.from_pylist([change(first), *others], dataset.schema))


def crc_of(row: Row) -> int:
    arrays = [None if row[f.column] is None else np.array(row[f.column], f.dtype) for f in (*PAYLOAD, *RECORDED)]
    return tokens_crc(arrays)


@pytest.mark.parametrize("column", [field.column for field in (*PAYLOAD, *RECORDED)])
def test_the_audit_finds_a_list_of_another_length_whose_checksum_is_right(scored: Store, column: str) -> None:
    assert scored.verify().findings == []
    crcs: list[int] = []

    def longer(row: Row) -> Row:
        changed = row | {column: [*row[column], row[column][-1]]}
        crcs.append(crc_of(changed))
        return changed

    rewrite(scored, "tokens", longer)
    rewrite(scored, "samples", lambda row: row | {"payload_crc": crcs[0]})
    [finding] = Store.open(scored.uri).verify().findings
    count = len(np.asarray(getattr(recorded(), column)).reshape(-1))
    assert (finding.table, finding.row, finding.uid) == ("tokens", 0, recorded().uid)
    assert f"{column} has {count + 1} values, the metadata of its sample asks for {count} values" in finding.problem


def test_the_audit_finds_a_list_that_the_metadata_does_not_know(store: Store) -> None:
    store.commit_samples([recorded(0, experts=None)])
    rewrite(store, "samples", lambda row: row | {"experts_width": 2})
    assert Store.open(store.uri).verify().findings == []  # a recorded list may be null
    rewrite(store, "tokens", lambda row: row | {"experts": [0] * 4})
    crc = crc_of(store.dataset("tokens").to_table().to_pylist()[0])
    rewrite(store, "samples", lambda row: row | {"experts_width": None, "payload_crc": crc})
    [finding] = Store.open(store.uri).verify().findings
    assert "experts has 4 values, the metadata of its sample asks for no list" in finding.problem


def test_the_audit_finds_a_score_and_statistics_of_another_length(scored: Store) -> None:
    scored.commit_signals("t", "logprob", [build.signal(recorded(), 0, "logprob")])
    write_token_stats(scored, [build.statistics(recorded(), 0)])
    assert scored.verify().findings == []
    rewrite(scored, "scores", lambda row: row | {"rows": TRAINED + 1})
    rewrite(scored, "token_stats", lambda row: row | {"student_entropy": [0.5]})
    problems = {(f.table, f.problem) for f in Store.open(scored.uri).verify().findings}
    assert problems == {
        ("scores", f"covers {TRAINED + 1} tokens, its sample has {TRAINED} loss tokens"),
        ("token_stats", f"student_entropy has 1 values, the sample has {TRAINED} loss tokens"),
    }
