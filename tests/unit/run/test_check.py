"""`mopd check`: every mistake of a job in one run, and what the job will take, before anything is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from decoding import TINY
from peft import LoraConfig, get_peft_model
from peft_adapters import write_adapter

from mopd_dataplane.cli import jobs
from mopd_dataplane.errors import InputError, JobFileError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.adapter_files import BASE
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.prompts import load_prompts
from mopd_dataplane.run.estimate import estimate, training_bytes


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    texts = ["1 + 1 =", "12 + 30 =", "what is the sum of twelve and thirty?"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": text, "answer": "2"}) + "\n" for text in texts))
    return {
        "name": "checked", "store": str(folder / "store"),
        "student": {"config": TINY, "prompt_template": "Q: {prompt} A:"},
        "domains": {"sums": {"source": str(folder / "prompts.jsonl"), "reward": "exact", "train": 3}},
        "teachers": {"t": {"source": "student", "prompt_template": "{context}{prompt}"}}, "routing": {"sums": "t"},
        "engine": {"slots": 4}, "rollout": {"max_prompt_tokens": 64, "max_new_tokens": 16},
        "objectives": {"o": {"divergence": {"kind": "reverse", "signal": "hidden"}}},
        "plan": {"batch_samples": 2, "pack_tokens": 128},
        "stages": [{"name": "s", "objective": "o", "iterations": 3, "rollout": {"group_size": 2}}],
        **changes,
    }  # fmt: skip


def check(
    folder: Path, content: dict[str, Any], capsys: pytest.CaptureFixture[str], rate: list[str] | None = None
) -> tuple[dict[str, Any], str]:
    """What the command says, and why it refuses; empty when it does not."""
    file = folder / "job.json"
    file.write_text(json.dumps(content))
    refusal = ""
    try:
        jobs.check(str(file), jobs.Overrides(), rate=rate, as_json=True)
    except JobFileError as error:
        refusal = str(error)
    assert not (folder / "store").exists(), "nothing is written"
    return json.loads(capsys.readouterr().out), refusal


def test_what_a_job_takes_is_said_and_templates_are_shown_on_its_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, refusal = check(tmp_path, job(tmp_path), capsys)
    assert (said["findings"], refusal) == ([], "")
    assert said["prompts"]["sums"]["student reads"] == "'<s>Q: 1 + 1 = A:' (14 tokens)"
    assert said["prompts"]["sums"]["t reads"].startswith("'<s>1 + 1 ='")
    assert said["prompts"]["sums"]["longest"] == "44 tokens, of 3 prompts"
    assert said["tokens"] == {"s": "3 x 6 samples, at most 288 tokens"}
    assert set(said["memory"]) == {"s rollout", "s score", "s train"}


def test_how_long_it_takes_is_said_at_given_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 288 tokens at 2 a second are 144 s, at 0.01 a second 8 hours; of training nothing is known."""
    said, _ = check(tmp_path, job(tmp_path), capsys, ["rollout=2", "score=0.01"])
    assert said["time"] == {
        "s rollout": "at most 2 min at 2 tokens/s", "s score": "at most 8.0 h at 0.01 tokens/s",
        "all": "at most 8.0 h, without train, whose rate was not given",
    }  # fmt: skip
    assert check(tmp_path, job(tmp_path), capsys)[0]["time"] == {}
    for wrong in ("decode=5", "rollout", "rollout=0", "rollout=nan", "train=fast"):
        with pytest.raises(InputError, match=r"give one of rollout, score, train .*rollout=2500"):
            check(tmp_path, job(tmp_path), capsys, [wrong])


