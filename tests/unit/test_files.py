"""Small files that several processes replace at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mopd_dataplane.base.files import publish_file

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
