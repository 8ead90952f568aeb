"""Kinds of values that keys of a job file take."""

from __future__ import annotations

import re
import typing
from typing import Literal

from pydantic import AfterValidator, Field

from mopd_dataplane.base.secrets import check_server_url

NAME = r"^[a-z0-9][a-z0-9_.-]{0,63}$"
Name = typing.Annotated[str, Field(pattern=NAME)]
ServerUrl = typing.Annotated[str, AfterValidator(check_server_url)]
Beta = typing.Annotated[float, Field(ge=0, lt=1)]
Fraction = typing.Annotated[float, Field(ge=0, le=1)]
Band = tuple[float, float]
SAMPLING_MASK_MOST = 1 << 16
"""Largest sampling mask that is recorded."""
Quantisation = Literal["none", "int8", "fp8", "mxfp4"]
Device = typing.Annotated[str, Field(pattern=r"^(auto|cpu|(cuda|xpu|npu|mps)(:\d+)?)$")]
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(==[A-Za-z0-9][A-Za-z0-9.!+_-]*)?")


def check_package(name: str) -> str:
    """The name of a package, or none. Raises ValueError for anything else."""
    if name and not _PACKAGE.fullmatch(name):
        raise ValueError("is not the name of a package: NAME or NAME==VERSION; no path, URL or option is taken")
    return name