def test_ten_mistakes_are_ten_findings_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    raw_job = job(tmp_path, work=str(tmp_path / "file"), load={"cache_dir": str(tmp_path / "file")})
    raw_job["engine"] = {"kind": "vllm"}
    raw_job["student"]["prompt_template"] = "nothing of the prompt"
    raw_job["domains"] |= {
        "gone": {"source": str(tmp_path / "gone.jsonl"), "reward": "exact"},
        "short": raw_job["domains"]["sums"] | {"train": 9},
        "rewarded": raw_job["domains"]["sums"] | {"reward": "nowhere:nothing"},
    }
    raw_job["teachers"] = {
        "t": {"source": str(tmp_path / "missing")},
        "u": {"source": "acme/nobody"},
        "v": {"source": "student", "prompt_template": "nor here"},
    }
    raw_job["routing"] = {"sums": "t", "gone": "u", "short": "v", "rewarded": "v"}
    raw_job["train"], raw_job["score"] = {"device": "cuda"}, {"device": "xpu:1"}
    del raw_job["student"]["config"]
    raw_job["student"]["path"] = "acme/no-student"
    said, refusal = check(tmp_path, raw_job, capsys)
    keys = {finding["key"] for finding in said["findings"] if finding["certain"]}
    assert keys == {
        "work", "load.cache_dir", "engine.kind", "student.prompt_template", "domains.gone", "domains.short",
        "domains.rewarded.reward", "student.path", "teachers.t.source", "teachers.u.source",
        "teachers.v.prompt_template", "score.device", "train.device",
    }  # fmt: skip
    lines = refusal.splitlines()[1:]
    assert sorted(line.partition(": ")[0] for line in lines) == sorted(keys), "a line each"
    for said_of, next_step in {
        "domains.gone": "gone.jsonl: no .jsonl or .parquet file there; give a file",
        "domains.short": "3 distinct prompts, 0 eval + 9 train + 0 tune were asked for; lower them",
        "domains.rewarded.reward": "cannot import 'nowhere': No module named 'nowhere'; install it",
        "student.path": "(HF_HUB_OFFLINE is set); check the name",
        "student.prompt_template": "has no {prompt}, so the model would never read it; write it where",
        "engine.kind": "'vllm' is not installed here; pip install it",
        "train.device": 'finds no accelerator on this machine; set "auto" or "cpu"',
        "work": "is not a folder; name one",
    }.items():
        assert [next_step in line for line in lines if line.startswith(f"{said_of}: ")] == [True], said_of


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"plan": {"batch_samples": 2, "pack_tokens": 50}}, "stages.s.plan.pack_tokens"),
        ({"student": {"config": TINY | {"hidden_size": 32768, "vocab_size": 10**7}}}, "scale.ranks"),
    ],
)
def test_what_does_not_fit_is_said_with_its_key_and_refuses_nothing(
    changes: dict[str, Any], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, refusal = check(tmp_path, job(tmp_path, **changes), capsys)
    assert not refusal
    assert key in {finding["key"] for finding in said["findings"]}
    assert not any(finding["certain"] for finding in said["findings"])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size = 0; give a whole number of 1 or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; give"),
        ({"intermediate_size": -8}, "intermediate_size = -8; give"),
        ({"num_attention_heads": 12, "num_key_value_heads": 5}, "does not divide; give one of 1, 2, 3, 4, 6, 12"),
    ],
)
def test_sizes_that_make_no_model_are_refused(
    sizes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, refusal = check(tmp_path, job(tmp_path, student={"config": TINY | sizes}), capsys)
    assert refusal.splitlines()[1].startswith("student.config: ")
    assert words in refusal


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("\n", "'\\n' cannot name a store; give a folder"),
        ("   ", "cannot name a store; give a folder"),
        ("ftp://host/runs", "no store can be at ftp://; give a folder, or an object store: s3://bucket/prefix"),
    ],
)
def test_a_place_that_can_be_no_store_is_refused(
    store: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, refusal = check(tmp_path, job(tmp_path, store=store), capsys)
    assert refusal.splitlines()[1].startswith("store: ")
    assert words in refusal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "prompts.jsonl"]


def test_what_training_holds_on_device_and_host_follows_its_keys(tmp_path: Path) -> None:
    from mopd_dataplane.job.sections import Lora, Train

    def byte_counts(dtype: str, **keys: Any) -> tuple[int, int]:
        return training_bytes(1000, Train(**keys), dtype=dtype, adapter=10)

    assert byte_counts("float32") == (16 * 1000, 0)
    assert byte_counts("bfloat16") == (18 * 1000, 0)
    assert byte_counts("bfloat16", master_weights=True) == (16 * 1000, 0)
    assert byte_counts("float32", offload=True) == (4 * 1000, 16 * 1000)
    assert byte_counts("bfloat16", offload=True) == (2 * 1000, 16 * 1000)
    assert byte_counts("float32", lora=Lora(r=2)) == (4 * 1000 + 16 * 10, 0)
    assert byte_counts("bfloat16", lora=Lora(r=2)) == (2 * 1000 + 18 * 10, 0)
    assert byte_counts("bfloat16", lora=Lora(r=2), offload=True) == (2 * 1000 + 6 * 10, 16 * 10)


