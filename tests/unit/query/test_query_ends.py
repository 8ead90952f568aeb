"""A question ends with 0: every table, every payload column, with a limit, a filter and a join, process by process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mopd_dataplane import Store
from mopd_dataplane.store.format.arrow_rows import list_column
from mopd_dataplane.store.format.dataset_format import blob_columns, spec_of

TEACHER = "chain_sum-expert"
"""Whose signals are asked for; those of the others are tables of the same columns."""
ROWS, COMMITS = 4096, 12
"""Payload of more files than are read ahead, so that a limit leaves a reader in the middle of them."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., Store]) -> Store:
    """The demonstration store, with payload that no sample speaks of yet behind its own."""
    store = make_store(tmp_path_factory.mktemp("questions") / "store", prompts=2)
    for name in ("tokens", f"signals/{TEACHER}/logprob"):
        for commit in range(COMMITS):
            store.table_handle(name).append(_payload(store.table_handle(name).schema, commit))
    return store


def _payload(schema: pa.Schema, seed: int) -> pa.Table:
    """Rows of a heavy table: hex uids, lists of 20 small numbers."""
    noise = np.random.default_rng(seed)
    columns = {}
    for field in schema:
        if pa.types.is_list(field.type):
            values = noise.integers(0, 2, (ROWS, 20)).astype(field.type.value_type.to_pandas_dtype())
            columns[field.name] = list_column(list(values), field.type)
        elif pa.types.is_string(field.type):
            columns[field.name] = pa.array([noise.bytes(16).hex() for _ in range(ROWS)], field.type)
        else:
            columns[field.name] = pa.array(np.ones(ROWS), field.type)
    return pa.table(columns)


def questions(store: Store) -> list[str]:
    """Every table x {all columns, each payload column} x {limit, filter, join}."""
    statements = []
    for name in (name for name in store.names() if name.partition("/")[0] != "signals" or TEACHER in name):
        spec = spec_of(name)
        table, key = name.replace("/", "_"), spec.key[0] if spec.key else "uid"
        shown = [column for column in store.dataset(name).schema.names if column not in blob_columns(spec)]
        for column in ["*", *(shown if spec.heavy else [])]:
            taken = f'"{column}"' if column != "*" else column
            other = "samples" if key == "uid" and name != "samples" else f'"{table}"'
            statements += [
                f'select {taken} from "{table}" limit 2',
                f'select {taken} from "{table}" where "{key}" is not null and "{key}" > \'8\' limit 2',
                f'select a.{taken} from "{table}" a join {other} b on a."{key}" = b."{key}" limit 2',
            ]
    return statements


@pytest.mark.slow
@pytest.mark.parametrize("share", [4, 1], ids=["one in four", "all"])
def test_every_question_ends_with_0(store: Store, share: int) -> None:
    statements = questions(store)[::share]  # 4 and 3 share no factor: limit, filter and join take turns
    assert len(statements) > 60 / share
    done = subprocess.run(
        [sys.executable, "-W", "ignore:lance is not fork-safe", Path(__file__).with_name("questions.py"), store.uri],
        input=json.dumps(statements), capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    codes = json.loads(done.stdout)
    assert {question: code for question, code in zip(statements, codes, strict=True) if code} == {}, done.stderr
