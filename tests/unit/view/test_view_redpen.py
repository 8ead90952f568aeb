"""The first page of the viewer: what the server answers, what an export holds, and colours that can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from corrected_store import ITERATIONS, KINDS, PROMPTS, Scored
from hostile import make_hostile
from starlette.testclient import TestClient
from typer.testing import CliRunner
from viewing import BEARER, client_of, get

from mopd_dataplane import create_store
from mopd_dataplane.cli.app import app
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.view import bundle, export
from mopd_dataplane.view.export import export_redpen
from mopd_dataplane.view.shown import Shown


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return Scored(tmp_path_factory.mktemp("redpen") / "store")


@pytest.fixture(scope="module")
def redpen(scored: Scored) -> TestClient:
    return client_of(scored.store, **BEARER)


def exported(page: str) -> dict[str, Any]:
    """Data of an export of one file."""
    match = re.search(r"window\.mopdFiles = \{keys: \{\}, start: .*?, data: (.*)\};\n", page)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_the_first_page_names_stages_iterations_and_curves(redpen: TestClient) -> None:
    home = get(redpen, "home")
    assert (home["stages"], home["stage"]) == (["student"], "student")
    assert home["iterations"] == [{"iteration": i, "version": i} for i in range(ITERATIONS)]
    assert [teacher["name"] for teacher in home["teachers"]] == sorted(KINDS)
    assert [len(teacher["curve"]) for teacher in home["teachers"]] == [ITERATIONS] * 3


def test_an_iteration_has_an_answer_and_a_list_of_each_teacher(redpen: TestClient, scored: Scored) -> None:
    answers = get(redpen, "corrections", stage="student", iteration=1)
    assert [answer["teacher"] for answer in answers] == sorted(KINDS)
    for answer in answers:
        at = next(at for at, sample in enumerate(scored.samples) if sample.uid == answer["uid"])
        reference = scored.reference(answer["teacher"], at)
        assert [fix["at"] for fix in answer["fixes"]] == [position for position, _, _ in reference]
        assert answer["prompt"] == "question 3"
    lists = get(redpen, "corrected", stage="student", iteration=1)
    assert [words["teacher"] for words in lists] == sorted(KINDS)
    assert {(words["looked_at"], words["answers"]) for words in lists} == {(PROMPTS + 1, PROMPTS + 1)}
    uids = {line["uid"] for words in lists for line in [{"uid": uid} for row in words["lines"] for uid in row["uids"]]}
    assert uids <= {sample.uid for sample in scored.samples if sample.iteration == 1}
    assert get(redpen, "corrected", stage="student", iteration=99) == []


def test_a_stage_without_scored_answers_is_named(redpen: TestClient) -> None:
    answer = redpen.get("/api/home", params={"stage": "studnet"})
    assert answer.status_code == 404
    assert "studnet" in answer.json()["error"]
    assert "student" in answer.json()["error"]


def test_a_store_without_teachers_has_an_empty_first_page(tmp_path: Path) -> None:
    empty = create_store(str(tmp_path / "empty"))
    home = get(client_of(empty, **BEARER), "home")
    assert (home["stages"], home["iterations"]) == ([], [])
    with pytest.raises(UnknownNameError, match="no teacher has scored"):
        export_redpen(Shown(empty), tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_the_export_is_one_file_with_every_version(scored: Scored, tmp_path: Path) -> None:
    done = export_redpen(Shown(scored.store), tmp_path / "red-pen.html")
    page = (tmp_path / "red-pen.html").read_text()
    assert done.bytes == len(page.encode()) < 3_000_000
    assert "default-src 'none'" in page
    assert "connect-src" not in page
    data = exported(page)
    for iteration in range(ITERATIONS):
        assert [answer["teacher"] for answer in data[f"corrections/{iteration}"]] == sorted(KINDS)
        assert len(data[f"corrected/{iteration}"]) == 3
    shown = {answer["uid"] for i in range(ITERATIONS) for answer in data[f"corrections/{i}"]}
    assert all(f"sample/{uid}" in data for uid in shown)
    listed = {uid for i in range(ITERATIONS) for words in data[f"corrected/{i}"] for row in words["lines"]
              for uid in row["uids"]}  # fmt: skip
    assert shown | listed == {row[data["samples"]["columns"].index("uid")] for row in data["samples"]["rows"]}


def test_the_page_of_a_prompt_lists_the_answers_of_every_version(scored: Scored, tmp_path: Path) -> None:
    export_redpen(Shown(scored.store), tmp_path / "red-pen.html")
    data = exported((tmp_path / "red-pen.html").read_text())
    chosen = {answer["uid"] for at in range(ITERATIONS) for answer in data[f"corrections/{at}"]}
    prompts = [page["answers"] for key, page in data.items() if key.startswith("prompt/")]
    assert {answer["row"]["uid"] for answers in prompts for answer in answers} == chosen
    assert max(len({answer["row"]["iteration"] for answer in answers}) for answers in prompts) == ITERATIONS


def test_the_export_keeps_below_its_size(scored: Scored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export_redpen(Shown(scored.store), tmp_path / "whole.html")
    monkeypatch.setattr(export, "REDPEN_BYTES", whole.bytes - 3000)
    smaller = export_redpen(Shown(scored.store), tmp_path / "smaller.html")
    assert smaller.bytes <= whole.bytes - 3000
    assert 0 < smaller.samples < whole.samples
    data = exported((tmp_path / "smaller.html").read_text())
    first, middle = (data[f"corrections/{at}"][0]["uid"] for at in (0, 1))
    assert f"sample/{first}" in data
    assert f"sample/{middle}" not in data


def test_what_a_model_wrote_does_not_leave_the_script(tmp_path: Path) -> None:
    export_redpen(Shown(make_hostile(tmp_path / "hostile")), tmp_path / "red-pen.html")
    page = (tmp_path / "red-pen.html").read_text()
    assert page.count("</script>") == 1
    assert page.count("<script>") == 1
    data = exported(page)
    assert "</script><script>alert(3)</script>" in data["corrections/0"][0]["pieces"]
    assert data["corrections/0"][0]["prompt"] == "…" + 400 * "w", "the end of a prompt of a million letters"
    assert all(len(piece) <= 2000 for piece in data["corrections/0"][0]["pieces"])


def test_the_command_writes_the_file_and_refuses_what_does_not_go_with_it(scored: Scored, tmp_path: Path) -> None:
    file = tmp_path / "red-pen.html"
    done = CliRunner().invoke(app, ["view", str(scored.store.uri), "--export", str(file), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["path"] == str(file)
    assert file.is_file()
    refused = CliRunner().invoke(app, ["view", str(scored.store.uri), "--export", str(file), "--limit", "3"])
    assert refused.exit_code != 0
    assert "--limit" in refused.output


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_text_of_the_first_page_can_be_read_in_both_schemes() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    schemes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in
               re.findall(r"\{[^{}]*--paper:[^{}]*\}", (bundle.ASSETS / "view.css").read_text())]  # fmt: skip
    assert len(schemes) == 3
    for colours in schemes:
        for ink in ("ink", "muted", "accent", "bad", *(f"pen-{n}" for n in range(8))):
            for ground in ("paper", "panel"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, f"{ink} on {ground}: {colours[ink]}"