def test_offload_on_the_cpu_is_counted_as_one_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"student": {"config": TINY | {"hidden_size": 256, "vocab_size": 4 * 10**6}}}
    sizes = {}
    for keys in ({}, {"offload": True}):
        said, _ = check(tmp_path, job(tmp_path, **changes, train={"device": "cpu", **keys}), capsys)
        assert "s train, host" not in said["memory"]
        sizes[len(keys)] = float(said["memory"]["s train"].split()[0])
    assert sizes[1] / sizes[0] == pytest.approx(20 / 16, rel=0.02)


def test_a_folders_weights_are_counted_from_their_headers(tmp_path: Path) -> None:
    from mopd_dataplane.job.load import check_job
    from mopd_dataplane.models.hf import load_model

    folder = make_student(Student(config=TINY), tmp_path / "model", seed=0)
    raw_job = job(tmp_path, student={"path": str(folder)})
    checked: Job = check_job(raw_job, where="test")
    job_estimate = estimate(checked, {"sums": load_prompts("sums", checked.domains["sums"])})
    stored = sum(weight.numel() for weight in load_model(folder).state_dict().values())
    assert job_estimate.models["student"] == f"{stored / 1e6:.3g} M parameters" == job_estimate.models["t"]


def test_every_part_of_the_store_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 3 policies of 4 bytes and 2 checkpoints of 12 bytes a parameter; 288 tokens of 64 numbers in 2 bytes."""
    wide = TINY | {"hidden_size": 1024}
    said, _ = check(tmp_path, job(tmp_path, student={"config": wide}), capsys)
    disk, parameters = said["disk"], float(said["models"]["student"].split()[0]) * 1e6
    trained = float(disk["s policies and checkpoints"].split()[1]) * 1e6
    assert trained == pytest.approx(36 * parameters, rel=0.05)
    assert float(disk["s hidden states"].split()[1]) * 1e6 == pytest.approx(288 * 1024 * 2, rel=0.2)
    assert set(disk) >= {"initial student", "LM head of teacher t", "prompts", "s samples and signals", "report"}
    assert disk["all"].startswith("about ")


def test_checkpoints_that_retain_keeps_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: of 3 versions the last two stay anyway, so version 1 costs 12 bytes a parameter more."""
    wide = {"config": TINY | {"hidden_size": 1024}}
    said, _ = check(tmp_path, job(tmp_path, student=wide, retain={"checkpoints_every": 1}), capsys)
    checkpoint_size = said["disk"]["s checkpoints of 1 earlier versions ([retain])"]
    parameters = float(said["models"]["student"].split()[0]) * 1e6
    assert float(checkpoint_size.split()[1]) * 1e6 == pytest.approx(12 * parameters, rel=0.05)


def test_what_is_not_known_yet_is_called_unknown_and_the_sum_a_lower_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _ = check(tmp_path, job(tmp_path, student={"gguf": "not-a-package"}), capsys)
    why = "student.gguf is not converted yet; mopd run does it first"
    assert said["models"] == {"student": f"unknown: {why}", "t": f"unknown: {why}"}
    assert said["disk"]["s policies and checkpoints"] == f"unknown: the student's size is not known: {why}"
    assert said["disk"]["s hidden states"] == f"unknown: the width of teacher t is not known: {why}"
    assert said["disk"]["all"].startswith("at least ")
    assert "without initial student, LM head of teacher t, s hidden states" in said["disk"]["all"]
    assert said["memory"] == dict.fromkeys(("s rollout", "s score", "s train"), f"unknown: {why}")
    assert not any(amount.startswith("at most") for amount in said["disk"].values())


def test_an_import_that_is_missing_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = {"name": "s", "data": "stored", "objective": "o"}
    said, _ = check(tmp_path, job(tmp_path, stages=[stage]), capsys)
    assert said["disk"]["s hidden states"] == "unknown: its samples are not imported yet"


