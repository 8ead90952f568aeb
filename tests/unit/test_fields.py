"""A per-token field is declared in one place: what is added there is stored, packed, cut, exported and read back."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mopd_dataplane import fields
from mopd_dataplane.records import Pack, Sample, Signal

ROOT = Path(__file__).parents[2]
MADE_UP = """
    Field(
        name="surprise", pack="token_surprise", dtype="<f4", axis="response", table=TOKENS, null=True,
        record="surprise", doc="[R] how surprised somebody was",
    ),
    Field(
        name="depths", dtype="<i4", axis="trained", table=TOKENS, null=True, record="depths", blank=-7,
        values=(0, 9), doc="[M] how deep somebody thought",
    ),
    Field(name="cu_seqlens","""

STORY = '''
import json, sys
from pathlib import Path

import numpy as np

from mopd_dataplane import BatchStream, LoadSpec, Sample, create_store, sample_uid
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.fields import value
from mopd_dataplane.interchange.exporter import export_samples
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.importer import import_rollouts
from mopd_dataplane.job.sections import Plan
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, collect_columns
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.train.microbatch import build
from mopd_dataplane.train.passes import samples_of


class Letters:
    digest, size, template = "t", 1000, "{prompt}"

    def file(self):
        return None


def sample(number):
    rng = np.random.default_rng(number)
    mask = np.ones(6 + number, np.uint8)
    mask[1] = 0
    has = number % 3 != 1
    return Sample(
        uid=sample_uid(0, "student", f"p{number}", 0, 0), prompt_id=f"p{number}", group_id=f"p{number}#0",
        group_index=0, iteration=0, domain="math", stage="student", writer="w", writer_seq=number, policy="student",
        temperature=1.0, top_p=1.0, top_k=0, prompt_len=3, tokens=rng.integers(1, 99, 9 + number).astype(np.int32),
        logprobs=(-rng.random(6 + number) * mask).astype(np.float32), loss_mask=mask,
        finish_reason="stop", tokenizer="t", version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32),
        extra={
            "surprise": rng.random(6 + number).astype(np.float32),
            "depths": rng.integers(0, 9, mask.sum()).astype(np.int32),
        } if has else {},
    )


def main(folder):
    samples = [sample(number) for number in range(8)]
    store = create_store(str(folder / "store"))
    wrong = sample(0)
    wrong.extra["surprise"] = wrong.extra["surprise"][:-1]
    for bad, said in ((wrong, "surprise has shape [5]; a value for each of 6 response tokens"), (None, "depths")):
        if bad is None:
            bad = sample(0)
            bad.extra["depths"][2] = 10
        try:
            store.commit_samples([bad])
        except MismatchError as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)
    rows = store.commit_samples(samples).rows
    stored = store.read_tokens(rows, ["surprise", "depths"], verify=True).to_pylist()
    for one, row in zip(samples, stored, strict=True):
        for name in ("surprise", "depths"):
            assert (row[name] is None) == (name not in one.extra)
            assert row[name] is None or row[name] == one.extra[name].tolist()

    columns = collect_columns(store.scan_samples(SAMPLE_COLUMNS), len(rows), route=None, teachers=[])
    settings = Plan(pack_tokens=64, batch_samples=4)
    snapshot = store.snapshot()
    store.add_plan(
        build_window(columns, settings, seed=1, stage="student", window=0, snapshot=snapshot, teachers=[])
    )
    spec = LoadSpec(stage="student", recorded=("surprise", "depths"))
    seen = 0
    with BatchStream(store.uri, spec, windows=[0], rank=0, world_size=1, views="torch") as stream:
        for batch in stream:
            for pack in batch.packs:
                seen += check_pack(pack, samples)
    assert seen == 8, seen
    with BatchStream(store.uri, LoadSpec(stage="student"), windows=[0], rank=0, world_size=1) as stream:
        assert not any(pack.extra for batch in stream for pack in batch.packs), "nobody asked"

    for kind in ("jsonl", "parquet"):
        file = folder / f"out.{kind}"
        assert export_samples(store, file, kind) == 8
        back = create_store(str(folder / f"back-{kind}"))
        import_rollouts(back, file, ImportSettings(format="plain"), Letters())
        again = back.samples(["uid", "payload_crc"]).to_pylist()
        first = store.samples(["uid", "payload_crc"]).to_pylist()
        assert sorted(map(str, again)) == sorted(map(str, first)), kind


def check_pack(pack, samples):
    """Every token of the pack has its own values, in the pack, in a cut of it and in a micro-batch."""
    bounds = pack.cu_seqlens.tolist()
    micro = build([pack])
    surprise, depths = [], []
    for place, row in enumerate(pack.sample_rows.tolist()):
        one = samples[row]
        blank = np.full(one.loss_tokens, -7)
        surprise += [0.0] * 3 + one.extra.get("surprise", np.zeros(one.response_len)).tolist()
        depths += one.extra.get("depths", blank).tolist()
        cut = samples_of(pack, place, place + 1)
        assert cut.extra["token_surprise"].tolist() == surprise[bounds[place]:bounds[place + 1]]
        assert cut.extra["depths"].tolist() == depths[len(depths) - one.loss_tokens:]
    assert pack.extra["token_surprise"].tolist() == surprise
    assert pack.extra["depths"].tolist() == depths
    mask = pack.loss_mask.bool().tolist()
    assert micro.extra["token_surprise"].tolist() == [s for s, m in zip(surprise, mask, strict=True) if m]
    assert micro.extra["depths"].tolist() == depths
    return len(bounds) - 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("told")
'''


@pytest.mark.slow
def test_a_field_added_in_one_place_is_stored_packed_cut_exported_and_read_back(tmp_path: Path) -> None:
    package = tmp_path / "src" / "mopd_dataplane"
    shutil.copytree(ROOT / "mopd_dataplane", package, ignore=shutil.ignore_patterns("__pycache__", "recipes", "assets"))
    declared = package / "fields.py"
    text = declared.read_text()
    assert text.count('\n    Field(name="cu_seqlens",') == 1
    declared.write_text(text.replace('\n    Field(name="cu_seqlens",', MADE_UP))
    story = tmp_path / "story.py"
    story.write_text(STORY)
    paths = [str(package.parent), str(ROOT / "kernels")]
    process = subprocess.run(
        [sys.executable, str(story), str(tmp_path)], capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.split() == ["told"]


OF_NO_PACK = fields.SIGNALS + fields.ALIGNMENT
"""Table whose fields no pack carries."""


@pytest.mark.parametrize("field", fields.FIELDS, ids=lambda field: field.name)
def test_a_record_declares_the_field_or_keeps_it_in_extra(field: fields.Field) -> None:
    """The built-in ones are attributes, so that a type checker knows them."""
    assert (field.pack in Pack.__dataclass_fields__) == (field.table != OF_NO_PACK)
    if field.table == fields.TOKENS:
        assert field.name in Sample.__dataclass_fields__
    elif field.table:
        assert field.name in Signal.__dataclass_fields__
    assert len(field.pack.encode()) <= 24


def test_every_array_of_a_pack_is_a_field() -> None:
    """What the registry does not know would stay uncut where a pack is cut."""
    others = {"index", "teacher", "hidden_codec", "extra"}
    assert set(Pack.__dataclass_fields__) - others == {
        field.pack for field in fields.FIELDS if field.table != OF_NO_PACK
    }


NAMES = {name for field in fields.FIELDS for name in (field.name, field.pack, field.column)}
SOURCES = sorted(
    file for file in (ROOT / "mopd_dataplane").rglob("*.py") if file != ROOT / "mopd_dataplane" / "fields.py"
)


def lists_of_fields(tree: ast.AST) -> list[str]:
    """Literals that name three fields or more, as `line: names`."""
    field_lists = []
    for node in ast.walk(tree):
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
        parts = node.keys if isinstance(node, ast.Dict) else parts
        named = [part.value for part in parts if isinstance(part, ast.Constant) and part.value in NAMES]
        if len(named) >= 3:
            field_lists.append(f"{node.lineno}: {', '.join(map(str, named))}")
    return field_lists


def test_no_list_of_field_names_stands_elsewhere() -> None:
    lists_by_file = {str(file.relative_to(ROOT)): lists_of_fields(ast.parse(file.read_text())) for file in SOURCES}
    assert {file: lists for file, lists in lists_by_file.items() if lists} == {}


@pytest.mark.parametrize(
    "code", ['X = ("tokens", "logprobs", "loss_mask")', 'f({"topk_ids": 1, "experts": 2, "hidden": 3})']
)
def test_the_rule_catches_a_list(code: str) -> None:
    assert len(lists_of_fields(ast.parse(code))) == 1
