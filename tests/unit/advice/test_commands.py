"""Next steps that messages of commands and of the viewer name: each is taken, and works."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from advice import advises
from typer.testing import CliRunner

from mopd_dataplane import Store
from mopd_dataplane.cli.app import app
from mopd_dataplane.cli.jobs import ANSWERS, _rates, choose_stage
from mopd_dataplane.errors import JobFileError
from mopd_dataplane.integrations.verifiers import _task
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.query.compare import compare_policies, read_stage
from mopd_dataplane.query.lineage import find_sample
from mopd_dataplane.records import Prompt
from mopd_dataplane.view.addresses import listen
from mopd_dataplane.view.export import export_redpen
from mopd_dataplane.view.shown import Shown

MakeStore = Callable[..., Store]
JOB: dict[str, Any] = {
    "name": "j", "store": "runs/j", "student": {"path": "p"}, "domains": {"d": {"source": "x.jsonl"}},
    "teachers": {"t": {"source": "student"}}, "routing": {"d": "t"}, "objectives": {"o": {"policy_gradient": {}}},
    "stages": [{"name": "s", "objective": "o", "plan": {"batch_samples": 4}}],
}  # fmt: skip


class Refused(Exception):
    """What a command printed when it ended with an error."""


def mopd(*arguments: object) -> str:
    """What a command prints. Raises Refused."""
    environment = {"COLUMNS": "400", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, list(map(str, arguments)), env=environment)
    if result.exit_code:
        raise Refused(" ".join(result.output.split()))
    return result.output


def test_answers_of_a_store(demo_store: Store) -> None:
    sql = ("query", demo_store.uri, "SELECT 1 AS one")
    with advises("give one of --json and --csv"):
        mopd(*sql, "--json", "--csv")
    assert mopd(*sql, "--json")
    assert mopd(*sql, "--csv")
    uids = sorted(demo_store.samples(["uid"])["uid"].to_pylist())
    with advises("give a UID, or one of --worst, --disagreement and --random (with --domain if you like)"):
        mopd("show", demo_store.uri, uids[0], "--worst")
    for one in ([uids[0]], ["--worst"], ["--disagreement"], ["--random"], ["--worst", "--domain", "chain_sum"]):
        assert mopd("show", demo_store.uri, *one)
    shared = next(letter for letter in "0123456789abcdef" if sum(uid.startswith(letter) for uid in uids) > 1)
    with advises("; give more digits"):
        find_sample(demo_store, shared)
    assert find_sample(demo_store, uids[0][:12])[0] == uids[0]


def test_comparisons(demo_store: Store, tmp_path: Path) -> None:
    with advises("; give its domains `eval` prompts"):
        read_stage(Store.create(tmp_path / "bare").uri)
    assert read_stage(demo_store.uri).versions
    with advises(" chooses the versions; give STORE or STORE#STAGE without @VERSION"):
        compare_policies(f"{demo_store.uri}#student@1", f"{demo_store.uri}#base", equal="answers")
    for first in (demo_store.uri, f"{demo_store.uri}#student"):
        compare_policies(first, f"{demo_store.uri}#base", equal="answers")


def test_deletions_ask_somebody(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", prompts=2)
    where = ("store", "delete", store.uri, "--where", "domain = 'chain_sum' AND iteration = 0")
    with advises(" There is no terminal to ask on: give --yes, or look first with --dry-run"):
        mopd(*where)
    assert mopd(*where, "--dry-run")
    assert mopd(*where, "--yes")


def test_settings_of_benchmarks(tmp_path: Path) -> None:
    with advises("--plot draws what --peers measures; give both"):
        mopd("bench", "load", "--plot", tmp_path / "plot.png")
    with advises(" is no program; give the Python of an environment with TRL"):
        mopd("bench", "step", "--peers", "nowhere/python")
    plan = ("bench", "plan", "--samples", 2000, "--folder", tmp_path)
    with advises("; set --processes and --window accordingly"):
        mopd(*plan, "--processes", 2)
    assert mopd(*plan, "--processes", 2, "--window", 1000)
    with advises("--lengths and --mean-tokens both say how long samples are; give one of them"):
        mopd("bench", "commits", "--writers", 1, "--lengths", tmp_path, "--mean-tokens", 60)
    writers = ("bench", "commits", "--writers", 4, "--seconds", 0.2, "--per-process", 2, "--folder", tmp_path)
    with advises("; set --group, and --writers to a multiple of --per-process"):
        mopd(*writers)
    assert mopd(*writers, "--group")
    with advises(" and tokens a second above 0, as rollout=2500"):
        _rates(["rollout=fast"], ["rollout", "score"])
    assert _rates(["rollout=2500"], ["rollout", "score"]) == {"rollout": 2500.0}


def test_folders_of_recipes(tmp_path: Path) -> None:
    with advises("; give the folder that holds NAME/"):
        mopd("recipes", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "job.toml").write_text((Path(__file__).parents[3] / "jobs/quickstart/job.toml").read_text())
    assert "mine" in mopd("recipes", tmp_path)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with advises("; give another --port, or 0 for a free one"):
            listen(port, [])
    listen(0, []).close()
    listen(port, []).close()


@pytest.mark.slow
def test_a_page_of_corrections_needs_signals(tmp_path: Path, make_store: MakeStore) -> None:
    with advises("; run the job's scoring, then export again"):
        export_redpen(Shown(Store.create(tmp_path / "bare")), tmp_path / "bare.html")
    export_redpen(Shown(make_store(tmp_path / "scored", prompts=2)), tmp_path / "scored.html")
    assert (tmp_path / "scored.html").stat().st_size


def test_the_stage_of_a_command() -> None:
    def job(*data: str) -> Job:
        stages = [{"name": f"s{i}", "objective": "o", "data": kind} for i, kind in enumerate(data)]
        return check_job(JOB | {"stages": stages, "plan": {"batch_samples": 4}}, where="job")

    assert choose_stage(job("reference", "rollout", "stored"), None, data=ANSWERS).name == "s1"
    assert choose_stage(job("reference", "stored"), None, data=ANSWERS).name == "s1"
    with pytest.raises(JobFileError, match=r"has 2 stages that fit \(s0, s1\); choose one with --stage NAME"):
        choose_stage(job("rollout", "rollout"), None, data=ANSWERS)
    assert choose_stage(job("rollout", "rollout"), "s1", data=ANSWERS).name == "s1"
    with pytest.raises(JobFileError, match=r"has no stage that fits \(it has s0\); choose one with --stage NAME"):
        choose_stage(job("reference"), None, data=ANSWERS)


def test_prompts_of_verifiers() -> None:
    prompt = Prompt(prompt_id="p", domain="d", text="2 + 2", answer="4")
    with advises(" is no task of verifiers; give its domain source 'verifiers', or another "):
        _task(prompt)
    domain = {"source": "verifiers", "dataset": "some-taskset", "environment": "verifiers", "reward": "verifiers"}
    check_job(JOB | {"domains": {"d": domain}}, where="job")
    check_job(JOB | {"domains": {"d": {"source": "x.jsonl", "reward": "exact"}}}, where="job")
