"""What a machine without a GPU can promise about the GPU: every kernel compiles for it, and the bench's steps run."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "kernels" / "benches"


def output_of(script, *arguments):
    done = subprocess.run(
        [sys.executable, BENCHES / script, *arguments], capture_output=True, text=True, check=True, timeout=900
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles_without_spilling(capability):
    """Ahead of time for A100 and H100; a few bytes of spill are noise, a page of them is a wrong tile."""
    pytest.importorskip("triton", reason="the triton extra is not installed")
    rows = [line.split("|")[1:-1] for line in output_of("compile_check.py", "--sm", capability).splitlines()]
    kernels = [row for row in rows if row and "." in row[0]]
    assert {row[0].strip().split(".")[0] for row in kernels} == {
        "fdiv", "softmax", "policy", "scale", "quant", "group_masses",
    }  # fmt: skip
    for row in kernels:
        registers, spilled = int(row[2]), int(row[3])
        assert registers <= 128, row
        assert spilled <= 32, row


@pytest.mark.slow
def test_gpu_bench_rehearses():
    pytest.importorskip("triton", reason="the triton extra is not installed")
    text = output_of("gpu.py", "--rehearse")
    assert "| reverse | trained | fwd+bwd |" in text
    assert "row kernel jsd" in text
    assert "**no**" not in text, "an accuracy goal is missed"
