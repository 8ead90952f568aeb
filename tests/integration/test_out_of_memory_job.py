"""Memory runs out: the message names the key, its value and a smaller one, and the command with it goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commandline import ENVIRONMENT, run_mopd
from exhausting import FITTING_SLOTS, GREEDY, NARROW, exhaust
from test_change_job import job_in

from mopd_dataplane import open_store
from mopd_dataplane.base.memory import explain_out_of_memory, is_out_of_memory
from mopd_dataplane.errors import InputError, ResourceError

ADVICE = re.compile(r"run the same command again with --set (\S+=\S+)")


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the job's processes import this folder's modules."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", path)


def advice_of(stderr: str) -> str:
    advice = ADVICE.search(" ".join(stderr.split()))
    assert advice, stderr
    return advice[1]


@pytest.mark.slow
def test_sampling_goes_on_with_what_the_message_proposes(tmp_path: Path) -> None:
    words = ["run", job_in(tmp_path), "--set", f"engine.kind={NARROW}", "--set", "stages.student.iterations=1"]
    slots = 8
    while slots > FITTING_SLOTS:
        stopped = run_mopd(*words, "--set", f"engine.slots={slots}", check=False)
        assert stopped.returncode == ResourceError.exit_code, stopped.stderr
        assert f"engine.slots is {slots} (sequences decoded together)" in " ".join(stopped.stderr.split())
        slots //= 2
        assert advice_of(stopped.stderr) == f"engine.slots={slots}"
    run_mopd(*words, "--set", f"engine.slots={slots}")
    assert open_store(str(tmp_path / "store")).verify().findings == []


@pytest.mark.slow
def test_training_goes_on_with_what_the_message_proposes(tmp_path: Path) -> None:
    words = ["run", job_in(tmp_path), "--set", "stages.student.iterations=1"]
    stopped = run_mopd(*words, "--set", f"stages.student.train.track={GREEDY}", check=False)
    assert stopped.returncode == ResourceError.exit_code, stopped.stderr
    message = " ".join(stopped.stderr.split())
    assert "stage 'student': training ran out of memory" in message
    run_mopd(*words, "--set", "stages.student.train.track=none", "--set", advice_of(stopped.stderr))


def test_only_exhausted_memory_is_renamed() -> None:
    renamed = r"scoring ran out of memory \(.*allocate.*\); what is stored stays. Halve"
    with pytest.raises(ResourceError, match=renamed), explain_out_of_memory("scoring", "Halve it"):
        exhaust()
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")):
        assert is_out_of_memory(error)
    for other in (RuntimeError("shapes differ"), InputError("no such key")):
        with pytest.raises(type(other)), explain_out_of_memory("scoring", "Halve it"):
            raise other


def test_a_command_without_advice_of_its_own_names_it_too(tmp_path: Path) -> None:
    code = (
        "from mopd_dataplane.store.dataset import Store\n"
        "from mopd_dataplane.cli import main\n"
        "Store.open = classmethod(lambda *_, **__: bytearray(1 << 62))\n"
        "main()\n"
    )
    words = [sys.executable, "-c", code, "store", "verify", str(tmp_path)]
    stopped = subprocess.run(words, capture_output=True, text=True, check=False)
    assert stopped.returncode == ResourceError.exit_code, stopped.stderr
    assert "error: out of memory (MemoryError)" in stopped.stderr
