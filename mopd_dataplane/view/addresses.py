"""The address of a viewer: a store's own port, the token, the way from another machine, and the reader's browser."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
import webbrowser
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mopd_dataplane.errors import InputError, ResourceError

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20_000, 10_000
"""Ports that belong to stores: below those that Linux gives to outgoing connections."""
NEIGHBOURS = 8
"""Ports behind a store's own that are tried when others have taken it."""
SHORTEST_TOKEN, LONGEST_TOKEN = 16, 512


def port_of(uris: Sequence[str]) -> int:
    """The port that belongs to these stores: the same at every start, since it is computed from their addresses."""
    return FIRST_PORT + zlib.crc32("\n".join(uris).encode()) % PORTS


def listen(port: int | None, uris: Sequence[str]) -> socket.socket:
    """A socket on a port of the loopback interface; None takes the stores' own, or one behind it; 0 a free one.

    Raises ResourceError when the port is taken.
    """
    own = port_of(uris)
    for candidate in [port] if port is not None else [*range(own, own + NEIGHBOURS), 0]:
        try:
            return socket.create_server((LOOPBACK, candidate))
        except (OSError, OverflowError) as error:
            refusal = error
    raise ResourceError(
        f"cannot listen on port {port} of {LOOPBACK}: {refusal}; give another --port, or 0 for a free one"
    )


def new_token() -> str:
    """A secret of 192 bits."""
    return secrets.token_urlsafe(24)


def token_in(file: Path) -> str:
    """The token that a file has; a new one is written to a file that is missing, readable by its owner only.

    Raises InputError for a file that others can read, or whose text cannot be a token.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise InputError(f"cannot write a token to {file}: {error}; name a file in a folder that exists") from None
    else:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(new_token() + "\n")
    try:
        mode, token = file.stat().st_mode, file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the token in {file}: {error}; name another file") from None
    if mode & 0o077:
        raise InputError(f"{file} can be read by others (mode {mode & 0o777:o}): run chmod 600 {file}")
    if not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN or not set(token) <= _TOKEN_CHARACTERS:
        raise InputError(
            f"{file} has {len(token)} characters; a token has {SHORTEST_TOKEN} to {LONGEST_TOKEN} letters, digits, "
            "- and _: delete the file, and a token is written to it"
        )
    return token


_TOKEN_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def tunnel(port: int) -> str:
    """The command that makes this machine's viewer reachable on another machine under the same address."""
    return f"ssh -L {port}:{LOOPBACK}:{port} {getpass.getuser()}@{socket.gethostname()}"


def has_browser(environment: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Whether somebody sits before this machine who would see a browser open."""
    if environment.get("BROWSER"):
        return True
    if "SSH_CONNECTION" in environment:
        return False
    return platform in ("darwin", "win32") or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def open_browser(address: str) -> bool:
    """Open an address in the reader's browser. Returns False where none could be started."""
    try:
        return webbrowser.open(address)
    except (webbrowser.Error, OSError):
        return False
