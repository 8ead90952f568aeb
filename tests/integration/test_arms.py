"""evidence/run_arm.py on a tiny model of SmolLM2's tokens: an arm's file, what it holds, and what is not run twice."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.models.tiny import FAMILIES, of_family

JOBS = Path(__file__).parents[2] / "jobs"
SPECIALISTS = ("date", "larger", "json")


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(JOBS.parent / "evidence"))
    return importlib.import_module("run_arm")


@pytest.mark.slow
def test_an_arm_waits_for_what_it_starts_from_and_no_more(arms: ModuleType) -> None:
    by_name = {name: arms.Arm(name, stages, uses_teachers=teachers) for name, stages, teachers in (
        ("base", (), False), ("larger", (), True), ("grpo", ("grpo",), False), ("mopd-exact", ("mopd-exact",), True),
    )}  # fmt: skip
    comparison = arms.Comparison(JOBS / "smollm2-mopd", by_name, SPECIALISTS)
    assert comparison.shared == ("base", "date", "larger", "json")
    assert comparison.prerequisites("base") == comparison.prerequisites("grpo") == ("base",)
    assert comparison.prerequisites("larger") == ("base", "larger")
    assert comparison.prerequisites("mopd-exact") == comparison.shared


@pytest.mark.slow
def test_an_arm_without_teachers_waits_for_the_specialist_that_it_starts_from(arms: ModuleType) -> None:
    by_name = {
        "base": arms.Arm("base", uses_teachers=False),
        "cascade": arms.Arm("later", ("cascade",), uses_teachers=False),
    }
    comparison = arms.Comparison(JOBS / "conflict", by_name, ("larger", "smaller"))
    assert comparison.shared == ("base", "larger", "smaller")
    assert comparison.prerequisites("cascade") == ("base", "larger")


LATER = """
[[stages]]
name = "later"
start = "date"
data = "reference"
domains = ["json"]
examples = 12
objective = "sft"
"""


def small_job(folder: Path) -> Path:
    """The job with a tiny student, few prompts, one iteration, and a stage on top of a specialist; its folder."""
    model = folder / "model"
    model.mkdir(parents=True)
    of_family(FAMILIES["smollm2"], model, seed=0, dtype="float32")
    said = (JOBS / "smollm2-mopd" / "job.toml").read_text()
    for pattern, now in (
        (r"gguf = .*", f'path = "{model}"'),
        (r"eval = \d+", "eval = 3"),
        (r"tune = \d+", "tune = 2"),
        (r"examples = \d+", "examples = 12"),
        (r"iterations = \d+", "iterations = 1"),
        (r"prompts_per_iteration = \d+", "prompts_per_iteration = 6"),
        (r"max_new_tokens = \d+", "max_new_tokens = 4"),
        (r"max_prompt_tokens = \d+", "max_prompt_tokens = 256"),  # a tokenizer of few merges
    ):
        said, times = re.subn(pattern, now, said)
        assert times, pattern
    job = folder / "small"
    job.mkdir()
    (job / "job.toml").write_text(said + LATER)
    return job


@pytest.mark.slow
def test_an_arm_is_run_once_and_its_file_says_what_became_of_every_prompt(
    arms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = small_job(tmp_path)
    by_name = {"base": arms.Arm("base", uses_teachers=False), **{name: arms.Arm(name) for name in SPECIALISTS}}
    by_name["mopd-exact"] = arms.Arm("exact", ("mopd-exact",))
    by_name["later"] = arms.Arm("one domain after another", ("later",), uses_teachers=False)
    comparison = arms.Comparison(job, by_name, SPECIALISTS, points=1)
    monkeypatch.setitem(arms.COMPARISONS, "small", comparison)
    words = ["--stores", str(tmp_path / "stores"), "--results", str(tmp_path / "results")]
    for name in ("base", "later", "mopd-exact"):
        monkeypatch.setattr("sys.argv", ["run_arm.py", "small", name, "0", *words])
        arms.main()
    said = {
        name: json.loads((tmp_path / "results" / f"{name}-0.json").read_text())
        for name in by_name
        if name not in SPECIALISTS
    }
    for result in said.values():
        right = result["curve"][-1]["right"]
        assert {domain: len(one["correct"]) for domain, one in right.items()} == dict.fromkeys(
            ("capital", "date", "json", "larger"), 3
        )
    assert said["base"]["tokens"] == {"student": 0, "specialists": 0, "teachers": 0}
    spent = said["mopd-exact"]["tokens"]
    assert 6 <= spent["student"] == spent["teachers"] <= 6 * 4
    assert spent["specialists"] > 0
    assert said["mopd-exact"]["teacher_distance"].keys() == set(SPECIALISTS)
    later = said["later"]["tokens"]
    assert 0 < later["specialists"] < spent["specialists"], "of the one that it starts from"
    assert (later["teachers"], later["student"] > 0) == (0, True)
    assert said["base"]["moved"] == {}
    for name in ("later", "mopd-exact"):
        assert said[name]["moved"].keys() == set(SPECIALISTS)
        assert all(moved["kl"] >= 0 and moved["entropy"] > 0 for moved in said[name]["moved"].values())
    capsys.readouterr()
    arms.main()
    assert "exists; nothing to run" in capsys.readouterr().out

    begun_answers = importlib.import_module("begun_answers")
    generate, requests = begun_answers.generate, []
    monkeypatch.setattr(begun_answers, "generate", lambda engine, new: requests.extend(new) or generate(engine, new))
    monkeypatch.setattr("sys.argv", ["begun_answers.py", "small", "mopd-exact", "0", *words])
    begun_answers.main()
    beginnings = [load_tokenizer(tmp_path / "model").decode(request.prefix_ids) for request in requests]
    assert len(beginnings) == 3
    assert all(re.fullmatch(r"The capital of \S.* is", text) for text in beginnings)
    asked_again = json.loads((tmp_path / "results" / "begun" / "mopd-exact-0.json").read_text())
    assert asked_again["asked"] == said["mopd-exact"]["curve"][-1]["right"]["capital"]["correct"]
    assert len(asked_again["begun"]) == len(asked_again["begins"]) == 3
    assert asked_again["settings"] == said["mopd-exact"]["settings"]
    capsys.readouterr()
    begun_answers.main()
    assert "exists; nothing to run" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["begun_answers.py", "small", "date", "0", *words])
    with pytest.raises(SystemExit, match=r"first run: python evidence/run_arm.py small date 0"):
        begun_answers.main()
    monkeypatch.setattr("sys.argv", ["run_arm.py", "small", "mopd-exact", "0", *words])

    by_name["mopd-exact"] = arms.Arm("exact", ("mopd-exact",), settings=(0.5, 1.0))
    monkeypatch.setitem(
        arms.COMPARISONS, "small", arms.Comparison(job, by_name, SPECIALISTS, points=1, searched_version=1)
    )
    arms.main()
    searched = json.loads((tmp_path / "results" / "mopd-exact-0.json").read_text())
    assert [one["setting"] for one in searched["tried"]] == [0.5, 1.0]
    assert searched["setting"] == max(searched["tried"], key=lambda one: one["accuracy"])["setting"]
    assert not [*(tmp_path / "results" / "tried").iterdir()]
    capsys.readouterr()
    arms.main()
    assert "exists; nothing to run" in capsys.readouterr().out

    def lengthen(iterations: int, **others: str) -> None:
        """Give the arm's stage another number of iterations, all versions of which are measured."""
        text = small_job(tmp_path / str(iterations)).joinpath("job.toml").read_text()
        before, name, after = text.partition('name = "mopd-exact"')
        for old, new in ((tmp_path / str(iterations), tmp_path), *others.items()):
            before = before.replace(str(old), str(new))
        (job / "job.toml").write_text(before + name + after.replace("= 1", f"= {iterations}", 1))
        longer = arms.Comparison(job, by_name, SPECIALISTS, points=iterations, searched_version=1)
        monkeypatch.setitem(arms.COMPARISONS, "small", longer)

    lengthen(2)
    arms.main()
    extended = json.loads((tmp_path / "results" / "mopd-exact-0.json").read_text())
    assert [(point["version"], point["answers"]) for point in extended["curve"]] == [(1, 6), (2, 12)]
    assert extended["curve"][0] == searched["curve"][0], "measured once"
    assert extended["curve"][1]["tokens"] == extended["tokens"]["student"] > searched["tokens"]["student"]
    lengthen(3, **{"temperature = 1.0": "temperature = 0.9"})
    with pytest.raises(SystemExit, match="remove its file to measure it again"):
        arms.main()
