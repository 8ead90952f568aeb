"""A store with a damaged file of rows: each command says what cannot be read, and what to do; none is a defect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mopd_dataplane import Store
from mopd_dataplane.cli.app import app
from mopd_dataplane.store.format.dataset_format import sql_name


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


@pytest.fixture(scope="module", params=["tokens", "signals", "samples", "scores"])
def emptied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., Store]
) -> tuple[str, str, str]:
    """A store of which every file of rows of a table has no bytes, the uid of a sample, and the table."""
    store = make_store(tmp_path_factory.mktemp("emptied") / "store", prompts=1)
    uid = store.samples(["uid"])["uid"][0].as_py()
    for file in (Path(store.uri) / request.param).rglob("*.lance"):
        file.write_bytes(b"")
    [table, *_] = [name for name in store.names() if name.partition("/")[0] == request.param]
    return store.uri, uid, table


@pytest.mark.slow
@pytest.mark.parametrize("command", ["show", "export", "report", "query", "page"])
def test_files_without_a_byte_are_named_too(emptied: tuple[str, str, str], command: str, tmp_path: Path) -> None:
    """By DuckDB, which carries only the text of Lance's error, as by the other readers."""
    uri, uid, table = emptied
    words = {
        "show": ["show", uri, uid],
        "export": ["export", uri, str(tmp_path / "o.parquet")],
        "report": ["report", uri, "-o", str(tmp_path / "r.html")],
        "query": ["query", uri, f'select * from "{sql_name(table)}"'],
        "page": ["view", uri, "--export", str(tmp_path / "page")],
    }
    result = CliRunner().invoke(app, words[command], env={"COLUMNS": "200"})
    if command == "export" and table not in ("tokens", "samples"):  # it reads neither signals nor scores
        assert result.exit_code == 0, result.output
        return
    if (command, table) == ("page", "tokens"):  # the page is whole, and says it of each sample
        assert result.exit_code == 0, result.output
        assert any("cannot be read" in file.read_text() for file in (tmp_path / "page" / "data").iterdir())
        return
    assert result.exit_code == 3, result.output
    assert "mopd store verify" in result.stderr
    for noise in ("internal error", "Traceback", "/rustc/", "pyarrow"):
        assert noise not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_verify_names_it(damaged: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["store", "verify", damaged[0]], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "samples" in result.stdout
