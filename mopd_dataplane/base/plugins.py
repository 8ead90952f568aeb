"""Plug-ins by name, as a job file or the command line gives it: built in, installed by another package, or importable.

A package offers a plug-in in its pyproject.toml:

    [project.entry-points."mopd.importers"]
    mine = "my_package.formats:read_mine"

Groups: `mopd.engines` (rollout/engines/kinds.py), `mopd.environments` (rollout/tools/environments.py),
`mopd.objectives` and `mopd.divergences` (job/objectives.py), `mopd.signals` (score/signal_kinds.py), `mopd.prompts`
(prompts.py), `mopd.rewards` (score/reward.py), `mopd.importers` (interchange/rows.py), `mopd.trackers`
(train/metrics.py).
"""

import importlib
import os
import sysconfig
import traceback
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mopd_dataplane.errors import UnknownNameError, nearest

_NOT_THE_USERS = (str(Path(__file__).parents[1]) + os.sep, importlib.__file__, "<frozen ")
"""Path prefixes of this package and of the import system."""
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Path prefixes of Python's library and of installed packages."""


def find_plugin(group: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """Return the plug-in called `name`: one of `built_in`, an entry point of `group`, or `package.module:Name`, in this
    order.

    Raises UnknownNameError that lists the names, or says why the module cannot be imported.
    """
    if name in built_in:
        return built_in[name]
    installed = {point.name: point.value for point in entry_points(group=group)}
    module_name, separator, attribute = installed.get(name, name).partition(":")
    what = f"{group.partition('.')[2].removesuffix('s')} {name!r}"
    if not separator:
        raise UnknownNameError(f"no {what}: {nearest(name, [*built_in, *installed])} (or give package.module:Name)")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownNameError(
            f"{what}: cannot import {module_name!r}: {error}; install it, or put its folder on PYTHONPATH"
        ) from None
    except Exception as error:  # the module is the user's and may raise anything
        raise UnknownNameError(
            f"{what}: importing {module_name!r} raised {type(error).__name__}: {error!s:.200} ({raised_at(error)}); "
            "mend the module, then run the same command again"
        ) from error
    plugin = getattr(module, attribute, None)
    if plugin is None:
        public = [member for member in vars(module) if not member.startswith("_")]
        raise UnknownNameError(f"{what}: {module_name!r} has no {attribute!r}: {nearest(attribute, public)}")
    return plugin


def raised_at(error: BaseException) -> str:
    """Return FILE:LINE of the user's code that raised an error: its innermost line outside Python and installed
    packages.

    For an installed plug-in, it is the outermost line of the plug-in.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    own = [frame for frame in foreign if not frame.filename.startswith(_INSTALLED)]
    frame = own[-1] if own else (foreign or frames)[0]
    return f"{frame.filename}:{frame.lineno}"
