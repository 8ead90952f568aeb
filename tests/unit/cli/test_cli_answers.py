"""Commands that ask a store, as a user or a script runs them."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mopd_dataplane import Store, errors
from mopd_dataplane.cli.app import app
from mopd_dataplane.cli.reference import reference
from mopd_dataplane.store.group_commit.load import LoadRecord
from mopd_dataplane.store.group_commit.mailbox import open_mailbox


def mopd(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160", "NO_COLOR": "1"})


def answered(*arguments: str | Path) -> Any:
    """Standard output as exactly one JSON value."""
    result = mopd(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def first_uid(store: Store) -> str:
    rows = store.sql("select uid from samples where prompt_id = 'chain_sum-train-0' and iteration = 0")
    return str(rows["uid"][0].as_py())


def test_query_prints_a_table_and_counts_rows_on_stderr(demo_store: Store) -> None:
    result = mopd("query", demo_store.uri, "select domain, count(*) as n from samples group by 1 order by 1")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines() if "32" in line] == [
        ["chain_sum", "32"], ["number_sorting", "32"], ["spell_backward", "32"],
    ]  # fmt: skip
    assert "3 rows" in result.stderr


def test_a_query_leaves_pandas_alone_and_a_data_frame_can_still_be_asked_for(demo_store: Store) -> None:
    code = """if True:
        import sys
        from mopd_dataplane.cli import main
        sys.argv = ["mopd", "query", sys.argv[1], "select count(*) from samples"]
        try:
            main()
        except SystemExit as end:
            assert not end.code
        assert "pandas" not in sys.modules
        import pyarrow
        assert len(pyarrow.table({"x": [1, 2]}).to_pandas()) == 2
    """
    done = subprocess.run([sys.executable, "-c", code, demo_store.uri], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "96" in done.stdout


def test_query_json_is_one_array_with_nulls_for_what_json_lacks(demo_store: Store) -> None:
    sql = "select 1 as a, 'nan'::float as b, [1, 2] as c, null as d, now() as e, 'x'::blob as f"
    rows = answered("query", demo_store.uri, sql, "--json")
    assert rows[0] | {"e": ""} == {"a": 1, "b": None, "c": [1, 2], "d": None, "e": "", "f": "78"}
    assert answered("query", demo_store.uri, "select 1 where false", "--json") == []
    assert answered("query", demo_store.uri, "select 1 as a, 2 as a", "--json", "--limit", str(10**20)) == [
        {"a": 1, "a_1": 2}
    ]


def test_query_csv_is_read_back(demo_store: Store) -> None:
    result = mopd("query", demo_store.uri, "select 'a,\"b' as x, [1, 2] as y", "--csv")
    assert list(csv.reader(io.StringIO(result.stdout))) == [["x", "y"], ['a,"b', "[1, 2]"]]


def test_query_limit_says_what_is_not_shown(demo_store: Store) -> None:
    result = mopd("query", demo_store.uri, "select uid from samples", "--limit", "2")
    assert len(re.findall(r"^ [0-9a-f]{32} $", result.stdout, re.MULTILINE)) == 2
    assert "96 rows; the first 2 are shown" in result.stderr
    assert len(answered("query", demo_store.uri, "select uid from samples", "--json")) == 96
    assert len(answered("query", demo_store.uri, "select uid from samples", "--json", "--limit", "3")) == 3


def test_query_reads_a_pinned_snapshot(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "pinned", prompts=1)
    store.snapshot(tag="before")
    uid = store.samples()["uid"][0].as_py()
    store.add_rewards([{"uid": uid, "sample_row": 0, "verifier": "second", "verifier_version": "1", "reward": 9.0}])
    sql = "select count(*) as n from rewards where reward = 9"
    assert answered("query", store.uri, sql, "--json") == [{"n": 1}]
    assert answered("query", store.uri, sql, "--json", "--snapshot", "before") == [{"n": 0}]
    refused = mopd("query", store.uri, sql, "--snapshot", "befor")
    assert refused.exit_code == 2
    assert "before" in refused.stderr


def test_query_shows_model_text_harmlessly(demo_store: Store) -> None:
    result = mopd("query", demo_store.uri, "select response from evals limit 1")
    assert "\x1b" not in result.output
    assert "␛[31mred" in result.stdout
    assert "[bold]x[/bold]" in result.stdout


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("delete from samples", "read-only"),
        ("select 1; select 2", "give exactly one"),
        ("select * from sampels", "did you mean 'samples'"),
        ("selct 1", "syntax error"),
        ("select timestamp '290000-01-01' as far", "column 'far'"),  # legal in SQL, no value of Python
    ],
)
def test_query_refuses_in_one_paragraph(demo_store: Store, sql: str, said: str) -> None:
    result = mopd("query", demo_store.uri, sql)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_query_takes_one_format_only(demo_store: Store) -> None:
    assert mopd("query", demo_store.uri, "select 1", "--json", "--csv").exit_code == 2


def test_show_prints_the_sample(demo_store: Store) -> None:
    result = mopd("show", demo_store.uri, first_uid(demo_store)[:12])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    for expected in ("chain_sum-train-0", "chain_sum-expert", "interrupted 1 time", "trained on"):
        assert expected in result.stdout


def test_a_refused_show_says_nothing_but_why(demo_store: Store) -> None:
    result = mopd("show", demo_store.uri, "--worst", "--teacher", "nobody")
    assert result.exit_code == 2
    assert "lowest reward" not in result.output
    assert "lowest reward" in mopd("show", demo_store.uri, "--worst").output


def test_show_json_has_every_token(demo_store: Store) -> None:
    uid = first_uid(demo_store)
    view = answered("show", demo_store.uri, uid, "--json")
    assert view["uid"] == uid
    assert len(view["tokens"]) == view["metadata"]["response_len"]
    token = next(token for token in view["tokens"] if token["trained"])
    assert token["log_ratio"] == pytest.approx(token["teacher_logprob"] - token["sampler_logprob"])


def test_report_writes_the_page_and_can_print_its_numbers(demo_store: Store, tmp_path: Path) -> None:
    numbers = answered("report", demo_store.uri, "-o", tmp_path / "deep" / "r.html", "--json")
    assert [row["policy"] for row in numbers["recovery"]] == ["student"] * 4
    assert (tmp_path / "deep" / "r.html").read_text().startswith("<!doctype html>")
    assert mopd("report", demo_store.uri).exit_code == 2


def test_store_info_counts_rows(demo_store: Store) -> None:
    facts = answered("store", "info", demo_store.uri, "--json")
    assert facts["tables"]["samples"]["rows"] == 96
    assert "signals/chain_sum-expert/logprob" in mopd("store", "info", demo_store.uri).stdout


def test_store_info_says_what_the_iterations_left_will_add(tmp_path: Path, make_store: Any) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    stages = [{"name": "student", "start": "init", "data": "rollout", "iterations": 1000}]
    store.write_json("job.json", {"student": {"path": ""}, "stages": stages})
    done = store.table("plans", ["window"]).num_rows
    (left,) = answered("store", "info", store.uri, "--json")["still_to_write"]
    assert (left["done"], left["iterations"]) == (done, 1000)
    assert left["bytes"] > 0
    assert f"student: {done} of 1,000 iterations; the others will add about" in mopd("store", "info", store.uri).output


def test_store_info_says_how_busy_the_process_is_that_commits_for_all_writers(tmp_path: Path, make_store: Any) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    assert answered("store", "info", store.uri, "--json")["group_commit"] is None
    record = LoadRecord(open_mailbox(store.root, None))
    record.add(0.5, batches=3)
    record.write()
    group_commit = answered("store", "info", store.uri, "--json")["group_commit"]
    assert (group_commit["rounds"], group_commit["batches"], group_commit["committing_s"]) == (1, 3, 0.5)
    assert group_commit["load"] == group_commit["committing_s"] / group_commit["seconds"]
    assert "1 rounds of commits" in mopd("store", "info", store.uri).output


def test_store_compact_keeps_every_row(tmp_path: Path, make_store: Any) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    before = store.samples().to_pylist()
    answered("store", "compact", store.uri, "--json")
    assert store.samples().to_pylist() == before


def test_store_compact_says_the_heaviest_reasons_only(tmp_path: Path, make_store: Any) -> None:
    """Six snapshots pin files of `events` that merges have replaced, and of most tables nothing that is not needed."""
    store = make_store(tmp_path / "s", prompts=1)
    for number in range(6):
        store.add_event(f"note-{number}", "student", "note", 0, None, {})
        store.snapshot(tag=f"tag-{number}")
        store.compact()
    done = mopd("store", "compact", store.uri, "--now")
    said = " ".join(done.stderr.split())
    assert "0 B (" not in said
    assert said.count("events keeps") == 1
    assert "more (--json names them)" in said.partition("events keeps")[2]


@pytest.mark.slow
def test_store_verify_finds_a_flipped_byte_and_ends_with_1(tmp_path: Path, make_store: Any) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    assert answered("store", "verify", store.uri, "--json")["ok"] is True
    file = max((tmp_path / "s" / "tokens" / "data").iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 8] ^= 0x10
    file.write_bytes(content)
    result = mopd("store", "verify", store.uri, "--json")
    assert result.exit_code == 1
    audit = json.loads(result.stdout)
    assert audit["ok"] is False
    assert [finding["problem"] for finding in audit["findings"]]
    assert mopd("store", "verify", store.uri, "--fast").exit_code == 0


@pytest.mark.parametrize(
    "command", [["query", "STORE", "select 1"], ["show", "STORE", "ab"], ["store", "info", "STORE"]]
)
def test_a_place_without_store_is_an_input_error(tmp_path: Path, command: list[str]) -> None:
    result = mopd(*(str(tmp_path / "none") if word == "STORE" else word for word in command))
    assert result.exit_code == 2
    assert "no store at" in result.stderr
    assert not (tmp_path / "none").exists()


def test_the_page_of_exit_codes_has_every_error_class() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", reference(), re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MopdError)]
    assert len(kinds) > 8
    assert documented == {kind.exit_code for kind in kinds} | {0, 130}


def test_a_place_without_a_store_is_told_how_one_is_made(tmp_path: Path) -> None:
    result = mopd("query", str(tmp_path), "select 1")
    assert result.exit_code == 2
    assert "mopd run JOB" in result.output