@pytest.mark.parametrize(
    ("rate", "lora", "said"),
    [
        (5e-4, 0, ""),
        (5e-3, 4, ""),
        (5e-3, 0, "a rate for adapters"),
        (5e-4, 4, "a rate for the weights"),
    ],
)
def test_a_learning_rate_of_the_other_kind_is_asked_about(
    rate: float, lora: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: 5e-5 (2000 / 64)^0.781 is 7.4e-4 for weights of width 64, ten times that for an adapter."""
    folder = make_student(Student(config=TINY | {"hidden_size": 64}), tmp_path / "model", seed=0)
    changes = {"student": {"path": str(folder)}, "train": {"learning_rate": rate, "lora": {"r": lora}}}
    report, refusal = check(tmp_path, job(tmp_path, **changes), capsys)
    assert not refusal
    assert [(one["key"], said in one["problem"]) for one in report["findings"]] == (
        [("stages.s.train.learning_rate", True)] if said else []
    )


def test_a_rate_for_weights_that_start_at_random_is_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not check(tmp_path, job(tmp_path, train={"learning_rate": 5e-2}), capsys)[0]["findings"]


def test_an_adapter_that_fits_neither_job_nor_base_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing target, another rank, a base of another shape, and a base with other weights than it was trained on."""
    folder = make_student(Student(config=TINY), tmp_path / "base", seed=0)
    wide = make_student(Student(config=TINY | {"intermediate_size": 160}), tmp_path / "wide", seed=0)
    adapter, misplaced, retrained = (tmp_path / name for name in ("adapter", "misplaced", "retrained"))
    model = get_peft_model(load_model(folder), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for adapter_folder, base in ((adapter, folder), (misplaced, wide), (retrained, folder)):
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(adapter_folder)
    (retrained / BASE).write_text(json.dumps({"place": str(folder), "digest": "0" * 64}))

    def findings(**changes: Any) -> dict[str, str]:
        said, refusal = check(tmp_path, job(tmp_path, **changes), capsys)
        assert bool(refusal) == any(finding["certain"] for finding in said["findings"])
        return {finding["key"]: finding["problem"] for finding in said["findings"] if finding["certain"]}

    rate = {"learning_rate": 8e-3}
    job_changes = {"student": {"path": str(adapter)}, "train": {**rate, "lora": {"r": 4}}}
    assert findings(**job_changes) == {}
    wrong_rank = findings(**{**job_changes, "train": {**rate, "lora": {"r": 8}}})
    assert "adapter of rank 4; set it to 4" in wrong_rank["stages.s.train.lora.r"]
    missing = findings(train={**rate, "lora": {"r": 4, "target_modules": ["q_proj", "k_prj"]}})
    assert "no module 'k_prj'" in missing["stages.s.train.lora.target_modules"]
    other_weights = findings(**{**job_changes, "student": {"path": str(retrained)}})
    assert "was trained on a base with digest 0000" in other_weights["student.path"]
    other_shape = findings(teachers={"t": {"source": str(misplaced)}})
    assert "another rank or for another base" in other_shape["teachers.t.source"]


VLLM = {"kind": "vllm", "url": "http://127.0.0.1:9/v1", "slots": 4}


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"engine": VLLM, "train": {"lora": {"r": 4}}}, "", ""),
        ({"engine": VLLM, "train": {"lora": {"r": 1024}}}, "stages.s.train.lora.r", "rank 512 at most"),
        ({"engine": VLLM, "student": "adapter"}, "stages.s.train.lora.r", "trains whole weights"),
        ({"engine": VLLM, "student": "dora", "train": {"lora": {"r": 4}}}, "student.path", "use_dora = true"),
        ({"score": {"engine": "vllm"}, "teachers": "dora"}, "teachers.t", "use_dora = true"),
        ({"score": {"engine": "vllm"}, "teachers": "adapter"}, "", ""),
    ],
    ids=["fits", "rank", "start", "student", "teacher", "teacher-fits"],
)
def test_adapters_that_vllm_cannot_take_are_found_before_work_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], key: str, said: str
) -> None:
    base = make_student(Student(config=TINY), tmp_path / "base", seed=0)
    folders = {"adapter": write_adapter(base, tmp_path / "adapter")}
    folders["dora"] = write_adapter(base, tmp_path / "dora", use_dora=True)
    changes = dict(changes)
    if isinstance(changes.get("student"), str):
        changes["student"] = {"path": str(folders[changes["student"]])}
    if isinstance(changes.get("teachers"), str):
        changes["teachers"] = {"t": {"source": str(folders[changes["teachers"]])}}
    findings = check(tmp_path, job(tmp_path, **changes), capsys)[0]["findings"]
    mine = {one["key"]: one["problem"] for one in findings if "adapt" in one["problem"] or "dora" in one["problem"]}
    mine = {at: problem for at, problem in mine.items() if not at.endswith("learning_rate")}
    assert list(mine) == ([key] if key else [])
    assert said in mine.get(key, "")
