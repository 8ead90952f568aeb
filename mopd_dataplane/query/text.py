"""Text for display: control characters of model output shown as marks, numbers with units."""

import math
import unicodedata

_CONTROL_PICTURES = 0x2400
_KEEP = frozenset("\n\t")


def visible(text: str) -> str:
    r"""The text with every character that could steer a terminal or reorder a line shown as a symbol or a code.

    Newline and tab stay. Escape, the other C0 and C1 controls, direction overrides, invisible format characters
    and lone surrogates do not.

    >>> visible("a\x1b[31mb\u202e")
    'a␛[31mb\\u202e'
    """
    if text.isprintable():  # has none of the categories that _shown replaces
        return text
    return "".join(_shown(character) for character in text)


def one_line(text: str, *, limit: int = 0) -> str:
    r"""`visible` on one line: newlines and tabs become symbols; cut to `limit` characters with an ellipsis.

    >>> one_line("two\nlines", limit=6)
    'two␊l…'
    """
    line = visible(text).replace("\n", "␊").replace("\t", "␉")
    return line if not limit or len(line) <= limit else line[: limit - 1] + "…"


def _shown(character: str) -> str:
    if character in _KEEP:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(_CONTROL_PICTURES + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
    return character


def count(value: float) -> str:
    """A whole number with thousands separators.

    >>> count(1234567)
    '1,234,567'
    """
    return f"{int(value):,}"


def size(value: float) -> str:
    """Bytes in binary units.

    >>> size(0), size(1536), size(5 << 30)
    ('0 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Wall time in two units at most.

    >>> duration(0.0123), duration(7.25), duration(125), duration(7260)
    ('12 ms', '7.2 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def percent(share: float | None) -> str:
    """A share as a percentage; a dash when there is none.

    >>> percent(0.9312), percent(None)
    ('93.1 %', '–')
    """
    return "–" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A real number with a fixed count of decimals; a dash when there is none.

    >>> number(0.12345), number(float("nan"))
    ('0.123', '–')
    """
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"
