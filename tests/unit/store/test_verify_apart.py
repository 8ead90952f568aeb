"""An audit whose process is ended by what it reads names the place, and audits the rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import Store
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.maintain import verify_apart

DIES = """
import os, sys
from mopd_dataplane.store.maintain import verify_apart, verify_payload
real = verify_payload.token_arrays
def token_arrays(dataset, rows):
    if {dies}:
        os.abort()
    return real(dataset, rows)
verify_payload.token_arrays = token_arrays
verify_payload.CHUNK = 2
verify_apart.main()
"""


def with_deaths(monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    """Have the audit's process end where a chunk of tokens fits."""
    popen = subprocess.Popen

    def child(command: list[str], **kwargs: object) -> object:
        return popen([sys.executable, "-c", DIES.format(dies=dies)], **kwargs)

    monkeypatch.setattr(verify_apart.subprocess, "Popen", child)


def test_a_sound_store_is_found_sound(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    assert verify_apart.verify_apart(store) == store.verify()


@pytest.mark.slow
def test_the_place_that_ends_the_process_is_named_and_the_rest_is_audited(
    make_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    head = next((tmp_path / "s" / "heads").iterdir())
    head.write_bytes(head.read_bytes()[:-1] + b"?")
    with_deaths(monkeypatch, "2 in rows or 5 in rows")
    report = verify_apart.verify_apart(store)
    tokens = [finding for finding in report.findings if finding.table == "tokens"]
    assert [finding.row for finding in tokens] == [2, 4]
    assert all("2 rows from here on: reading them ended the process (SIGABRT" in finding.problem for finding in tokens)
    assert any("head file" in finding.problem for finding in report.findings)
    assert report.checked == store.verify().checked


@pytest.mark.slow
def test_an_audit_that_cannot_begin_says_so(
    make_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    with_deaths(monkeypatch, "os.abort()")
    monkeypatch.setattr(verify_apart, "DEATHS", 2)
    with pytest.raises(ResourceError, match="2 steps of the audit ended its process"):
        verify_apart.verify_apart(store)
