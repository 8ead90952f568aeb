"""JSON objects that carry their own checksum: the small files that describe a store, a snapshot or a checkpoint.

The key `crc32c` holds eight hex digits over the rest of the object in one fixed form (keys sorted, no spaces), so the
file itself may be formatted for people. A changed value, a missing key and a file that is no JSON all count as damage.
"""

import json
from collections.abc import Mapping
from typing import Any

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.errors import DamagedError

SEAL = "crc32c"


def seal(value: Mapping[str, Any]) -> bytes:
    """Return the object with its checksum, as the bytes of a file."""
    return (json.dumps({**value, SEAL: _crc(value)}, indent=1, sort_keys=True) + "\n").encode()


def seal_line(value: Mapping[str, Any]) -> str:
    """Return the object with its checksum on one line, without a newline."""
    return json.dumps({**value, SEAL: _crc(value)})


def unseal(content: bytes | str, where: str) -> dict[str, Any]:
    """Parse the content of a file that `seal` wrote, and return the object without its checksum.

    Raises DamagedError when the content differs from what was written. where: name of the file, for the error.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is not JSON ({error}); restore it from a copy") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        raise DamagedError(f"{where} holds {kind}, not an object; restore it from a copy")
    if SEAL not in value:
        raise DamagedError(f"{where} lacks its checksum ({SEAL!r}); restore it from a copy")
    said = value.pop(SEAL)
    if said != (crc := _crc(value)):
        raise DamagedError(
            f"{where} has crc32c {crc}, but {said!r:.20} was recorded when it was written; restore it from a copy"
        )
    return value


def _crc(value: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(value, sort_keys=True, separators=(',', ':')).encode()):08x}"
