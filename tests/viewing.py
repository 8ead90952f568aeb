"""The page's side of the viewer's server, in the process of the test."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from mopd_dataplane import Store
from mopd_dataplane.view.app import build_app
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.stores import ShownStores

PORT = 8123
TOKEN = "secret"
BASE = f"http://127.0.0.1:{PORT}"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def client_of(store: Store, **headers: str) -> TestClient:
    """A page that shows one store, with these headers."""
    app = build_app(ShownStores([Shown(store)]), token=TOKEN, port=PORT)
    return TestClient(app, base_url=BASE, headers=headers, follow_redirects=False)


def get(page: TestClient, name: str, **params: Any) -> Any:
    """An answer, which must be one."""
    answer = page.get(f"/api/{name}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows_of(table_page: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a page of the table."""
    return [dict(zip(table_page["columns"], row, strict=True)) for row in table_page["rows"]]


def some_uid(page: TestClient, where: str = "kl is not null") -> str:
    """A sample that matches."""
    return str(rows_of(get(page, "samples", where=where, limit=1))[0]["uid"])


def unpack(packed: dict[str, str]) -> np.ndarray:
    """An array that travelled."""
    return np.frombuffer(base64.b64decode(packed["data"]), packed["kind"])
