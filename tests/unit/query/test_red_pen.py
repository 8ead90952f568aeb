"""The head of the report: corrections of teachers, version by version, without scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from corrected_store import ITERATIONS, KINDS, Scored
from hostile import make_hostile

from mopd_dataplane import create_store
from mopd_dataplane.query import red_pen as head
from mopd_dataplane.query.red_pen import red_pen
from mopd_dataplane.query.report import write_report
from mopd_dataplane.store.read.decode import Numbers


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return Scored(tmp_path_factory.mktemp("head") / "store")


def test_each_version_has_the_corrections_of_the_reference(scored: Scored) -> None:
    pen = red_pen(scored.store, scored.store.snapshot(), Numbers())
    assert pen is not None
    assert [version["iteration"] for version in pen["versions"]] == list(range(ITERATIONS))
    for version in pen["versions"]:
        assert [answer["teacher"] for answer in version["answers"]] == sorted(KINDS)
        for answer in version["answers"]:
            at = next(at for at, sample in enumerate(scored.samples) if sample.uid == answer["uid"])
            fixed = {position: token["fix"]["word"] for position, token in enumerate(answer["tokens"]) if token["fix"]}
            reference = scored.reference(answer["teacher"], at)
            assert fixed == {position: f"−{nats:.1f}" if word is None else f"⟨{word}⟩"
                             for position, nats, word in reference}  # fmt: skip
            assert answer["prompt"] == "question 3"
    assert [words["teacher"] for words in pen["lists"]] == sorted(KINDS)
    assert all(len(points.split()) == ITERATIONS for points in pen["curves"].values())
    xs = [version["x"] for version in pen["versions"]]
    assert xs == sorted(xs)
    assert [float(point.split(",")[0]) for point in pen["curves"]["full"].split()] == xs


def test_a_long_run_shows_its_first_its_last_and_some_between(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "MOST_VERSIONS", 2)
    pen = red_pen(scored.store, scored.store.snapshot(), Numbers())
    assert pen is not None
    assert [version["iteration"] for version in pen["versions"]] == [0, ITERATIONS - 1]


def test_the_page_begins_with_it_and_has_no_script(scored: Scored, tmp_path: Path) -> None:
    page = write_report(scored.store, tmp_path / "r.html").read_text()
    assert page.index('id="red-pen"') < page.index('id="accuracy"')
    assert len(re.findall(r'<input type="radio" name="version"', page)) == ITERATIONS
    assert page.count("<ruby") == sum(
        len(scored.reference(name, at)) for name in KINDS
        for at, sample in enumerate(scored.samples) if sample.prompt_id == "p3"
    )  # fmt: skip
    assert "<script" not in page


def test_hostile_texts_are_escaped_and_cut(tmp_path: Path) -> None:
    page = write_report(make_hostile(tmp_path / "hostile"), tmp_path / "r.html").read_text()
    begin = page.index('id="red-pen"')
    section = page[begin : page.index("</section>", begin)]
    assert "&lt;img src=x" in section
    assert "<img" not in section
    assert "<script" not in section
    assert len(section) < 100_000


def test_a_store_without_scored_answers_has_no_such_section(tmp_path: Path) -> None:
    empty = create_store(str(tmp_path / "empty"))
    assert red_pen(empty, empty.snapshot(), Numbers()) is None
    assert 'id="red-pen"' not in write_report(empty, tmp_path / "r.html").read_text()
