"""From a wheel to an answer: a fresh environment, the wheel built here, no repository in sight.

First without torch, on a store that was made elsewhere; then with it, a shrunk quickstart from its name to its export.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHRUNK = [
    *(f"domains.{name}.train=120" for name in ("spell_backward", "number_sorting", "spiral_matrix")),
    *(f"domains.{name}.eval=6" for name in ("spell_backward", "number_sorting", "spiral_matrix")),
    "stages.base.examples=120", "stages.student.iterations=1", "stages.student.rollout.prompts_per_iteration=48",
]  # fmt: skip
Mopd = Callable[..., subprocess.CompletedProcess[str]]


def run(*words: str | Path, cwd: Path, columns: int = 80, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command of the fresh environment, which sees nothing of this one."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment that holds the wheel and what its base install needs."""
    folder = tmp_path_factory.mktemp("first-hour")
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    binaries = folder / "venv" / "bin"
    run(binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return binaries


@pytest.fixture
def mopd(environment: Path, tmp_path: Path) -> Mopd:
    """The installed command, in an empty folder."""
    return lambda *words, **options: run(environment / "mopd", *words, cwd=tmp_path, **options)


def test_the_base_install_brings_no_torch(environment: Path, tmp_path: Path) -> None:
    listed = run(environment / "pip", "list", "--format", "json", cwd=tmp_path).stdout
    names = {package["name"].lower() for package in json.loads(listed)}
    assert names.isdisjoint({"torch", "transformers", "accelerate"})


@pytest.mark.parametrize("columns", [80, 140])
def test_before_the_first_run(mopd: Mopd, tmp_path: Path, columns: int) -> None:
    for command in (["--help"], ["recipes"], ["help"], ["help", "train.schedule"]):
        shown = mopd(*command, columns=columns).stdout
        assert shown.strip()
        assert max(map(len, shown.splitlines())) <= columns
    mopd("init", "quickstart", f"mine{columns}")
    assert (tmp_path / f"mine{columns}" / "job.schema.json").is_file()
    refused = mopd("run", "quickstart", check=False)
    assert refused.returncode == 2
    assert "pip install 'mopd-dataplane[" in refused.stderr


@pytest.mark.parametrize("columns", [80, 140])
def test_a_store_made_elsewhere_answers_without_torch(
    finished_job: Path, mopd: Mopd, tmp_path: Path, columns: int
) -> None:
    shutil.copytree(finished_job / "store", tmp_path / "store")
    commands = [
        ["schema", "store"], ["schema", "store", "samples"], ["query", "store", "select * from samples limit 3"],
        ["query", "store", "from responses limit 3"], ["query", "store", "from accuracy"], ["show", "store"],
        ["show", "store", "--worst"], ["store", "info", "store"],
    ]  # fmt: skip
    for command in commands:
        shown = mopd(*command, columns=columns).stdout
        assert shown.strip(), command
        assert "⟨" not in shown, "text is text"
        assert max(map(len, shown.splitlines())) <= columns, command
    mopd("report", "store", "-o", "report.html")
    mopd("export", "store", "out.jsonl")
    assert (tmp_path / "report.html").stat().st_size > 10_000
    refused = mopd("show", "store", "zz", "--json", check=False)
    assert json.loads(refused.stdout)["error"]["exit_code"] == 2


def test_with_torch_the_quickstart_runs_from_its_name(environment: Path, mopd: Mopd, tmp_path: Path) -> None:
    wheel = next((environment.parents[1]).glob("*.whl"))
    wanted = f"mopd-dataplane[train,jobs] @ {wheel.as_uri()}"
    run(environment / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wanted, cwd=tmp_path)
    mopd("run", "quickstart", *(word for setting in SHRUNK for word in ("--set", setting)))
    store = "runs/quickstart"
    (row,) = json.loads(
        mopd("query", store, "select count(*) as n from responses where policy='student'", "--json").stdout
    )
    assert row["n"] == 48
    assert "reverse KL" in mopd("show", store).stdout
