"""A pytest plugin: the end-to-end tests that TransferQueue ships, unchanged, on this backend.

    TQ_TEST_BACKEND=MopdStore python -m pytest -p upstream --pyargs tests.e2e.test_kv_interface_e2e

They look their backend's configuration up in a table of their own; this adds a row to it.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from omegaconf import OmegaConf

import mopd_dataplane.transferqueue


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every collected module's table the backend, over a store of its own."""
    assert mopd_dataplane.transferqueue.MopdStorageManager
    tables: dict[int, dict[str, Any]] = {}
    for item in items:
        table = getattr(getattr(item, "module", None), "BACKEND_CONFIGS", None)
        if table is not None:
            tables[id(table)] = table
        if hasattr(getattr(item, "module", None), "_TQ_CONFIG"):
            item.module._TQ_CONFIG = OmegaConf.create(configuration())  # type: ignore[attr-defined]
    for table in tables.values():
        table["MopdStore"] = configuration()


def configuration() -> dict[str, Any]:
    """This backend over a store of its own."""
    section = {"store": tempfile.mkdtemp(prefix="mopd-tq-"), "queue": "train"}
    backend = {"storage_backend": "MopdStore", "MopdStore": section}
    return {"controller": {"polling_mode": True}, "backend": backend}
