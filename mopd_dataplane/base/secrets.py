"""Removes secrets from what is printed or stored: values of secret environment variables, and passwords inside URLs."""

import os
import re
from urllib.parse import urlsplit

_NAMED = re.compile(r"(^|_)(KEY|KEYS|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)(_|$)")
_SHORTEST = 8
"""Length below which a value is taken for an ordinary word, not for a secret."""
_IN_URL = re.compile(r"(?<=://)[^/\s@'\"]+@")
HIDDEN = "***"


def redacted(text: str) -> str:
    """Remove the values of secret environment variables, and user names and passwords in URLs, from a text.

    >>> redacted("http://me:pass@host/v1 refused")
    'http://***@host/v1 refused'
    """
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and _NAMED.search(name.upper()):
            text = text.replace(value, HIDDEN)
    return _IN_URL.sub(f"{HIDDEN}@", text)


def check_server_url(url: str) -> str:
    """Return the URL of a server unchanged after checking it.

    Raises ValueError, without repeating the URL, when it carries a user, a password or options, or is no http URL.
    """
    if not url:
        return url
    try:
        parts = urlsplit(url)
        host, carried = parts.hostname, parts.username or parts.password or parts.query or parts.fragment
        parts.port  # noqa: B018  raises when it is no number
    except ValueError:
        raise ValueError("is not a URL; give the server's API root, like http://127.0.0.1:8000/v1") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("is no http URL; give the server's API root, like http://127.0.0.1:8000/v1")
    if carried:
        raise ValueError(
            "carries a user, a password or options, which would be stored with the job; give http://HOST:PORT/v1, and "
            "the server's key in the environment variable VLLM_API_KEY"
        )
    return url
