"""CPU time and peak memory of the chunked path against eager, one fresh process a measurement.

    python kernels/benches/cpu.py [--write]

Time is processor time, which a busy machine disturbs least. Memory is the rise of the process's high-water mark during
forward and backward (Linux), so it holds everything the call needed besides its inputs, gradients included. ``--write``
stores the table under results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
from mopd_kernels.testing import CPU_CASES, Case, Inputs, make_inputs
from ops import EAGER, OURS

MEASURED = ("reverse", "jsd", "reverse lean", "policy")


def status_bytes(field: str) -> int:
    """A memory field of /proc/self/status."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024


def measure(who: str, name: str, case: Case) -> dict[str, float]:
    """Processor seconds and peak bytes of forward and backward, in this process."""
    inputs = make_inputs(case)
    leaves = [inputs.student_hidden.requires_grad_(), inputs.student_head.clone().requires_grad_()]
    inputs = Inputs(leaves[0], leaves[1], *inputs[2:])
    op = (OURS if who == "ours" else EAGER)[name]
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status_bytes("VmRSS")
    started = time.process_time()
    op(inputs).backward()
    return {"seconds": time.process_time() - started, "peak": status_bytes("VmHWM") - before}


def in_fresh_process(who: str, name: str, index: int) -> dict[str, float]:
    arguments = [sys.executable, __file__, "--child", who, name, str(index)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def table() -> str:
    lines = [
        "| case | op | eager CPU s | ours CPU s | eager peak MiB | ours peak MiB | memory ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for index, case in enumerate(CPU_CASES):
        for name in MEASURED:
            ours = in_fresh_process("ours", name, index)
            base = in_fresh_process("eager", name.removesuffix(" lean"), index)
            lines.append(
                f"| {case} | {name} | {base['seconds']:.2f} | {ours['seconds']:.2f} | {base['peak'] / 2**20:,.0f} "
                f"| {ours['peak'] / 2**20:,.0f} | {base['peak'] / ours['peak']:.1f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def processor() -> str:
    info = Path("/proc/cpuinfo").read_text()
    return next((row.split(": ")[1] for row in info.splitlines() if row.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table under results/")
    parser.add_argument("--child", nargs=3, metavar=("WHO", "OP", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        who, name, index = options.child
        print(json.dumps(measure(who, name, CPU_CASES[int(index)])))
        return
    text = (
        "# CPU: forward and backward, trained head, float32\n\n"
        f"{date.today()} · {processor()} · {torch.get_num_threads()} thread(s) · torch {torch.__version__}"
        "\n\nCommand: `python kernels/benches/cpu.py --write`. Peak is the rise of the resident "
        "high-water mark over the inputs; it includes the gradients.\n\n" + table() + "\n"
    )
    print(text)
    if options.write:
        (Path(__file__).parent / "results" / f"cpu_{date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
