"""Tables in the pages are those of the committed results, results are of today's job and sampler, and no page or label
calls partial credit accuracy."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mopd_dataplane.job.load import load_job
from mopd_dataplane.rollout.engines.sampling import SAMPLER
from mopd_dataplane.run.provenance import commit, provenance, settings_digest

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobs/**/*.md")} - {ROOT / "CHANGELOG.md"})


@pytest.fixture(scope="module")
def evidence() -> Iterator[None]:
    """Makes the modules of evidence/ importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "evidence"))
        yield


@pytest.fixture(scope="module")
def figures(evidence: None) -> ModuleType:
    return importlib.import_module("figures")


def test_the_page_of_recipes_and_its_pictures_are_drawn_from_the_committed_figures(evidence: None) -> None:
    recipes = importlib.import_module("recipes")
    assert recipes.PAGE.read_text() == recipes.page(), "run: python evidence/recipes.py --page-only"
    assert {file.stem for file in recipes.PICTURES.iterdir()} == set(recipes.shown())
    for name in recipes.shown():
        assert (recipes.PICTURES / f"{name}.svg").read_text() == recipes.picture(name), name


def test_the_page_of_evidence_fits_in_one_reading() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert len(page.splitlines()) <= 150
    assert len(re.findall(r"^\| (?!arm |---)", page, re.MULTILINE)) <= 12, "rows of its one table"
    assert len(re.findall(r"^!\[", page, re.MULTILINE)) == 1


def test_pages_and_results_agree(figures: ModuleType) -> None:
    assert list(figures.stale()) == []


def test_every_block_has_a_table(figures: ModuleType) -> None:
    blocks = {page: figures.BLOCK.findall((ROOT / page).read_text()) for page in figures.PAGES}
    assert all(blocks.values()), "a page without a block is not in PAGES"
    for page in PAGES:
        if "<!-- figures:" in page.read_text():
            assert page.relative_to(ROOT).as_posix() in figures.PAGES


@pytest.mark.slow
def test_another_number_in_a_page_or_a_result_is_noticed(figures: ModuleType, tmp_path: Path) -> None:
    for folder in ("jobs", "evidence"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copytree(ROOT / "docs" / "images", tmp_path / "docs" / "images")
    for page in figures.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    (file, *_) = sorted((tmp_path / "jobs" / "quickstart" / "results").glob("*.json"))
    said = json.loads(file.read_text())
    domain = said["policies"]["student"]["domains"]["number_sorting"]
    domain["correct"] = "".join("1" if digit == "0" else "0" for digit in domain["correct"])
    said["sampler"], said["settings"] = "0" * 16, "0" * 16
    file.write_text(json.dumps(said))
    for measured in (tmp_path / "jobs" / "quickstart" / "gradients").glob("*.json"):
        measured.write_text(json.dumps({**json.loads(measured.read_text()), "settings": "0" * 16}))
    command = [sys.executable, tmp_path / "evidence" / "figures.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    problems = done.stdout.splitlines()
    assert any("docs/benchmarks/quickstart.md" in problem for problem in problems)
    assert sum("no longer here" in problem or "settings have changed" in problem for problem in problems) == 2
    assert any("jobs/quickstart/gradients" in problem for problem in problems)


@pytest.mark.parametrize("job", sorted(folder.parent.name for folder in ROOT.glob("jobs/*/results")))
def test_a_result_of_other_settings_or_another_sampler_is_noticed(
    figures: ModuleType, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (result, *_) = figures.results(job)
    assert list(figures._stale_result(job, result)) == []
    said = list(figures._stale_result(job, {**result, "settings": "0" * 16, "sampler": "another/1"}))
    assert len(said) == 2
    assert all(job in problem and "run it again" in problem for problem in said)


def test_a_digest_follows_what_the_job_says_and_nothing_else() -> None:
    job = load_job(ROOT / "jobs" / "quickstart")
    same = load_job(ROOT / "jobs" / "quickstart", overrides=["seed=7", 'store="elsewhere"'])
    other = load_job(ROOT / "jobs" / "quickstart", overrides=["stages.student.train.learning_rate=1e-3"])
    assert settings_digest(job) == settings_digest(same) != settings_digest(other)
    assert settings_digest(job, ["base"]) == settings_digest(other, ["base"]) != settings_digest(job)


def test_a_digest_follows_the_modules_that_draw_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "drawn_prompts.py"
    monkeypatch.syspath_prepend(tmp_path)
    drawn = ['domains.number_sorting.source="drawn_prompts:rows"', 'domains.number_sorting.dataset=""']
    digests = []
    for text in ("rows = 1", "rows = 2"):
        module.write_text(text)
        digests.append(settings_digest(load_job(ROOT / "jobs" / "quickstart", overrides=drawn)))
    assert digests[0] != digests[1]


def test_provenance_says_where_a_figure_comes_from() -> None:
    record = provenance(load_job(ROOT / "jobs" / "quickstart"))
    assert re.fullmatch(r"([0-9a-f]{12}\+?)?", record["commit"])
    assert record["commit"] == commit()
    assert record["sampler"] == SAMPLER
    assert record["host"]["processor"]
    assert {"python", "numpy"} <= record["versions"].keys()


MISNAMED = re.compile(r"avg\(\s*reward\s*\)[^\n]{0,20}\bas accuracy|mean\(\w*reward\w*\)[^\n]*accuracy", re.IGNORECASE)
CODE = sorted(
    {*(ROOT / "mopd_dataplane").rglob("*.py"), *(ROOT / "jobs").rglob("*.py"), *(ROOT / "evidence").rglob("*.py")}
)


def test_no_code_calls_a_mean_reward_accuracy() -> None:
    assert [file.name for file in CODE if MISNAMED.search(file.read_text())] == []


MEANS_RIGHT = re.compile(r"entirely right|not accuracy|accuracy: not run|no accuracy|\bright\b", re.IGNORECASE)
"""What a paragraph about accuracy of answers says beside the word."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_that_says_accuracy_says_that_it_means_entirely_right(page: Path) -> None:
    text = page.read_text()
    if re.search("accura", text, re.IGNORECASE):
        assert MEANS_RIGHT.search(text), f"{page.name} says accuracy and never what it is the share of"
