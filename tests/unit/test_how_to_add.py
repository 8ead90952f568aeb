"""CONTRIBUTING says how many files a change touches: the recipes are followed in a copy of the package, and counted."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2].partition("\n## ")[0]

TERM = {
    "mopd_dataplane/job/objectives.py": [
        (
            "class Objective(Section):\n",
            '''class BitsTerm(Term):
    """Minus the entropy of the student, in a unit of one's own."""

    base: float = 2.0
    """The logarithm's."""


class Objective(Section):
''',
        ),
        (
            "    terms: dict[str, dict[str, Any]] =",
            "    bits: BitsTerm | None = None\n    terms: dict[str, dict[str, Any]] =",
        ),
        ('"cross_entropy", "entropy")\n        built_in', '"cross_entropy", "entropy", "bits")\n        built_in'),
        ("or self.entropy or self.terms", "or self.entropy or self.bits or self.terms"),
    ],
    "mopd_dataplane/job/examples.py": [
        (
            '    "objectives.NAME.cross_entropy.weight": "0.1",\n',
            '    "objectives.NAME.cross_entropy.weight": "0.1",\n    "objectives.NAME.bits.base": "10.0",\n',
        ),
    ],
    "mopd_dataplane/train/objective.py": [
        (
            "        for other in self._plugins:\n",
            """        if objective.bits is not None:
            term = objective.bits
            _, entropy = token_logprob(hidden, head, batch.targets, return_entropy=True)
            entropy = entropy / math.log(term.base)
            sums.add(bits=entropy)
            loss = loss - term.weight * (entropy * self._weights(term, batch, totals)).sum()
        for other in self._plugins:
""",
        ),
        (
            "        names += [name for term in",
            '        names += ["bits"] if self.objective.bits else []\n        names += [name for term in',
        ),
    ],
}
COLUMN = {
    "mopd_dataplane/tables.py": [
        (
            """before in it; null for older writers",
            null=True,
        ),
""",
            """before in it; null for older writers",
            null=True,
        ),
        _field("mood", _STRING, "how the writer felt", null=True),
""",
        ),
    ],
    "mopd_dataplane/records.py": [
        ("    sampler: str | None = None\n", "    mood: str | None = None\n    sampler: str | None = None\n"),
    ],
}
RECIPES = {"a term of an objective": TERM, "a column of `samples`": COLUMN}

MAKE = """
import sys
from dataclasses import replace

import numpy as np

from mopd_dataplane import Sample, create_store, open_store, sample_uid


def sample(number, **more):
    return Sample(
        uid=sample_uid(0, "student", f"p{number}", 0, 0), prompt_id=f"p{number}", group_id=f"p{number}#0",
        group_index=0, iteration=0, domain="math", stage="student", writer="w", writer_seq=number, policy="student",
        temperature=1.0, top_p=1.0, top_k=0, prompt_len=2, tokens=np.arange(1, 6, dtype=np.int32),
        logprobs=np.full(3, -1.0, np.float32), loss_mask=np.ones(3, np.uint8), finish_reason="stop", tokenizer="t",
        version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), **more,
    )

"""
BEFORE = MAKE + "create_store(sys.argv[1]).commit_samples([sample(0)])\n"
AFTER = (
    MAKE
    + """
store = open_store(sys.argv[1])
store.commit_samples([sample(1, mood="glad"), sample(2)])
assert store.samples(["mood"]).to_pylist() == [{"mood": None}, {"mood": "glad"}, {"mood": None}]
assert store.verify(deep=True).findings == []

from mopd_dataplane.job.examples import EXAMPLES
from mopd_dataplane.job.objectives import Objective
assert "objectives.NAME.bits.base" in EXAMPLES
from mopd_dataplane.testing import check_objective

check_objective(Objective(bits={"base": 10.0}))
check_objective(Objective(bits={}, cross_entropy={}))
print("told")
"""
)


def run(script: str, package: Path, store: Path) -> str:
    paths = [str(package), str(ROOT / "kernels")]
    done = subprocess.run(
        [sys.executable, "-c", script, str(store)], capture_output=True, text=True, timeout=240, cwd=store.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_term_and_a_column_are_added_as_contributing_says(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "mopd_dataplane", tmp_path / "mopd_dataplane",
        ignore=shutil.ignore_patterns("__pycache__", "recipes", "assets"),
    )  # fmt: skip
    run(BEFORE, ROOT, tmp_path / "store")
    for changes in RECIPES.values():
        for name, edits in changes.items():
            text = (tmp_path / name).read_text()
            for old, new in edits:
                assert text.count(old) == 1, f"{name}: {old!r}"
                text = text.replace(old, new)
            (tmp_path / name).write_text(text)
    assert run(AFTER, tmp_path, tmp_path / "store").split() == ["told"]


def recipe(what: str) -> tuple[int, str]:
    """(files that it says, its text) of a paragraph of CONTRIBUTING."""
    match = re.search(rf"^\*\*{re.escape(what)}\*\* \((\d) files?, (.*?)(?=^\*\*|\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert match, what
    return int(match[1]), " ".join(match[2].split())


@pytest.mark.parametrize("what", RECIPES)
def test_contributing_counts_and_names_the_files(what: str) -> None:
    count, text = recipe(what)
    assert count == len(RECIPES[what]) <= 3
    for name in RECIPES[what]:
        assert name.removeprefix("mopd_dataplane/") in text


def test_a_divergence_lies_in_the_files_that_contributing_names() -> None:
    """Where the code of the skewed ones is, is where another one goes."""
    sources = [*(ROOT / "mopd_dataplane").rglob("*.py"), *(ROOT / "kernels" / "mopd_kernels").rglob("*.py")]
    files = {file for file in sources if mentions(ast.parse(file.read_text()))}
    count, text = recipe("a divergence")
    assert count == len(files) <= 5
    for file in files:
        assert f"`{file.relative_to(ROOT)}`" in text


def mentions(tree: ast.AST) -> bool:
    """Whether code, not prose, speaks of one of the divergences."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) in prose:
            continue
        for name in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "value", None)):
            if isinstance(name, str) and name.lower() in ("skew_forward", "skew_reverse"):
                return True
    return False


def test_no_engine_is_known_by_its_name() -> None:
    """What a job may ask of an engine is an attribute of its class, so that a new one needs one file and its line."""
    pattern = re.compile(r"""(?:engine\.kind|\bengine(?:"\])?)\s*(?:==|!=|(?:not )?in\b)\s*["'(]|(?:==|!=) *ENGINES""")
    file_names = [file.name for file in (ROOT / "mopd_dataplane").rglob("*.py") if pattern.search(file.read_text())]
    assert file_names == []
    assert recipe("an engine")[0] == 1
