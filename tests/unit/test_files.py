"""Files and folders that several processes write at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mopd_dataplane.base.files import make_folder, publish_file

WRITER = """
import sys
from pathlib import Path
from mopd_dataplane.base.files import publish_file

for turn in range(150):
    publish_file(Path(sys.argv[1]), (sys.argv[2] * 4096).encode())
"""


def test_processes_that_publish_the_same_file_take_turns(tmp_path: Path) -> None:
    target = tmp_path / "job.json"
    publish_file(target, b"a" * 4096)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(target), letter]) for letter in "bcd"]
    while any(writer.poll() is None for writer in writers):
        content = target.read_bytes()
        assert len(content) == 4096, "a reader saw half a file"
        assert len(set(content)) == 1, "a reader saw two writers' bytes"
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["job.json"]


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".job.json.tmp").write_bytes(b"half of somethi" * 100)
    publish_file(tmp_path / "job.json", b"whole")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("job.json", b"whole")]


MAKER = """
import os, signal, sys, time
from pathlib import Path
from mopd_dataplane.base.files import make_folder

def fill(staging):
    assert not list(staging.iterdir())
    for part in range(20):
        (staging / f"part-{part}").write_text(sys.argv[2])
        if sys.argv[3:] == ["die"] and part == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    print("made")

target = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
make_folder(target, fill)
assert len({file.read_text() for file in target.iterdir()}) == 1 and len(list(target.iterdir())) == 20
"""


def maker(target: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(target), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_of_processes_that_make_the_same_folder_one_does_and_the_others_find_it_whole(tmp_path: Path) -> None:
    for turn in range(3):
        target = tmp_path / f"policy-{turn}"
        makers = [maker(target, letter) for letter in "abc"]
        assert [one.stdout and one.stdout.readline() for one in makers] == ["ready\n"] * 3
        for one in makers:
            assert one.stdin
            one.stdin.write("go\n")
            one.stdin.flush()
        said = [one.communicate(timeout=60)[0] for one in makers]
        assert [one.returncode for one in makers] == [0, 0, 0]
        assert sorted(said) == ["", "", "made\n"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["policy-0", "policy-1", "policy-2"]


def test_a_folder_that_a_killed_process_began_is_made_anew(tmp_path: Path) -> None:
    dead = maker(tmp_path / "policy", "a", "die")
    dead.communicate("go\n", timeout=60)
    assert dead.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [".policy.tmp"]
    said, _ = maker(tmp_path / "policy", "b").communicate("go\n", timeout=60)
    assert said == "ready\nmade\n"
    assert os.listdir(tmp_path) == ["policy"]


def test_a_folder_that_cannot_be_filled_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-tokenizer"):
        make_folder(tmp_path / "policy", lambda staging: (tmp_path / "no-such-tokenizer").read_bytes())
    assert list(tmp_path.iterdir()) == []
