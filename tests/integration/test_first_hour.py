"""From a wheel to an answer: the wheel built here, installed, and no repository in sight.

The short part sees the packages of the tests' own environment, torch hidden; the slow part installs everything afresh,
first without torch, then with it for a shrunk quickstart from its name to its export.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import WITHOUT_TORCH

from mopd_dataplane import Store

ROOT = Path(__file__).parents[2]
SHRUNK = [
    *(f"domains.{name}.train=120" for name in ("spell_backward", "number_sorting", "spiral_matrix")),
    *(f"domains.{name}.eval=6" for name in ("spell_backward", "number_sorting", "spiral_matrix")),
    "stages.base.examples=120", "stages.student.iterations=1", "stages.student.rollout.prompts_per_iteration=48",
]  # fmt: skip
STRAY = ("jobs/quickstart/runs/q/samples.lance", "jobs/runs/x.bin", "jobs/quickstart/__pycache__/seeds.pyc")
"""What a run and an interpreter leave beside the recipes."""
RECIPES = {file.relative_to(ROOT / "jobs").as_posix() for file in (ROOT / "jobs").glob("*/*.toml")}
Mopd = Callable[..., subprocess.CompletedProcess[str]]


def run(*words: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command of the fresh environment, which sees nothing of this one."""
    clean_environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**clean_environment, "OMP_NUM_THREADS": "1"}
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


