"""The blocks of docs/loops.md that need another trainer run, and verl finds the backend by its own setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from documented import PAGES, blocks, prepare, relative, run_blocks

from mopd_dataplane import Store

FINDS = """
import verl
from transfer_queue.storage.managers.base import StorageManagerFactory
print("MopdStore" in StorageManagerFactory._registry)
"""


def test_the_examples_run(demo_store: Store, tmp_path: Path) -> None:
    [page] = [page for page in PAGES if relative(page) == "docs/loops.md"]
    chosen = [block for block in blocks(page) if block.mark == "loops"]
    assert chosen
    run_blocks(chosen, prepare(Path(demo_store.uri), tmp_path))


def test_verl_imports_the_backend_when_it_is_told_to() -> None:
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "mopd_dataplane.transferqueue"}
    done = subprocess.run(
        [sys.executable, "-c", FINDS], capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    assert done.stdout.split()[-1] == "True"
