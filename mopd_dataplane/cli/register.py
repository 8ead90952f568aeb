"""Commands from functions: the docstring is the help text, its examples stand below the options.

Each file of commands has an `add_to`, which registers them.

A parameter whose type is a dataclass stands for the options that are declared at the fields of the dataclass, so that
options which several commands share, or which are fields of settings anyway, are declared once.
"""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Annotated, Any, get_origin

from typer import Option, Typer
from typer.core import TyperCommand

AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]


def register(
    group: Typer,
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
    group.command(name, help=text, epilog="\n\n".join(lines), rich_help_panel=panel, cls=cls)(_spread(command))


def _spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer reads it: with the options of each dataclass in place of the parameter."""
    own = inspect.signature(command, eval_str=True)
    options: list[inspect.Parameter] = []
    options_of: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in own.parameters.items():
        several = [parameter]
        if isinstance(kind := parameter.annotation, type) and is_dataclass(kind):
            fields = inspect.signature(kind, eval_str=True).parameters.values()
            several = [each for each in fields if get_origin(each.annotation) is Annotated]
            options_of[name] = kind, [each.name for each in several]
        options += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in several]

    @wraps(command)
    def spread(**options: Any) -> Any:
        for name, (kind, names) in options_of.items():
            options[name] = kind(**{option: options.pop(option) for option in names})
        return command(**options)

    spread.__signature__ = own.replace(parameters=options)  # type: ignore[attr-defined]
    return spread
