"""A table of a job file, and the class of each of its keys: what a new value does to a run that has begun."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator


class ChangeClass(StrEnum):
    """What happens when the value of a key changes in the middle of a run."""

    FREE = "free"
    """Speed, memory or place: the new value holds at once."""
    FROM_HERE = "from here on"
    """What is computed: the new value holds from the next iteration on, and has to be accepted."""
    FIXED = "fixed"
    """The store stands on it: a new value needs another store."""


Value = TypeVar("Value")
Free = Annotated[Value, ChangeClass.FREE]
FromHere = Annotated[Value, ChangeClass.FROM_HERE]
Fixed = Annotated[Value, ChangeClass.FIXED]


class Section(BaseModel):
    """A table of the job file: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    one_of: ClassVar[tuple[str, ...]] = ()
    """Keys of which exactly one must be given; `or_else` may take their place."""
    or_else: ClassVar[str] = ""
    change: ClassVar[ChangeClass] = ChangeClass.FROM_HERE
    """Class of the keys that are not marked Free, FromHere or Fixed."""
    fixed_because: ClassVar[str] = ""
    """Why its fixed keys are fixed, and the way out besides another store."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        keys_set = [name for name in self.one_of if getattr(self, name)]
        if self.one_of and len(keys_set) != 1 and (keys_set or not getattr(self, self.or_else, "")):
            raise ValueError(f"give exactly one of {', '.join(self.one_of)}; found {', '.join(keys_set) or 'none'}")
        return self

    @classmethod
    def change_class(cls, key: str) -> ChangeClass:
        """Class of one of its keys."""
        marks = [mark for mark in cls.model_fields[key].metadata if isinstance(mark, ChangeClass)]
        return marks[0] if marks else cls.change
