"""docs/cli.md from the command tree: `python -m mopd_dataplane.cli.reference > docs/cli.md` (or `make docs`).

Reads the same help texts that `--help` prints, so the page cannot say anything else; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from mopd_dataplane.cli.app import app

_HEAD = """# The command line

This page is made from the help texts (`make docs`); `mopd COMMAND --help` says the same on a terminal.

Answers go to stdout, progress and notes to stderr; with `--json` stdout is exactly one JSON value.

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


def reference() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    commands = list(_leaves(root, ("mopd",)))
    index = "\n".join(f"- [`{' '.join(path)}`](#{'-'.join(path)}): {_first(command)}" for path, command in commands)
    common = "## Options of `mopd` itself\n\n" + _options(root)
    return "\n\n".join([_HEAD.strip(), index, common, *(_section(path, c) for path, c in commands)]) + "\n"


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
        value = f" {parameter.metavar}" if _is_option(parameter) and parameter.metavar else ""
        names = (
            ", ".join(f"`{name}{value}`" for name in parameter.opts)
            if _is_option(parameter)
            else f"`{parameter.metavar}`"
        )
        rows.append(f"| {names} | {parameter.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(reference(), end="")
