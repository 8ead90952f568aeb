"""The page of the demo store, which the tests of the viewer share."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient
from viewing import BEARER, client_of

from mopd_dataplane import Store


@pytest.fixture(scope="module")
def page(demo_store: Store) -> TestClient:
    return client_of(demo_store, **BEARER)
