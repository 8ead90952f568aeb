"""Heavy libraries load when work needs them, not before: `--help` and an import stay quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "lance", "transformers", "duckdb", "matplotlib", "jinja2", "pandas")


def modules_after(code: str) -> set[str]:
    """Top-level modules a fresh interpreter holds after running the code."""
    report = "; import sys; print('\\n' + ' '.join(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("\n")[0].rpartition("\n")[2].split())


def test_the_probe_sees_an_import() -> None:
    assert "sqlite3" in modules_after("import sqlite3")


HELP = "from typer.testing import CliRunner; from mopd_dataplane.cli.app import app; CliRunner().invoke(app, {words})"


@pytest.mark.parametrize(
    "code",
    [
        "import mopd_dataplane",
        "import mopd_dataplane.errors, mopd_dataplane.records",
        HELP.format(words=["--help"]),
        HELP.format(words=["train", "--help"]),
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert modules_after(code).isdisjoint(HEAVY)


def test_help_needs_neither_numpy_nor_pydantic() -> None:
    assert modules_after(HELP.format(words=["--help"])).isdisjoint({"numpy", "pydantic"})


def test_tables_and_job_files_need_no_torch_and_no_lance() -> None:
    loaded = modules_after("import mopd_dataplane.tables, mopd_dataplane.job.job")
    assert loaded.isdisjoint({"torch", "lance", "transformers"})


def test_other_trainers_load_when_they_are_asked_for() -> None:
    code = "import mopd_dataplane, mopd_dataplane.integrations; from mopd_dataplane import BatchStream, LoadSpec"
    assert modules_after(code).isdisjoint({"trl", "lm_eval", "transformers", "datasets", "torch"})


def test_a_store_opens_without_torch() -> None:
    loaded = modules_after("from mopd_dataplane import Store")
    assert "lance" in loaded
    assert loaded.isdisjoint({"torch", "transformers"})


@pytest.mark.slow
def test_the_trainer_process_never_loads_lance() -> None:
    loaded = modules_after("import mopd_dataplane.train.run, mopd_dataplane.load.client")
    assert "torch" in loaded
    assert loaded.isdisjoint({"lance", "duckdb"})
