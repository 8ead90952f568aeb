"""Folders that must stay folders: an __init__.py there would shadow a third-party package or a stage's tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["kernels", "schemas", "jobs", "evidence", "tests"])
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

    packages = find_packages(str(ROOT), include=["mopd_dataplane*", "mopd_kernels*"])
    packages += find_packages(str(ROOT / "kernels"), include=["mopd_dataplane*", "mopd_kernels*"])
    assert {name.partition(".")[0] for name in packages} == {"mopd_dataplane", "mopd_kernels"}


@pytest.mark.parametrize(
    "package", sorted((ROOT / "mopd_dataplane").rglob("__init__.py")), ids=lambda file: file.parent.name
)
def test_every_package_maps_all_its_files(package: Path) -> None:
    """A newcomer finds the room by reading one docstring; the root package names the flow instead."""
    if package.parent.name == "mopd_dataplane":
        return
    named = set(re.findall(r"^\s*([a-z_]+\.py)\s", package.read_text().split('"""')[1], re.MULTILINE))
    assert named == {file.name for file in package.parent.glob("*.py")} - {"__init__.py", "__main__.py"}


def modules() -> dict[str, Path]:
    """Every module of the two packages by its dotted name."""
    files = [(ROOT, ROOT / "mopd_dataplane"), (ROOT / "kernels", ROOT / "kernels" / "mopd_kernels")]
    file_by_name = {
        ".".join(file.relative_to(root).with_suffix("").parts): file
        for root, package in files
        for file in package.rglob("*.py")
        if "recipes" not in file.parts
    }
    return {name.removesuffix(".__init__"): file for name, file in file_by_name.items()}


def imports(source: str, module_names: set[str]) -> set[str]:
    """Modules that a file imports: as it runs, inside of functions, and for types alone."""
    dependencies: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            dependencies |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            dependencies |= named if named & module_names else {str(node.module)}
    return dependencies & module_names


def circle(sources: dict[str, str]) -> list[str]:
    """Names of modules that import each other in a ring; empty when none do. The root package is left out: it only
    hands names on when they are asked for."""
    module_names = {name for name in sources if name.count(".")}
    try:
        TopologicalSorter({name: imports(sources[name], module_names) - {name} for name in module_names}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle({name: file.read_text() for name, file in modules().items()}) == []


def test_a_circle_is_found() -> None:
    later = "def f():\n    from a.x import name"
    assert set(circle({"a.x": "import a.y", "a.y": later})) == {"a.x", "a.y"}
    for_types = "if TYPE_CHECKING:\n    import a.x"
    assert set(circle({"a.x": "import a.y", "a.y": for_types})) == {"a.x", "a.y"}
    assert circle({"a.x": "import a.y", "a.y": "import b.z"}) == []
