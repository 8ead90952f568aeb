"""The blocks of docs/transferqueue.md run, with a real TransferQueue."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented import PAGES, blocks, prepare, relative, run_blocks

from mopd_dataplane import Store

MARKED = [page for page in PAGES if any(block.mark == "transferqueue" for block in blocks(page))]


@pytest.mark.parametrize("page", MARKED, ids=relative)
def test_examples_run(page: Path, demo_store: Store, tmp_path: Path) -> None:
    chosen = [block for block in blocks(page) if block.mark == "transferqueue"]
    run_blocks(chosen, prepare(Path(demo_store.uri), tmp_path))


def test_the_page_of_transferqueue_is_among_them() -> None:
    assert [relative(page) for page in MARKED] == ["docs/transferqueue.md"]
