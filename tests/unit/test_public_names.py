"""The public names, pinned: removing or renaming one is a decision, not an accident."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mopd_dataplane
from mopd_dataplane import errors


def test_names_of_the_package() -> None:
    assert mopd_dataplane.__all__ == [
        "Batch", "BatchStream", "Conversation", "Divergence", "Engine", "EngineKind", "Environment", "GroupWriter",
        "Job", "LoadSpec", "MopdError", "Pack", "PlanWindow", "Prompt", "Request", "Sample", "Signal", "Snapshot",
        "StepOutput", "Store", "Teacher", "Term", "TokenSignal", "__version__", "create_store", "load_job",
        "open_store", "plan_ahead", "plan_stage", "reward_stage", "rollout_stage", "run_job", "sample_uid",
        "score_stage", "train_stage",
    ]  # fmt: skip
    for name in mopd_dataplane.__all__:
        assert getattr(mopd_dataplane, name) is not None


def test_pages_and_examples_import_the_public_names_only() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "jobs" / "examples").glob("*.py")]
    deep_import = re.compile(
        r"^from (mopd_dataplane\.(?!integrations\.|transferqueue\.verl_manager)\S+) import", re.MULTILINE
    )
    deep = {page.name: deep_import.findall(page.read_text()) for page in pages}
    assert {page: names for page, names in deep.items() if names} == {}


def test_every_name_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    assert [name for name in mopd_dataplane.__all__ if f"`{name}`" not in page and f"`{name}(" not in page] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stor'"):
        _ = mopd_dataplane.Stor


@pytest.mark.parametrize(
    ("name", "builtin", "exit_code"),
    [
        ("InputError", ValueError, 2),
        ("JobFileError", ValueError, 2),
        ("PromptError", ValueError, 2),
        ("UnknownNameError", LookupError, 2),
        ("MismatchError", ValueError, 2),
        ("QueryError", ValueError, 2),
        ("DamagedError", OSError, 3),
        ("ResourceError", OSError, 4),
        ("DeadlineError", TimeoutError, 5),
        ("EngineError", RuntimeError, 6),
    ],
)
def test_error_is_also_a_standard_exception(name: str, builtin: type[Exception], exit_code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.MopdError)
    assert issubclass(kind, builtin)
    assert kind.exit_code == exit_code


def test_every_error_class_is_listed_in_the_drawn_tree() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.MopdError):
            assert name in (errors.__doc__ or "")
