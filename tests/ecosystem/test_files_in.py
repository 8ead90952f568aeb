"""What the installed peers write today reads as the committed files of tests/data/peers do."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mopd_dataplane.base.file_urls import files_at
from mopd_dataplane.interchange.formats import FORMATS
from mopd_dataplane.interchange.row_files import SUFFIXES, read_rows
from mopd_dataplane.interchange.rows import Row

HERE = Path(__file__).parent
PEERS = HERE.parent / "data" / "peers"
FORMAT = {"verifiers": "verifiers", "verl": "verl", "skyrl": "skyrl", "tinker_cookbook": "tinker", "openai": "openai"}


@pytest.fixture(scope="module")
def peer_files() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_files", HERE / "peer_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_files"] = module
    spec.loader.exec_module(module)
    return module


def rows_of(source: str, folder: Path) -> list[Row]:
    """All rows of a folder, without the files they came from."""
    rows = [
        dataclasses.replace(row, location="")
        for file in files_at(folder, SUFFIXES)
        for location, fields in read_rows(file)
        for row in FORMATS[source](fields, location)
    ]
    assert rows
    return rows


@pytest.mark.parametrize("package", FORMAT)
def test_what_a_package_writes_now_reads_as_what_it_wrote(package: str, peer_files: ModuleType, tmp_path: Path) -> None:
    peer_files.WRITERS[package](tmp_path)
    assert rows_of(FORMAT[package], tmp_path) == rows_of(FORMAT[package], PEERS / package)


def test_verifiers_reads_the_same_of_its_own_file(peer_files: ModuleType, tmp_path: Path) -> None:
    """Tokens, masks and log-probs against verifiers' own view of a branch."""
    from verifiers.v1.trace import WireTrace
    from verifiers.v1.utils.trace_store import read_episodes

    peer_files.verifiers(tmp_path)
    rows = rows_of("verifiers", tmp_path)
    branches = [
        branch
        for episode in read_episodes(tmp_path, WireTrace)
        for trace in episode.traces
        if trace.agent.trainable
        for branch in trace.branches
        if branch.trainable
    ]
    assert len(rows) == len(branches)
    for row, branch in zip(rows, branches, strict=True):
        if row.prompt_ids is None:
            assert row.response == branch.messages[-1].content
            continue
        start = len(row.prompt_ids)
        assert row.prompt_ids + row.response_ids == branch.token_ids
        assert row.loss_mask == [int(own) for own in branch.sampled_mask[start:]]
        assert not any(branch.sampled_mask[:start])
        assert row.logprobs == branch.logprobs[start:]
        whole = branch.reference_logprobs if all(n.reference_logprobs for n in branch.nodes if n.sampled) else None
        assert row.teacher_logprobs == (None if whole is None else whole[start:])


def test_trl_writes_a_step_of_grpo(tmp_path: Path) -> None:
    """In a process of its own: beside these tests lies a folder `vllm`, which TRL would take for the package."""
    done = subprocess.run(
        [sys.executable, str(HERE / "peer_files.py"), str(tmp_path / "out"), "trl"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for kind, prompts in (("text", str), ("messages", list)):
        rows = rows_of("trl", tmp_path / "out" / "trl" / kind)
        assert len(rows) == 4
        assert all(isinstance(row.prompt, prompts) and isinstance(row.response, str) for row in rows)
        assert all(set(row.rewards) == {("digits", "")} and row.iteration == 1 for row in rows)