def archive(folder: Path, kind: str) -> Path:
    """The wheel or the sdist of a source folder, by the build backend itself."""
    out = folder / "out"
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    out.mkdir(exist_ok=True)
    run(sys.executable, "-c", program, cwd=folder / "source")
    (file,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a copy of the tracked files in source/, and what must not travel beside them."""
    folder = tmp_path_factory.mktemp("first-hour")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name, follow_symlinks=False)
    for name in STRAY:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes(b"stray")
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel of this tree."""
    return archive(source, "wheel")


def borrowed(wheel: Path, folder: Path) -> Path:
    """bin/ of an environment with the wheel and, through a path file, the packages of this one but for torch."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    binaries = folder / "venv" / "bin"
    run(sys.executable, "-m", "pip", "--python", binaries / "python", "install", "-q", "--no-deps", wheel, cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "sitecustomize.py").write_text(WITHOUT_TORCH)
    return binaries


def installed(wheel: Path, folder: Path) -> Path:
    """bin/ of an environment with the wheel and what its base install brings."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    binaries = folder / "venv" / "bin"
    run(binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return binaries


@pytest.fixture(
    scope="module",
    params=[pytest.param(borrowed, id="borrowed"), pytest.param(installed, id="installed", marks=pytest.mark.slow)],
)
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment without torch."""
    binaries: Path = request.param(wheel, tmp_path_factory.mktemp("environment"))
    return binaries


@pytest.fixture
def mopd(environment: Path, tmp_path: Path) -> Mopd:
    """The installed command, in an empty folder."""
    return lambda *words, **options: run(environment / "mopd", *words, cwd=tmp_path, **options)


def answers(python: Path, commands: list[list[str]], *, cwd: Path) -> list[tuple[str, int, int, str, str]]:
    """(command, columns, exit code, stdout, stderr) of commands at both widths, all in one interpreter."""
    return [
        tuple(answer) for answer in json.loads(run(python, "-c", EVERY_ANSWER, json.dumps(commands), cwd=cwd).stdout)
    ]


EVERY_ANSWER = """
import json, sys
from typer.testing import CliRunner
from mopd_dataplane.cli.app import app

found = []
for columns in (80, 140):
    for command in json.loads(sys.argv[1]):
        done = CliRunner().invoke(app, command, env={"COLUMNS": str(columns)})
        found.append((" ".join(command), columns, done.exit_code, done.stdout, done.stderr))
print(json.dumps(found))
"""


def test_wheel_and_sdist_hold_every_recipe_and_nothing_a_run_left(source: Path, wheel: Path) -> None:
    in_wheel = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(archive(source, "sdist")) as opened:
        in_sdist = [name.partition("/")[2] for name in opened.getnames()]
    for names in (in_wheel, in_sdist):
        inside = {name.removeprefix("mopd_dataplane/recipes/") for name in names}
        assert inside >= RECIPES
        assert [name for name in names if "/runs/" in name or "__pycache__" in name] == []
    assert {f"jobs/{name}" for name in RECIPES} <= set(in_sdist)


def test_the_base_install_brings_no_torch_and_is_not_the_repository(environment: Path, tmp_path: Path) -> None:
    program = "import mopd_dataplane; print(mopd_dataplane.__file__); import torch"
    done = run(environment / "python", "-c", program, cwd=tmp_path, check=False)
    assert Path(done.stdout.strip()).is_relative_to(environment.parent)
    assert "No module named 'torch'" in done.stderr


def test_before_the_first_run(environment: Path, mopd: Mopd, tmp_path: Path) -> None:
    commands = [["--help"], ["recipes"], ["help"], ["help", "train"], ["help", "train.schedule"]]
    for command, columns, code, shown, complaint in answers(environment / "python", commands, cwd=tmp_path):
        assert code == 0, (command, complaint)
        assert shown.strip(), command
        assert max(map(len, shown.splitlines())) <= columns, command
    mopd("init", "quickstart", "mine")
    assert (tmp_path / "mine" / "job.schema.json").is_file()
    refused = mopd("run", "quickstart", check=False)
    assert refused.returncode == 2
    assert "the packages 'torch', 'transformers'" in refused.stderr, "all that is missing, at once"
    assert "pip install 'mopd-dataplane[train" in refused.stderr


def test_a_store_made_elsewhere_answers_without_torch(demo_store: Store, environment: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_store.uri, tmp_path / "store")
    commands = [
        ["schema", "store"], ["schema", "store", "samples"], ["query", "store", "select * from samples limit 3"],
        ["query", "store", "from responses limit 3"], ["query", "store", "from accuracy"], ["show", "store"],
        ["show", "store", "--worst"], ["store", "info", "store"],
    ]  # fmt: skip
    for command, columns, code, shown, complaint in answers(environment / "python", commands, cwd=tmp_path):
        assert code == 0, (command, complaint)
        assert shown.strip(), command
        assert "⟨" not in shown, "text is text"
        assert max(len(line) for line in shown.splitlines() if str(tmp_path) not in line) <= columns, command


@pytest.mark.slow
def test_what_is_left_behind_needs_no_torch(demo_store: Store, mopd: Mopd, tmp_path: Path) -> None:
    shutil.copytree(demo_store.uri, tmp_path / "store")
    mopd("report", "store", "-o", "report.html")
    mopd("export", "store", "out.jsonl", "--format", "jsonl")
    mopd("view", "store", "--export", "share", "--limit", "3")
    assert (tmp_path / "out.jsonl").read_text().count("\n") > 0
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "share" / "index.html").is_file()
    refused = mopd("show", "store", "zz", "--json", check=False)
    assert json.loads(refused.stdout)["error"]["exit_code"] == 2


@pytest.mark.slow
def test_with_torch_the_quickstart_runs_from_its_name(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    binaries = tmp_path / "venv" / "bin"
    requirement = f"mopd-dataplane[train,jobs] @ {wheel.as_uri()}"
    run(binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", "torch==2.13.0", requirement, cwd=tmp_path)

    def mopd(*words: str) -> str:
        return run(binaries / "mopd", *words, cwd=tmp_path).stdout

    mopd("init", "quickstart", "mine")
    shrunk = [word for setting in SHRUNK for word in ("--set", setting)]
    assert "prompts" in mopd("check", "mine", *shrunk)
    mopd("run", "mine", *shrunk)
    store = "runs/quickstart"
    (row,) = json.loads(mopd("query", store, "select count(*) as n from responses where policy='student'", "--json"))
    assert row["n"] == 48
    assert "reverse KL" in mopd("show", store)
    assert "samples" in mopd("schema", store)
    mopd("report", store, "-o", "report.html")
    mopd("export", store, "out.jsonl", "--format", "jsonl")
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "out.jsonl").read_text().count("\n") > 0
