"""One command for a GPU: check, time, sweep, print the table against the goals. At most nine minutes.

    pip install -e ".[train,triton,bench]"
    python kernels/benches/gpu.py [--write]

``--rehearse`` walks the same steps on a CPU with tiny shapes and Triton's interpreter, to know that they run; its
figures mean nothing and are never written.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

BUDGET_SECONDS = 540
"""Sections that would start after this are left out and named."""


def sections(rehearsal: bool) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """Title and rows of each part, most wanted first."""
    import gpu_accuracy
    import gpu_speed
    from mopd_kernels.testing import GPU_CASES, Case
    from timing import Bench

    device = "cpu" if rehearsal else "cuda"
    bench = Bench(device)
    tiny = Case(rows=4, vocabulary=700, student_width=64, teacher_width=64, distance=0.3)
    cases = (tiny,) if rehearsal else GPU_CASES
    yield "Accuracy", lambda: gpu_accuracy.rows(device, rehearsal)
    yield "Ops, goal shape", lambda: gpu_speed.op_rows(bench, cases[0])
    yield "Parts", lambda: gpu_speed.part_rows(bench, cases[0])
    yield "Peers, goal shape", lambda: gpu_speed.peer_rows(bench, cases[0])
    for case in cases[1:]:
        yield f"Ops, {case}", lambda case=case: gpu_speed.op_rows(bench, case)


def report(rehearsal: bool) -> str:
    import torch
    import triton

    name = "rehearsal on a CPU, figures mean nothing" if rehearsal else torch.cuda.get_device_name()
    started = time.monotonic()
    lines = [
        f"# Kernels on: {name}",
        "",
        f"{date.today()} · torch {torch.__version__} · triton {triton.__version__}",
        "",
    ]
    for title, rows in sections(rehearsal):
        if time.monotonic() - started > BUDGET_SECONDS:
            lines.append(f"## {title}\n\nleft out: the nine minutes were over\n")
            continue
        lines += [f"## {title}", ""]
        for row in rows():
            print(row, flush=True)
            lines.append(row)
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the report under results/")
    parser.add_argument("--rehearse", action="store_true", help="walk the steps on a CPU")
    options = parser.parse_args()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --rehearse walks the steps on a CPU")
    text = report(options.rehearse)
    if options.write and not options.rehearse:
        gpu = torch.cuda.get_device_name().lower().replace(" ", "-")
        (Path(__file__).parent / "results" / f"{gpu}_{date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
