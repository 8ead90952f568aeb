"""What every table of a job file has in common."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A table of the job file: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    one_of: ClassVar[tuple[str, ...]] = ()
    """Keys of which exactly one must be given; `or_else` may take their place."""
    or_else: ClassVar[str] = ""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        keys_set = [name for name in self.one_of if getattr(self, name)]
        if self.one_of and len(keys_set) != 1 and (keys_set or not getattr(self, self.or_else, "")):
            raise ValueError(f"give exactly one of {', '.join(self.one_of)}; found {', '.join(keys_set) or 'none'}")
        return self
