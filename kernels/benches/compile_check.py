"""Compile every Triton kernel for a GPU that need not be here, and print registers and spills.

    python kernels/benches/compile_check.py [--sm 90]

Needs triton, no GPU: the launchers run on small CPU tensors, but every launch is turned into an ahead-of-time
compilation for the target, shapes and dtypes specialised as on the GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from mopd_kernels.epilogue import Epilogue, Products
from mopd_kernels.forms import KINDS, divergence_form
from mopd_kernels.layout import CODECS
from mopd_kernels.torch_rows.policy import PolicySettings, TokenConstants
from mopd_kernels.triton_rows import fdiv, group_masses, policy, quant, scale, softmax
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ROWS, COLUMNS = 2, 151_936


class AbsentGpu:
    """As much of a Triton driver as compilation asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, spilled stack bytes and shared bytes of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", done.stdout)}


def compile_instead_of_launch(rows: list[str]) -> Callable[..., Any]:
    """A replacement for ``kernel[grid]`` that appends a table row a launch."""

    def subscript(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            started = time.perf_counter()
            compiled = kernel.warmup(*arguments, grid=grid, **options)
            used = resources(compiled.asm["cubin"])
            shown = ", ".join(f"{k}={int(v)}" for k, v in options.items() if k.isupper())
            rows.append(
                f"| {kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__} | {shown} | {used['REG']} "
                f"| {used['STACK']} | {used['SHARED']} | {time.perf_counter() - started:.1f} |"
            )

        return launch

    return subscript


def launches() -> Iterator[Callable[[], object]]:
    """Every kernel in every variant that generates different code worth looking at."""
    z, ones = torch.zeros(ROWS, COLUMNS), torch.ones(ROWS)
    narrow = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    plain, full = Epilogue(), Epilogue(0.7, 1.1, 30.0, torch.zeros(COLUMNS))
    pair = Products(z, z)
    for kind in KINDS:
        form = divergence_form(kind)
        yield lambda form=form: fdiv.fdiv_rows(pair, form, ones, narrow)
        yield lambda form=form: fdiv.fdiv_rows(Products(z, z, full, full), form, ones, narrow)
    reverse, jsd = divergence_form("reverse"), divergence_form("jsd")
    yield lambda: fdiv.fdiv_rows(pair, reverse, ones, None)
    state = fdiv.RowState._make([ones] * len(fdiv.RowState._fields))
    yield lambda: fdiv.scan_state(pair)
    yield lambda: fdiv.scan_mean(pair, state, jsd)
    yield lambda: fdiv.scan_gradient(pair, state, ones, reverse, ones, z)
    rows = softmax.SoftmaxRows(ones, ones, ones, ones)
    yield lambda: softmax.softmax_rows(z, plain)
    yield lambda: softmax.softmax_gradient(z, plain, rows, ones, None, narrow)
    yield lambda: softmax.softmax_gradient(z, full, rows, ones, ones, narrow)
    tokens = torch.zeros(5000)
    for correction in ("icepop", "tis", "mis"):
        settings = PolicySettings(clip=(0.2, 0.28), correction=correction, distill_clip=1.0)
        yield lambda s=settings: policy.policy_rows(tokens, TokenConstants(*[tokens] * 5), tokens, s)
    yield lambda: scale.scale_unless_one(narrow, ones[0])
    yield lambda: group_masses.group_masses(z, ones, 512)
    for codec in (codec for codec in CODECS.values() if codec.group):
        states = torch.zeros(4, 4096, dtype=torch.bfloat16)
        stored = torch.zeros(4, codec.row_bytes(4096), dtype=torch.uint8)
        yield lambda s=states, c=codec: quant.encode_rows(s, c)
        yield lambda s=stored, c=codec: quant.decode_rows(s, c, 4096, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, default=90, help="compute capability, 80 for A100, 90 for H100")
    options = parser.parse_args()
    driver.set_active(AbsentGpu(options.sm))
    rows: list[str] = []
    JITFunction.__getitem__ = compile_instead_of_launch(rows)
    print(f"triton {triton.__version__}, sm_{options.sm}\n")
    print("| kernel | variant | registers | spilled bytes | shared bytes | compile s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for launch in launches():
        launch()
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
