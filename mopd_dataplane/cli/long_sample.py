"""The command `mopd bench long-sample`."""

import tempfile
from pathlib import Path
from typing import Annotated

from typer import Option

from mopd_dataplane.cli.output import note, print_json
from mopd_dataplane.cli.register import AsJson
from mopd_dataplane.cli.rows import print_fitting


def long_sample(
    tokens: Annotated[int, Option("--tokens", min=1000, help="Response tokens of the sample.")] = 1_000_000,
    folder: Annotated[
        Path, Option("--folder", metavar="DIR", exists=True, file_okay=False, help="Where to measure; default: here.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """One very long sample through every stage: peak memory of each beside a bound that follows from the sizes.

    Token log with a SIGKILL in the middle, recovery, store, scoring, signals, plan, loader, training by two ranks that
    share the pack, and `mopd show`. Each stage is a process of its own; its tokens are compared with those that went
    in. The engine replays a response, and the model has two layers and a sliding window of 256 tokens.
    """
    from mopd_dataplane.bench.long_sample import MIB, measure

    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-long-sample-") as scratch:
        rows = measure(Path(scratch).resolve(), tokens, note=lambda text: None if as_json else note(text))
    if as_json:
        print_json(rows)
        return
    print_fitting(
        ("stage", "seconds", "peak MiB", "bound MiB", "equal"),
        [
            [row["stage"], round(row["seconds"], 1), round(row["peak_bytes"] / MIB, 1),
             round(row["bound_bytes"] / MIB, 1), "yes" if row["is_equal"] else "NO"]
            for row in rows
        ],
    )  # fmt: skip
