"""How commands end: exit codes, one paragraph of error, Ctrl-C, and nearest matches."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commandline import run_mopd
from typer.testing import CliRunner, Result

from mopd_dataplane import Store, errors
from mopd_dataplane.cli import jobs, main
from mopd_dataplane.cli.app import app

JOB = """
name = "tiny"
store = "{store}"
student = {{ path = "nowhere" }}
domains.sums = {{ source = "reasoning-gym", dataset = "chain_sum" }}
plan = {{ pack_tokens = 64, batch_samples = 4 }}
teachers.expert = {{ source = "elsewhere" }}
routing = {{ sums = "expert" }}
stages = [{{ name = "first" }}, {{ name = "second", objective = "sampled" }}]
objectives.sampled.policy_gradient = {{}}
"""


def mopd(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160", **environment})


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(store=tmp_path / "store"))
    return file


@pytest.mark.parametrize("name", ["InputError", "DamagedError", "ResourceError", "DeadlineError", "EngineError"])
def test_every_error_ends_with_its_exit_code(name: str, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(errors, name)

    def fail(*_: Any, **__: Any) -> None:
        raise kind("first line \x1b[31m\nsecond [bold]line[/bold]")

    monkeypatch.setattr(jobs, "load", fail)
    result = mopd("run", job)
    assert result.exit_code == kind.exit_code
    assert result.stdout == ""
    assert result.stderr == "error: first line ␛[31m\n       second [bold]line[/bold]\n"


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device", "/data/job.json"), RuntimeError("I/O error: No space left on device")],
)
def test_a_full_disk_is_an_ending_whoever_met_it(error: Exception, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(jobs, "load", fail)
    result = mopd("run", job)
    assert result.exit_code == 4
    assert result.stderr.startswith("error: the disk is full (")
    assert "free some space, then run again" in result.stderr.replace("\n       ", " ")


def test_an_unforeseen_error_is_one_line_and_says_how_to_see_more(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("nobody thought of it")

    monkeypatch.setattr(jobs, "load", fail)
    result = mopd("run", job)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(
        r"error: internal error: ZeroDivisionError: nobody thought of it at test_cli_endings\.py:\d+; a defect of "
        r"mopd: please report it with what MOPD_DEBUG=1 shows\n",
        result.stderr,
    )
    assert isinstance(mopd("--debug", "run", job).exception, ZeroDivisionError)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG])
def test_what_the_system_refuses_of_a_path_is_no_defect(
    number: int, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "/some/place")

    monkeypatch.setattr(jobs, "load", fail)
    result = mopd("run", job)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: /some/place: {os.strerror(number)}; ")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    plain = [sys.executable, "-m", "mopd_dataplane", "plan", str(tmp_path / "none.toml")]
    debug = [*plain[:3], "--debug", *plain[3:]]
    for command, environment, expected in (
        (plain, {"MOPD_DEBUG": "0"}, False), (debug, {}, True), (plain, {"MOPD_DEBUG": "1"}, True),
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        assert done.returncode != 0
        assert ("Traceback" in done.stderr) == expected, done.stderr


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_with_130_and_says_how_to_go_on(demo_store: Store, number: int) -> None:
    # Keys so few that DuckDB spends minutes in tasks in which it does not look for signals.
    sql = "select sum(a.range * b.range) from range(1000000) a, range(1000000) b where a.range % 7 = b.range % 11"
    # Tests that a shell runs in the background ignore Ctrl-C, and so would their children.
    listen = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "mopd_dataplane", "query", demo_store.uri, sql]
    process = subprocess.Popen(
        [sys.executable, "-c", listen, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "duckdb" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.1)
    imported = cpu_seconds(process.pid)
    while cpu_seconds(process.pid) < imported + 3:  # past the imports that follow, into a query that never ends
        time.sleep(0.1)
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert err == "interrupted; run the same command again to continue\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qury"], "'query'"),
        (["store", "verfy", "s"], "'verify'"),
        (["query", "--jsn", "s", "select 1"], "--json"),
        (["run"], "JOB"),
        (["query", "s", "select 1", "--limit", "0"], "--limit"),
    ],
)
def test_a_slip_names_the_nearest_match(words: list[str], said: str) -> None:
    result = mopd(*words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_job_errors_come_before_any_work(job: Path, tmp_path: Path) -> None:
    for words, said in (
        (["--set", "stages.first.plan.pack_tokenz=4"], "did you mean 'pack_tokens'"),
        (["--set", "seed"], "--set takes KEY=VALUE"),
        (["--stage", "frist"], "did you mean 'first'"),
    ):
        result = mopd("plan", job, *words)
        assert result.exit_code == 2, result.output
        assert said in result.stderr
    assert not (tmp_path / "store").exists()


def test_an_open_choice_of_stage_names_the_stages(job: Path) -> None:
    result = mopd("rollout", job)
    assert result.exit_code == 2
    assert "first, second" in result.stderr


def test_options_override_the_job_file(job: Path, tmp_path: Path) -> None:
    loaded = jobs.load(str(job), jobs.Overrides(["plan.pack_tokens=128"], 9, str(tmp_path / 'a "b"')))
    assert loaded.seed == 9
    assert loaded.store == str(tmp_path / 'a "b"')
    assert {stage.plan.pack_tokens for stage in loaded.stages} == {128}


def test_broken_pipe_is_silent(demo_store: Store) -> None:
    command = f"{sys.executable} -m mopd_dataplane query {demo_store.uri} 'select * from range(300000)' --csv | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "range\n"
    assert done.stderr == ""


def commands() -> list[list[str]]:
    import typer

    root: Any = typer.main.get_command(app)
    command_paths: list[list[str]] = [[]]
    for name, command in root.commands.items():
        command_paths.append([name])
        command_paths += [[name, child] for child in getattr(command, "commands", {})]
    return command_paths


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_explains_with_an_example(words: list[str]) -> None:
    result = mopd(*words, "--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "Example" in result.stdout or "Commands" in result.stdout


def test_commands_stand_in_the_order_of_the_flow() -> None:
    text = mopd("--help").stdout
    order = [
        text.index(f" {name} ") for name in ("run", "rollout", "score", "reward", "plan", "train", "query", "show")
    ]
    assert order == sorted(order)


def test_version() -> None:
    from mopd_dataplane import __version__

    assert mopd("--version").stdout == f"mopd-dataplane {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["query"], "Missing argument 'STORE'"),
        (["querry", "x"], "Did you mean 'query'"),
        (["query", "x", "y", "--lmit", "3"], "--lmit"),
        (["query", "x", "y", "--limit", "0"], "greater than or equal to 1"),
        (["--bogus", "query"], "--bogus"),
    ],
)
def test_what_the_parser_refuses_is_json_where_json_was_asked_for(words: list[str], says: str) -> None:
    done = run_mopd(*words, "--json", check=False)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["exit_code"]) == (2, 2)
    assert says in error["message"]
    assert done.stderr == ""
    plain = run_mopd(*words, check=False)
    assert (plain.returncode, plain.stdout) == (2, "")


def test_ctrl_c_while_commands_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mopd_dataplane.cli.app", Interrupted("app"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
