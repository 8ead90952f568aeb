"""What `mopd check` says of a teacher whose tokenizer differs from the student's."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers_apart import exchanged_letters, rebuilt

from mopd_dataplane.base.file_checksums import CHECKSUMS
from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models import tiny
from mopd_dataplane.models.hf import load_tokenizer, tokenizer_digest
from mopd_dataplane.run.preflight import preflight, refuse


def write_job(folder: Path, teacher: str, **settings: Any) -> Path:
    """A job of a Qwen3 base student under a teacher of the named model's family."""
    for name, model_name in (("student", "models/Qwen3-8B-Base"), ("teacher", teacher)):
        tiny.of_family(tiny.stand_in(model_name), folder / name, seed=0, dtype="float32")
    (folder / "sums.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} + 1 =", "answer": "2"}) + "\n" for i in range(6))
    )
    job = {
        "name": "pair", "store": str(folder / "store"),
        "student": {"path": str(folder / "student"), "prompt_template": "{prompt}"},
        "domains": {"sums": {"source": str(folder / "sums.jsonl"), "reward": "exact", "train": 4, "eval": 2}},
        "teachers": {"big": {"source": str(folder / "teacher"), **settings}}, "routing": {"sums": "big"},
        "objectives": {"exact": {"divergence": {"kind": "reverse", "signal": "hidden"}}},
        "plan": {"pack_tokens": 64, "batch_samples": 4},
        "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 8},
        "stages": [{"name": "s", "objective": "exact", "rollout": {"prompts_per_iteration": 4}}],
    }  # fmt: skip
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    return file


@pytest.mark.parametrize(
    ("end", "sentence"), [("own", "it stops at either"), ("map", 'with prompt_template = "chat" set end = "own"')]
)
def test_a_base_student_under_an_instruct_teacher_runs_and_both_ends_are_named(
    tmp_path: Path, end: str, sentence: str
) -> None:
    job = load_job(write_job(tmp_path, "models/Qwen3-32B", end=end))
    assert len({tokenizer_digest(load_tokenizer(tmp_path / name)) for name in ("student", "teacher")}) == 2
    findings = preflight(job).findings
    refuse(job, findings)
    (ends,) = [finding.problem for finding in findings if finding.key == "teachers.big.source"]
    (prompts,) = [finding.problem for finding in findings if finding.key == "teachers.big.prompt_template"]
    assert "'0 + 1 =' | '<|im_start|>user\\n0 + 1 =<|im_end|>\\n<|im_start|>assistant\\n'" in prompts
    assert "<|endoftext|>" in ends
    assert "<|im_end|>" in ends
    assert sentence in ends


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    file = write_job(tmp_path, "models/Qwen3-32B")
    exchanged_letters(load_tokenizer(tmp_path / "teacher")).save_pretrained(tmp_path / "teacher")
    job = load_job(file)
    findings = preflight(job).findings
    with pytest.raises(JobFileError, match="stand for other texts"):
        refuse(job, findings)


@pytest.mark.parametrize("part", ["pre-tokeniser", "merges"])
def test_a_teacher_that_splits_text_in_another_way_is_named(tmp_path: Path, part: str) -> None:
    """Its ids stand for the same texts, so it may judge the student's tokens, which are not those it was trained on."""
    file = write_job(tmp_path, "models/Qwen3-8B-Base", prompt_template="{context}{prompt}")
    assert preflight(load_job(file)).findings == []
    tokenizer = load_tokenizer(tmp_path / "teacher")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    if part == "pre-tokeniser":
        digits = {"type": "Digits", "individual_digits": True}
        described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, described["pre_tokenizer"]]}
    else:
        described["model"] |= {"merges": [], "ignore_merges": True}
    rebuilt(tokenizer, described).save_pretrained(tmp_path / "teacher")
    (finding,) = preflight(load_job(file)).findings
    assert finding.key == "teachers.big.source"
    assert not finding.certain
    assert "splits text in another way than the student" in finding.problem


def with_context(folder: Path, tokens: int) -> None:
    """Let the teacher's config name that context."""
    config = folder / "teacher" / "config.json"
    (folder / "teacher" / CHECKSUMS).unlink(missing_ok=True)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": tokens}))


