"""Every key of a job file is explained, by an example that is accepted; editors and help say what the check does."""

from __future__ import annotations

import json
import tomllib
import typing
from pathlib import Path

import jsonschema
import pytest
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from mopd_dataplane.errors import JobFileError, UnknownNameError
from mopd_dataplane.job.examples import EXAMPLES, UNITS
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.load import load_job
from mopd_dataplane.job.parse import line_of
from mopd_dataplane.job.read import STAGE_TABLES
from mopd_dataplane.job.recipes import FOLDER, copy_recipe, job_file, recipe_names
from mopd_dataplane.job.reference import Key, Table, find, json_schema, page, tables
from mopd_dataplane.job.section import Section
from mopd_dataplane.prompts import load_prompts

KEYS = {key.path: key for table in tables() for key in table.keys}
LEAVES = [path for path, key in KEYS.items() if key.type != "table" or path in EXAMPLES]
ROOT = Path(__file__).parents[3]


def section_of(path: str) -> type[Section]:
    """The section that a key belongs to."""
    section: type[Section] = Job
    for part in path.split(".")[:-1]:
        if part == "NAME":
            continue
        field = field_of(Stage if section is Job and part in STAGE_TABLES else section, part)
        stack, kinds = [field.annotation], []
        while stack:
            kinds.append(kind := stack.pop())
            stack.extend(typing.get_args(kind))
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    return section


def field_of(section: type[Section], key: str) -> FieldInfo:
    """The field of a key, whose name in a file may be another than in Python."""
    return next(field for name, field in section.model_fields.items() if (field.alias or name) == key)


def sections(section: type[Section]) -> set[type[Section]]:
    """The section and all below it."""
    section_types = {section}
    for field in section.model_fields.values():
        stack = [field.annotation]
        while stack:
            kind = stack.pop()
            if (
                isinstance(kind, type)
                and not typing.get_args(kind)
                and issubclass(kind, Section)
                and kind not in section_types
            ):
                section_types |= sections(kind)
            stack.extend(typing.get_args(kind))
    return section_types


def test_no_key_is_left_out() -> None:
    declared = {
        (section, field.alias or name) for section in sections(Job) for name, field in section.model_fields.items()
    }
    inherited = {(Job, name) for name in Job.model_fields} - {
        (section_of(path), path) for path in KEYS if "." not in path
    }
    shown = {(section_of(path), path.rpartition(".")[2]) for path in KEYS}
    assert declared - shown - inherited == set()
    assert {name for _, name in inherited} <= {table.path.partition(".")[0] for table in tables()}


@pytest.mark.parametrize("path", KEYS)
def test_every_key_has_a_meaning_and_every_value_an_example(path: str) -> None:
    key = KEYS[path]
    assert key.doc, f"{path} needs a docstring in job/"
    assert key.type == "table" or key.example, f"{path} needs an example in job/examples.py"


def test_examples_belong_to_keys() -> None:
    assert set(EXAMPLES) <= set(KEYS)


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.example])
def test_every_example_is_accepted_and_is_not_the_default(path: str) -> None:
    field = field_of(section_of(path), path.rpartition(".")[2])
    value = tomllib.loads(f"value = {KEYS[path].example}")["value"]
    read = TypeAdapter(typing.Annotated[field.annotation, field]).validate_python(value)
    assert field.is_required() or read != field.get_default(call_default_factory=True)


def test_units_belong_to_keys() -> None:
    assert set(UNITS) <= set(KEYS)


@pytest.mark.parametrize("job", [*FOLDER.glob("*/*.toml")], ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_recipe_fits_the_schema_that_editors_check(job: Path) -> None:
    jsonschema.validate(tomllib.loads(job.read_text()), json_schema())


@pytest.mark.parametrize(
    "text", ["[rollout]\ntemprature = 1", "[train]\nepochs = 0", "[engine]\nslots = 'all'", "[[stages]]\nitems = 1"]
)  # fmt: skip
def test_the_schema_refuses_what_the_check_refuses(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(text), json_schema())


def test_the_smallest_job_of_the_page_is_one(tmp_path: Path) -> None:
    (block,) = (part.partition("```")[0] for part in page().split("```toml\n")[1:])
    (tmp_path / "job.toml").write_text(block)
    assert [stage.name for stage in load_job(tmp_path).stages] == ["student"]


def test_help_finds_tables_and_keys_by_any_of_their_names() -> None:
    key = find("train.schedule")
    assert isinstance(key, Key)
    assert (key.default, key.type) == ('"constant"', '"constant" | "linear" | "cosine"')
    assert find("domains.math.train") == find("domains.NAME.train")
    assert find("schedule") == key
    table = find("[rollout]")
    assert isinstance(table, Table)
    assert {"rollout.temperature", "rollout.stop"} <= {key.path for key in table.keys}
    with pytest.raises(UnknownNameError, match=r"did you mean 'train\.schedule'"):
        find("train.shedule")
    with pytest.raises(UnknownNameError, match="is the name of"):
        find("weight")


def test_a_recipe_goes_by_its_name_where_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert job_file("quickstart") == str(FOLDER / "quickstart" / "job.toml")
    assert load_job("opd").name == "opd"
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "job.toml").write_text("")
    assert Path(job_file("quickstart")).resolve() == tmp_path / "quickstart" / "job.toml"
    with pytest.raises(JobFileError, match="did you mean 'quickstart'"):
        job_file("quickstar")


