"""Ray for NeMo-RL's tests of its data plane, in place of its own conftest.py, which needs CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def init_ray_cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
