"""Folders that must stay folders: an __init__.py there would shadow a third-party package or a stage's tests."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["kernels", "schemas", "jobs", "tests"])
def test_folder_is_not_a_package(folder: str) -> None:
    """A root package named `kernels` breaks transformers, which imports the package of that name from PyPI."""
    inside = [file for file in (ROOT / folder).rglob("__init__.py") if "mopd_kernels" not in file.parts]
    assert inside == []


def test_test_modules_have_unique_names() -> None:
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_every_stage_is_a_folder_with_a_docstring() -> None:
    for stage in ("rollout", "store", "score", "plan", "load", "train", "query"):
        first = (ROOT / "mopd_dataplane" / stage / "__init__.py").read_text()
        assert first.startswith('"""'), f"{stage}/__init__.py says in one docstring what the stage takes and returns"


def test_only_two_packages_are_installed() -> None:
    from setuptools import find_packages

    found = find_packages(str(ROOT), include=["mopd_dataplane*", "mopd_kernels*"])
    found += find_packages(str(ROOT / "kernels"), include=["mopd_dataplane*", "mopd_kernels*"])
    assert {name.partition(".")[0] for name in found} == {"mopd_dataplane", "mopd_kernels"}


@pytest.mark.parametrize(
    "package", sorted((ROOT / "mopd_dataplane").rglob("__init__.py")), ids=lambda file: file.parent.name
)
def test_every_package_maps_all_its_files(package: Path) -> None:
    """A newcomer finds the room by reading one docstring; the root package names the flow instead."""
    if package.parent.name == "mopd_dataplane":
        return
    named = set(re.findall(r"^\s*([a-z_]+\.py)\s", package.read_text().split('"""')[1], re.MULTILINE))
    assert named == {file.name for file in package.parent.glob("*.py")} - {"__init__.py", "__main__.py"}
