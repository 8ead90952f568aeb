"""The heart of the fault list, at counts that fit `make test`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _figures() -> ModuleType:
    """figures.py under the name that the row modules import it by."""
    if "figures" not in sys.modules:
        spec = importlib.util.spec_from_file_location("figures", Path(__file__).with_name("figures.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["figures"] = module
        spec.loader.exec_module(module)
    return sys.modules["figures"]


@pytest.mark.parametrize("row", _figures().rows(), ids=lambda row: f"{row.number}-{row.fault.replace(' ', '-')}")
def test_row(row) -> None:  # type: ignore[no-untyped-def]
    tally = row.run(row.counts[0], 0)
    assert tally.tried >= row.counts[0]
    assert tally.failures == [], row.rule
