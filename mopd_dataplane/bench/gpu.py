"""Measurements on a GPU, `make gpu`: part by part, each in a process of its own and with a time limit.

    make gpu PYTHON=python3 PARTS=kernels,attention,sampler,step,engine,score,loader,smollm2

Parts are independent, the most important first, and end within 12 minutes together; the figures of each are written as
it ends, and the page is made from them. Nothing is installed: a package that is missing makes its part "not run".
`kernels` and `sampler` need torch, triton and numpy only. With `--device cpu --small` the parts are rehearsed; their
figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMITS_S = {
    "kernels": 240.0, "attention": 40.0, "sampler": 60.0, "step": 90.0, "engine": 90.0, "score": 60.0, "loader": 60.0,
    "smollm2": 80.0,
}  # fmt: skip
"""Seconds that each part may take; a lent GPU is often lent for 15 minutes."""
PARTS = tuple(LIMITS_S)
PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
RAW = "gpu"
"""Folder of the raw figures, beside the page."""
_SAYS = {
    "kernels": "Errors against float64 and times against bare products of the same shapes; goals in the table.",
    "attention": "Packed rows of 16,384 tokens, forward and backward; errors are relative, against float64.",
    "sampler": "Drawing as the engine does, beside a plain draw on the device; goal: three passes over the logits.",
    "loader": "Packs and hidden states into shared memory, and from there to the device.",
    "engine": "Decoding with the Hugging Face engine, a random model of 0.6 B parameters.",
    "score": "A teacher of 0.6 B parameters reads packed text; its hidden states are encoded.",
    "step": "A training step of 0.6 B parameters: full-vocabulary reverse KL and a policy gradient.",
    "smollm2": "One iteration of jobs/smollm2.",
}


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="names, separated by commas")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--small", action="store_true", help="sizes of a rehearsal")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes; raw figures lie beside it")
    args = parser.parse_args()
    parts = [name for name in args.parts.split(",") if name]
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if (args.device == "cpu" or args.small) and args.page == PAGE:
        parser.error("a rehearsal's figures mean nothing and are not published; give another --page")
    run(parts, device=args.device, small=args.small, page=args.page)


def run(parts: list[str], *, device: str, small: bool, page: Path, limit_s: float | None = None) -> None:
    """Run parts one after the other, each within its limit or `limit_s`; the figures and the page as each ends."""
    raw = page.parent / RAW
    raw.mkdir(parents=True, exist_ok=True)
    for name in (part for part in PARTS if part in parts):
        print(f"{name} …", flush=True)
        result = _in_process(name, device=device, small=small, limit_s=limit_s or LIMITS_S[name])
        (raw / f"{name}.json").write_text(json.dumps({"date": date.today().isoformat(), **result}, indent=1) + "\n")
        page.write_text(render(raw))
        print(f"{name}: {result.get('not_run') or result.get('failed') or 'done'}", flush=True)


def _in_process(name: str, *, device: str, small: bool, limit_s: float) -> dict[str, Any]:
    """Run a part; its figures, or why there are none."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "mopd_dataplane.bench.gpu_parts", name, device, *["small"] * small]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=ROOT, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {limit_s:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"failed": f"exit code {done.returncode}: {last:.300}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def render(raw: Path) -> str:
    """The page of the figures in a folder; a part without figures was never run."""
    lines = [
        "# On a GPU", "",
        "This page shows how exact and how fast the kernels, the sampler and the models are on a GPU. They are "
        "developed",
        "and tested on CPUs. To measure a GPU of your own and write this page anew:", "",
        "```sh gpu", "make gpu", "```", "",
        "Each part is a process of its own with a time limit, twelve minutes together; `make gpu PYTHON=…",
        "PARTS=kernels,sampler` runs some of them, in an interpreter with torch and triton. Tests rehearse their steps",
        "on a CPU (`tests/unit/run/test_gpu_parts.py`).", "",
    ]  # fmt: skip
    for name in PARTS:
        file = raw / f"{name}.json"
        lines += [f"## {name}", "", _SAYS[name], ""]
        result = json.loads(file.read_text()) if file.is_file() else {"not_run": "never run"}
        if why := result.get("not_run") or result.get("failed"):
            lines += [f"**{why}**" if why == "never run" else f"**not run**: {why}", ""]
        else:
            lines += [f"{result['machine']} · {result['date']} · `make gpu PARTS={name}`", "", *_table(result), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(result: dict[str, Any]) -> list[str]:
    lines = ["| what | figure |", "| --- | --- |"]
    lines += [f"| {what} | {_number(value)} |" for what, value in result["figures"].items()]
    for title, rows in result.get("tables", {}).items():
        lines += ["", f"### {title}", "", *rows]
    return lines


def _number(value: object) -> str:
    """A figure with few digits.

    >>> _number(1234567.0), _number(0.01234), _number("none")
    ('1,234,567', '0.0123', 'none')
    """
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
