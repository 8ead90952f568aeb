"""A store with a damaged file of rows: each command says what cannot be read, and what to do; none is a defect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mopd_dataplane import Store
from mopd_dataplane.cli.app import app


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., Store]) -> tuple[str, str]:
    """A store whose first file of `samples` is cut short, and the uid of a sample."""
    store = make_store(tmp_path_factory.mktemp("damaged") / "store", prompts=1)
    uid = store.samples(["uid"])["uid"][0].as_py()
    [file, *_] = sorted((Path(store.uri) / "samples" / "data").iterdir())
    file.write_bytes(file.read_bytes()[:-100])
    return store.uri, uid


@pytest.mark.parametrize("command", ["show", "export", "report", "store compact"])
def test_damage_is_exit_code_3_and_no_defect(damaged: tuple[str, str], command: str, tmp_path: Path) -> None:
    uri, uid = damaged
    more = {"show": [uid], "export": [str(tmp_path / "o.parquet")], "report": ["-o", str(tmp_path / "r.html")]}
    result = CliRunner().invoke(app, [*command.split(), uri, *more.get(command, [])], env={"COLUMNS": "200"})
    assert result.exit_code == 3, result.output
    assert "samples" in result.stderr or uri in result.stderr
    assert "mopd store verify" in result.stderr
    assert "internal error" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_verify_names_it(damaged: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["store", "verify", damaged[0]], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "samples" in result.stdout
