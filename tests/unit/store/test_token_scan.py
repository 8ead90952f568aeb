"""A pass over the token files finds what a plain loop over every sample finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.bench.synthetic import make_store
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.token_scan import scan_tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(0).integers(4, 60, 300).astype(np.int32)
    return make_store(tmp_path_factory.mktemp("scan") / "s", lengths, batch=120)


def looped(store: Store, rows: list[int], skipped: list[int], run: list[int]) -> set[int]:
    tokens = store.read_tokens(rows, ["tokens"])["tokens"].to_pylist()
    return {
        at for at, (ids, skip) in enumerate(zip(tokens, skipped, strict=True))
        if any(ids[i : i + len(run)] == run for i in range(skip, len(ids) - len(run) + 1))
    }  # fmt: skip


@pytest.mark.parametrize("window", [7, 64, 4 << 20])
@pytest.mark.parametrize("run", [[1], [1, 1], [1, 2, 1], [31_999] * 9])
def test_what_is_found_is_what_a_loop_finds(store: Store, run: list[int], window: int) -> None:
    samples, tokens = store.dataset("samples"), store.dataset("tokens")
    table = store.table("samples", ["payload_row", "prompt_len"])
    chosen, prompts = table["payload_row"].to_numpy(), table["prompt_len"].to_numpy()
    for rows, skipped in ((np.arange(300), prompts), (np.arange(299, 0, -3), np.zeros(300, np.int64))):
        matches = scan_tokens(samples, tokens, rows, chosen[rows], skipped[rows], run, window=window)
        assert matches is not None
        parts = list(matches)
        assert {int(position) for places, _ in parts for position in places} == looped(
            store, rows.tolist(), skipped[rows].tolist(), run
        )
        assert [searched for _, searched in parts] == sorted(searched for _, searched in parts)
        assert parts[-1][1] == len(rows)


def test_files_that_are_not_what_was_committed_are_left_to_lance(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", np.full(50, 40, np.int32))
    samples, tokens = store.dataset("samples"), store.dataset("tokens")
    rows = store.table("samples", ["payload_row"])["payload_row"].to_numpy()
    [file] = (tmp_path / "s" / "tokens" / "data").glob("*.lance")
    content = bytearray(file.read_bytes())
    content[:4096] = bytes(4096)
    file.write_bytes(content)
    assert scan_tokens(samples, tokens, np.arange(50), rows, np.zeros(50, np.int64), [1]) is None
