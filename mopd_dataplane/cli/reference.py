"""docs/cli.md from the command tree, docs/fields.md from the registry of per-token fields (`make docs`).

    python -m mopd_dataplane.cli.reference > docs/cli.md
    python -m mopd_dataplane.cli.reference fields > docs/fields.md

Reads the help texts that `--help` prints and the fields that the code reads; a test compares page and source.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import typer

from mopd_dataplane.cli.app import app
from mopd_dataplane.fields import ALIGNMENT, FIELDS, SIGNALS, Field

_HEAD = """# The command line

Look up a command of `mopd` here: what it does, its options, and examples. The same text on a terminal:

```console run
$ mopd query --help
$ mopd query runs/quickstart "select domain, count(*) as samples from samples group by domain" --json
```

`make docs` writes this page from the help texts. Answers go to stdout, progress and notes to stderr; with `--json`
stdout is exactly one JSON value.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | `store verify` found something wrong, or an internal error |
| 2 | input that cannot be used: job file, prompts, names, digests, SQL, options |
| 3 | bytes on disk are not what was written |
| 4 | no space, no memory, or a lock held by another process |
| 5 | a peer process did not answer in time |
| 6 | an engine returned garbage or died |
| 130 | interrupted, by Ctrl-C or SIGTERM; run the same command again to continue |
"""


_FIELDS_HEAD = """# Per-token fields

Look up here what is stored for each token of a sample, with which shape and dtype, and what a pack carries. To read
the tokens and log-probs of one sample:

```python run
from mopd_dataplane import open_store

store = open_store("runs/quickstart")
rows, samples = next(store.scan_samples(["uid", "prompt_len"], limit=1))
print(samples.to_pylist(), store.read_tokens(rows, columns=["tokens", "logprobs", "loss_mask"]).to_pylist())
```

Every such array is one row of `mopd_dataplane/fields.py`, from which `make docs` writes this page. Columns and schemas,
checks, checksums, the layout of a slot, how a pack is cut, what a micro-batch carries, import and export follow from
the row. A record keeps a field as an attribute where its class declares one, else in `extra` by its name.

| axis | values |
|---|---|
| **token** | one for every token of a sample |
| **read** | one for every token but the last |
| **response** | one for every token after the prompt |
| **trained** | one for every token with `loss_mask` 1 |
| **ragged** | several for each trained token |
| **teacher** | one for every token of the response in the tokens of a teacher with another tokenizer |
| **span** | one for each stretch of one policy version |
| **sample**, **bound** | one for each sample of a pack; bounds have one more |

In a pack a field of some tokens has a value for every token: 0, or its blank, where the store has none. Packs carry a
record if `LoadSpec.recorded` names it and some sample of the window has it. They carry a signal if `LoadSpec.signals`
names it.

| field | where: table, column | axis | dtype | in a pack | record | meaning |
|---|---|---|---|---|---|---|
"""


def reference() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    commands = list(_leaves(root, ("mopd",)))
    index = "\n".join(f"- [`{' '.join(path)}`](#{'-'.join(path)}): {_first(command)}" for path, command in commands)
    common = "## Options of `mopd` itself\n\n" + _options(root)
    return "\n\n".join([_HEAD.strip(), index, common, *(_section(path, c) for path, c in commands)]) + "\n"


def fields_page() -> str:
    """The page of per-token fields."""
    return _FIELDS_HEAD + "".join(f"| {' | '.join(_cells(field))} |\n" for field in FIELDS)


def _cells(field: Field) -> list[str]:
    where = f"`{field.table}`, `{field.column}`" if field.table else "made by the loader"
    width = f", `{field.width}` each" if field.width else ""
    packed = "never" if field.table == SIGNALS + ALIGNMENT else f"`{field.pack}`: {field.pack_axis}{width}"
    return [f"`{field.name}`", where, field.axis, np.dtype(field.dtype).name, packed, field.record, field.doc]


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, child in command.commands.items():
        yield from _leaves(child, (*path, name))


def _first(command: Any) -> str:
    return str(command.help).partition("\n\n")[0]


def _section(path: tuple[str, ...], command: Any) -> str:
    arguments = [parameter.metavar for parameter in command.params if not _is_option(parameter)]
    usage = " ".join([*path, *arguments, "[OPTIONS]"])
    examples = [line.replace(r"\[", "[") for line in command.epilog.split("\n\n")[1:]]
    blocks = [f"## {' '.join(path)}", f"`{usage}`", command.help, "```sh\n" + "\n".join(examples) + "\n```"]
    return "\n\n".join([*blocks, _options(command)])


def _is_option(parameter: Any) -> bool:
    return str(parameter.opts[0]).startswith("-")


def _options(command: Any) -> str:
    rows = ["| | |", "|---|---|"]
    for parameter in command.params:
        value = f" {parameter.metavar}" if parameter.metavar else ""
        spelled = [f"{name}{value}" for name in parameter.opts] if _is_option(parameter) else [parameter.metavar]
        rows.append(f"| {', '.join(f'`{one}`' for one in spelled)} | {parameter.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(fields_page() if sys.argv[1:] == ["fields"] else reference(), end="")
