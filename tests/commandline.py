"""The command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""One compute thread per process: tests share the machine."""

WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "accelerate", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""A sitecustomize.py under which no process finds torch, transformers, accelerate or triton."""


def command(*arguments: str | Path) -> list[str]:
    """A command line for this interpreter."""
    return [sys.executable, "-m", "mopd_dataplane", *map(str, arguments)]


def run_mopd(*arguments: str | Path, check: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    words = command(*arguments)
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, check=False)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
