"""Sections about samples beyond those of an iteration's own prompts: further prompts, older samples, other stores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mopd_dataplane.job.parse import problems_text
from mopd_dataplane.job.section import Fixed, Section

WORDS = ("reference", "rollout", "stored")
"""Where a stage's samples come from, unless they are in other stores."""


class Until(Section):
    """Further prompts for iterations with too few groups whose rewards differ (dynamic sampling of DAPO, arXiv
    2503.14476). Needs `plan.groups = "spread"`."""

    groups: int = Field(ge=1)
    """Groups with different rewards that end the sampling of an iteration; the first so many are trained on."""
    at_most: int = Field(default=4, ge=2)
    """Most prompts that an iteration samples, as a multiple of `prompts_per_iteration`."""


class Replay(Section):
    """Older samples that are trained on once more, beside those of a window's own iteration."""

    iterations: int = Field(ge=1)
    """Iterations before the window's own whose samples may join it."""
    share: float = Field(gt=0, lt=1)
    """Share of the window's samples that are older ones."""


class SourceStore(Section):
    """Samples of another store, or of an earlier stage of the job."""

    store: Fixed[str] = ""
    """Folder or URI of a store, which is only read; default: the job's own, with the samples of its stage `stage`."""
    where: Fixed[str] = ""
    """Condition on its samples, which its own tables answer; default: all of them."""
    stage: Fixed[str] = ""
    """Stage whose samples are taken; default: those of every stage of another store."""

    @model_validator(mode="after")
    def _names_something(self) -> SourceStore:
        if not self.store and not self.stage:
            raise ValueError('name a store, an earlier stage of this job, or both: { stage = "student" }')
        return self


def _named_store(value: Any) -> Any:
    """Read a text as the store alone, without a condition."""
    return {"store": value} if isinstance(value, str) else value


class OtherStores(Section):
    """Samples of other stores, whose payload stays there."""

    model_config = ConfigDict(serialize_by_alias=True)
    sources: Fixed[tuple[Annotated[SourceStore, BeforeValidator(_named_store)], ...]] = Field(
        alias="from", min_length=1
    )
    """Stores in the order in which they are read: a sample that several of them have is taken from the first."""


def _read_data(value: Any) -> Any:
    """Refuse what is neither a word nor a table of other stores, in one message instead of one for each form."""
    if isinstance(value, dict):
        try:
            return OtherStores.model_validate(value)
        except ValidationError as error:
            raise ValueError(
                f'{problems_text(error)}; a table of other stores is {{ from = ["runs/a", {{ store = "runs/b", '
                'where = "reward > 0", stage = "student" }] }'
            ) from None
    if not isinstance(value, OtherStores) and value not in WORDS:
        raise ValueError(f'data is {", ".join(map(repr, WORDS))} or a table {{ from = ["runs/a"] }}')
    return value


Data = Annotated[Literal["reference", "rollout", "stored"] | OtherStores, BeforeValidator(_read_data)]
"""Where the samples of a stage come from."""
