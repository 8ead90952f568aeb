"""Every next step that a message names is taken by a test, which says so with `advises` and the message's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from typer.main import get_command

import mopd_dataplane
from mopd_dataplane.cli.app import app

PACKAGE = Path(mopd_dataplane.__file__).parent
TESTS = Path(__file__).parents[2]
ADVICE = re.compile(r"\b(?:lower|raise|set|give)\b|\brun\b.*\bagain\b", re.DOTALL)
SAYING = ("advises", "assert_advised")
IN_JOB_FILES = PACKAGE / "job"
"""Refusals of job files: tests/unit/job/test_advice.py has them all."""


class Message(NamedTuple):
    """A message of an error that names a next step."""

    where: str
    parts: tuple[str, ...]
    """What is fixed in it, between its values."""


def messages() -> Iterator[Message]:
    """Every message of the package with a next step."""
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.is_relative_to(IN_JOB_FILES):
            continue
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and _is_of_an_error(call.func):
                parts = tuple(_fixed_parts(call))
                if ADVICE.search("…".join(parts)):
                    yield Message(f"{file.relative_to(PACKAGE)}:{call.lineno}", parts)


def _is_of_an_error(name: ast.expr) -> bool:
    called = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
    return called.endswith(("Error", "Gone", "Abandoned"))


def _fixed_parts(call: ast.Call) -> Iterator[str]:
    for argument in call.args:
        if isinstance(argument, ast.JoinedStr):
            values = argument.values
        elif isinstance(argument, ast.BinOp):
            values = [node for node in ast.walk(argument) if isinstance(node, ast.Constant)]
        else:
            values = [argument]
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def tried() -> dict[str, str]:
    """Words with which tests say which message's step they take -> file and line of the test."""
    words = {}
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SAYING:
                assert isinstance(node.args[0], ast.Constant), f"{file.name}:{node.lineno}"
                words[str(node.args[0].value)] = f"{file.relative_to(TESTS)}:{node.lineno}"
    return words


def test_every_next_step_is_taken() -> None:
    words = tried()
    untried = [message for message in messages() if not any(one in part for one in words for part in message.parts)]
    listed = "\n".join(f"{message.where}: {'…'.join(message.parts)}" for message in untried)
    assert not untried, (
        'no test takes the next step of these messages: bring each up under advises("its words") in tests/unit/advice, '
        f"and do what it says\n{listed}"
    )


def test_words_name_one_message() -> None:
    every = list(messages())
    for words, test in tried().items():
        named = [message.where for message in every if any(words in part for part in message.parts)]
        assert len(named) == 1, f"{test}: advises({words!r}) is in {named or 'no message'}; use words of one message"


def test_commands_that_messages_name_exist() -> None:
    root = get_command(app)
    for file in PACKAGE.rglob("*.py"):
        for text in re.findall(r"`mopd ([a-z]+(?: [a-z]+)?)", file.read_text()):
            name, _, below = text.partition(" ")
            command = root.commands.get(name)  # type: ignore[attr-defined]
            assert command is not None, f"{file.relative_to(PACKAGE)}: `mopd {text}`"
            if below and hasattr(command, "commands"):
                assert below in command.commands, f"{file.relative_to(PACKAGE)}: `mopd {text}`"
