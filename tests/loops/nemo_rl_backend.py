"""A pytest plug-in that runs NeMo-RL's own tests of its data plane over a store.

NeMo-RL is not on the package index. From a clone of it, with the environment of `make test-loops`:

    cp MOPD/tests/loops/nemo_rl_conftest.py tests/unit/conftest.py   # theirs needs CUDA
    PYTHONPATH=.:MOPD/tests/loops pytest -o addopts= -p nemo_rl_backend tests/unit/data_plane

With MOPD_CONTRACT=1, the tests of `test_interface_contract.py` are run on their TransferQueue client instead of the
client without a transport.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
from nemo_rl.data_plane import build_data_plane_client

from mopd_dataplane.integrations import nemo_rl

CONFIG = {
    "enabled": True, "impl": "transfer_queue", "backend": "simple", "storage_capacity": 1024, "num_storage_units": 1,
    "claim_meta_poll_interval_s": 0.1, "global_segment_size": 0, "local_buffer_size": 0,
}  # fmt: skip

nemo_rl.use_store(tempfile.mkdtemp(prefix="mopd-nemo-"), queue="train")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    """Give the contract a client of TransferQueue."""
    if os.environ.get("MOPD_CONTRACT") and fixturedef.argname == "client":
        client = build_data_plane_client(CONFIG)
        fixturedef.cached_result = (client, 0, None)
        return client
    return None
