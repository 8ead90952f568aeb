"""The small JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from mopd_dataplane.errors import InputError


def read_config(file: Path) -> dict[str, Any]:
    """Read config.json or generation_config.json of a model folder. Raises InputError when it holds no JSON object."""
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read ({error!s:.200}); copy the model's folder again") from None
    if not isinstance(config, dict):
        raise InputError(f"{file} holds a {type(config).__name__}, no object; copy the model's folder again")
    return config