def test_a_teacher_whose_context_is_short_is_refused_unless_the_job_takes_it(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, "models/Qwen3-32B", end="map"))
    with_context(tmp_path, 12)
    problem = problem_of(job, "teachers.big.source")
    assert "reads 12 tokens, and a sample of stage 's' may have 15 (the longest prompt has 7, an answer 8)" in problem
    assert "lower max_new_tokens of stage 's' to 5 or less, set teachers.big.beyond_context = true" in problem
    with pytest.raises(JobFileError, match="reads 12 tokens"):
        refuse(job, preflight(job).findings)
    for advice in ("teachers.big.beyond_context=true", "stages.s.rollout.max_new_tokens=5"):
        lowered = load_job(tmp_path / "job.json", overrides=[advice])
        assert problem_of(lowered, "teachers.big.source") == ""
        refuse(lowered, preflight(lowered).findings)


def test_the_context_of_a_blends_members_counts(tmp_path: Path) -> None:
    file = write_job(tmp_path, "models/Qwen3-32B")
    settings = json.loads(file.read_text())
    settings["teachers"]["both"] = {"blend": {"big": 0.5, "small": 0.5}}
    settings["teachers"]["small"] = settings["teachers"]["big"]
    settings["routing"] = {"sums": "both"}
    file.write_text(json.dumps(settings))
    with_context(tmp_path, 12)
    for name in ("big", "small"):
        assert "reads 12 tokens" in problem_of(load_job(file), f"teachers.{name}.source")


@pytest.mark.parametrize(
    ("name", "method", "key", "refusal"),
    [
        ("teacher", "gptq", "teachers.big.source", "quantised by gptq, which is read with its own package"),
        ("student", "fp8", "student.path", "quantised by fp8; a student is trained in float32 or bfloat16"),
    ],
)
def test_quantised_weights_that_a_job_cannot_use_are_refused(
    tmp_path: Path, name: str, method: str, key: str, refusal: str
) -> None:
    file = write_job(tmp_path, "models/Qwen3-32B")
    settings = json.loads((tmp_path / name / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": method}
    (tmp_path / name / CHECKSUMS).unlink(missing_ok=True)
    (tmp_path / name / "config.json").write_text(json.dumps(settings))
    job = load_job(file)
    findings = preflight(job).findings
    assert any(finding.key == key and refusal in finding.problem for finding in findings)
    with pytest.raises(JobFileError, match=f"quantised by {method}"):
        refuse(job, findings)
    assert not (tmp_path / "store").exists()


def test_a_quantised_teacher_that_vllm_reads_is_left_to_it(tmp_path: Path) -> None:
    file = write_job(tmp_path, "models/Qwen3-32B")
    settings = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / CHECKSUMS).unlink(missing_ok=True)
    (tmp_path / "teacher" / "config.json").write_text(
        json.dumps(settings | {"quantization_config": {"quant_method": "gptq"}})
    )
    for reads, is_refused in (("prompt_logprobs", False), ("states", True)):
        job = load_job(
            file, overrides=["score.engine=vllm", f"score.reads={reads}", "objectives.exact.divergence.signal=topk"]
        )
        assert any("quantised by" in finding.problem for finding in preflight(job).findings) == is_refused


def problem_of(job: Job, key: str) -> str:
    """What the check says of a sample that is too long."""
    return next((f.problem for f in preflight(job).findings if f.key == key and "a sample of stage" in f.problem), "")


def test_a_prompt_in_the_teachers_own_template_counts_against_its_context(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, "models/Qwen3-32B", prompt_template="Solve it. " * 40 + "{prompt}"))
    assert problem_of(job, "teachers.big.source") == ""
    with_context(tmp_path, 60)
    assert "reads 60 tokens" in (problem := problem_of(job, "teachers.big.source"))
    assert "a prompt in its own template has " in problem
    own = load_job(write_job(tmp_path, "models/Qwen3-32B"))
    with_context(tmp_path, 60)
    assert problem_of(own, "teachers.big.source") == "", "7 + 8 tokens fit"


class Models(BaseHTTPRequestHandler):
    """A server that says of its model how much it reads."""

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "m", "root": "m", "max_model_len": 12}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def test_what_a_server_reads_counts_too(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        job = load_job(write_job(tmp_path, "models/Qwen3-32B", url=url))
        problem = problem_of(job, "teachers.big.source")
        assert "reads 12 tokens, and a sample of stage 's' may have 15" in problem
        assert "beyond_context" not in problem, "that lifts no server's limit"
        server.shutdown()
    assert problem_of(job, "teachers.big.source") == "", "a server that is not there yet is no finding of the check"