@pytest.mark.parametrize("name", [name for name in recipe_names() if [*(FOLDER / name).glob("*.jsonl")]])
def test_a_recipe_finds_its_prompts_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {key: domain for key, domain in load_job(name).domains.items() if domain.source.endswith(".jsonl")}
    assert files
    for key, domain in files.items():
        assert load_prompts(key, domain)


@pytest.mark.parametrize("name", recipe_names())
def test_a_copied_recipe_is_the_same_job(name: str, tmp_path: Path) -> None:
    schema = json.dumps(json_schema())
    written = copy_recipe(name, tmp_path / "mine", schema=schema)
    copied = load_job(tmp_path / "mine").model_dump_json().replace(str(tmp_path / "mine"), f"jobs/{name}")
    assert copied == load_job(FOLDER / name).model_dump_json()
    assert {file.name for file in (FOLDER / name).glob("*.jsonl")} <= {file.name for file in written}
    assert (tmp_path / "mine" / "job.toml").read_text().startswith("#:schema ./job.schema.json\n")
    assert json.loads((tmp_path / "mine" / "job.schema.json").read_text())["title"] == "mopd job"
    assert {file.name for file in written} == {file.name for file in (tmp_path / "mine").iterdir()}
    with pytest.raises(JobFileError, match="exists already"):
        copy_recipe(name, tmp_path / "mine", schema=schema)


def test_the_package_carries_the_jobs_of_the_repository() -> None:
    assert {file.parent.name for file in (ROOT / "jobs").glob("*/job.toml")} == set(recipe_names())


REST = """
[student]
path = "models/student"
[domains.sums]
source = "store"
[plan]
batch_samples = 8
[objectives.y]
divergence = {}
[[stages]]
name = "first"
objective = "y"
[[stages]]
name = "second"
start = "first"
objective = "y"
"""
MISTAKES = {
    "[rollout]\ntemprature = 1.0": (4, "rollout.temprature"),
    "[train]\nepochs = 1\nlearning_rate = -1": (5, "train.learning_rate"),
    "[domains.words]\nsource = 'store'\nevals = 3": (5, "domains.words.evals"),
    "[[stages]]\nname = 'zeroth'\nscore = { topk = 'all' }": (5, "stages.zeroth.score.topk"),
    "[objectives.x]\ndivergence = { kind = 'up' }": (4, "objectives.x.divergence.kind"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_reported_once_at_the_line_where_it_stands(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'name = "n"\nstore = "s"\n{text}\n{REST}')
    line, key = MISTAKES[text]
    with pytest.raises(JobFileError) as refusal:
        load_job(file)
    (said,) = str(refusal.value).splitlines()
    assert f"job.toml, line {line}: " in said
    assert f"`{key}`" in said


def test_a_mistake_in_what_an_objective_brings_is_reported_there(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    text = f'name = "n"\nstore = "s"\n{REST}'.replace(
        "divergence = {}", "divergence = {}\nplan = { pack_tokens = 'many' }"
    )
    file.write_text(text)
    with pytest.raises(JobFileError) as refusal:
        load_job(file)
    (said,) = str(refusal.value).splitlines()
    assert "line 12: `objectives.y.plan.pack_tokens`" in said


def test_a_stage_own_mistake_is_named_in_the_stage() -> None:
    text = "[[stages]]\nname = 'a'\n\n[[stages]]\nname = 'b'\nrollout = { temprature = 1 }\n[stages.plan]\nx = 1\n"
    assert line_of(text, ["stages", "b", "rollout", "temprature"]) == 6
    assert line_of(text, ["stages", "a", "rollout", "temprature"]) is None
    assert line_of(text, ["objectives", "x"]) is None
