"""Commands from functions: the docstring is the help text, its examples stand below the options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(
    group: typer.Typer,
    command: Callable[..., Any],
    *examples: str,
    name: str | None = None,
    panel: str | None = None,
    cls: type[TyperCommand] | None = None,
) -> None:
    """Add a command to a group, by default under its function's name. The docstring's paragraphs are unwrapped, so that
    the terminal wraps them."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    lines = ["Examples:" if len(examples) > 1 else "Example:", *(example.replace("[", r"\[") for example in examples)]
    group.command(name, help=text, epilog="\n\n".join(lines), rich_help_panel=panel, cls=cls)(command)
