"""Bad command lines, job files, stores and imports, made by rule: `cases(folder)` yields (what, words of `mopd`).

Each must end with an error of one's own, a non-zero exit code, and nothing written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import badcommands

JOB = """
name = "bad"
store = "new/store"
[student]
tokenizer = "characters"
[student.config]
model_type = "qwen3"
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 8
[domains.d]
source = "reasoning-gym"
dataset = "chain_sum"
train = 4
[plan]
batch_samples = 2
[[stages]]
name = "base"
data = "reference"
"""
VALUES = (
    '"x"', "-1", "nan", "inf", "[]", "{}", "[[1]]", "{ a = 1 }", "1e400", '""', "1979-05-27", '"\\u202e\\u001b[31m"',
    "99999999999999999999", '"../../etc/passwd"',
)  # fmt: skip
KEYS = (
    "seed", "student", "student.path", "student.config", "student.gguf", "student.tokenizer", "student.dtype",
    "student.prompt_template", "domains", "domains.d", "domains.d.source", "domains.d.train", "domains.d.eval",
    "domains.d.args", "domains.d.reward", "domains.d.template", "teachers", "routing", "engine.kind", "engine.slots",
    "engine.url", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.group_size", "rollout.record",
    "score.hidden_codec", "plan.pack_tokens", "plan.batch_samples", "plan.mixture", "train.betas",
    "train.learning_rate", "train.track", "load.slots", "scale.ranks", "wal.durability", "objectives", "stages",
    "stages.base.start",
    "stages.base.objective", "no_such_key",
)  # fmt: skip
MARKS = ("{}", "[]", "null", "5", '"x"', "", "{", '{"format_version": "1"}', '{"format_version": null}',
         '{"format_version": 99}', '{"format_version": [1]}', '{"format_version": true}', "[" * 5000)  # fmt: skip
EXTENDS = ("1", "[]", "{}", '"x"', "{ job = 1 }", '{ job = "." }', '{ job = "x", stages = 1 }', "{ stages = [] }",
           '{ job = "/dev/null" }', '{ job = "../bad.toml", stages = [1] }', '{ job = "x", y = 1 }')  # fmt: skip
ROWS = (
    "", "{", "[]", "5", "null", '"x"', "{}", '{"prompt": 5, "response": "x"}', '{"prompt": "x"}',
    '{"tokens": [1, 2], "prompt_len": 5}', '{"tokens": "x", "prompt_len": 1}', '{"tokens": [1, 1.5], "prompt_len": 1}',
    '{"tokens": [1, -2], "prompt_len": 1}', '{"tokens": [1, 1099511627776], "prompt_len": 1}',
    '{"tokens": [1, 999999], "prompt_len": 1}', '{"tokens": [5, 6], "prompt_len": 1, "loss_mask": [7]}',
    '{"tokens": [5, 6], "prompt_len": 1, "logprobs": [0.5]}',
    '{"tokens": [5, 6], "prompt_len": 1, "logprobs": [-1e300]}',
    '{"tokens": [5, 6], "prompt_len": 1, "logprobs": [NaN]}', '{"tokens": [5, 6], "prompt_len": 1, "temperature": NaN}',
    '{"tokens": [5, 6], "prompt_len": 1, "top_p": 7}', '{"tokens": [5, 6], "prompt_len": 1, "top_k": -5}',
    '{"tokens": [5, 6], "prompt_len": 1, "iteration": Infinity}', '{"tokens": [5, 6], "prompt_len": 1, "uid": "x"}',
    '{"tokens": [5, 6], "prompt_len": 1, "iteration": -5}', '{"tokens": [5, 6], "prompt_len": 1, "group_index": 99999}',
    '{"tokens": [5, 6], "prompt_len": 1, "iteration": 4294967296}',
    '{"tokens": [5, 6], "prompt_len": 1, "versions": [4294967296], "version_starts": [0]}',
    '{"tokens": [5, 6], "prompt_len": 1, "rewards": [5]}', '{"tokens": [5, 6], "prompt_len": 1, "rewards": 5}',
)  # fmt: skip
FORMATS = ("plain", "verl", "trl", "prime-rl", "tinker")
STATEMENTS = ("", ";", "drop table samples", "select 1; select 2", "select * from nowhere",
              "select nothing from samples",
              "copy samples to 'x.csv'", "select * from read_csv('/etc/passwd')", "attach 'x.db'", "set threads = 1",
              "select " + "(" * 3000 + "1", "\u202e")  # fmt: skip


def cases(folder: Path, store: Path) -> Iterator[tuple[str, list[str]]]:
    """Every case; files that it needs are written to `folder` first. store: a sound one, which is only asked."""
    job = folder / "bad.toml"
    job.write_text(JOB)
    (folder / "good.jsonl").write_text('{"tokens": [5, 6], "prompt_len": 1}\n')
    yield from _jobs(folder, job)
    yield from _stores(folder)
    yield from _imports(folder)
    for words in badcommands.lines(folder, job, store):
        yield " ".join(word[:60] for word in words), words
    for statement in STATEMENTS:
        yield f"query {statement[:40]!r}", ["query", str(store), statement]
    for uid in ("zz", "", "../x", "f" * 33):
        yield f"show {uid!r}", ["show", str(store), uid]
    for out in ("/dev/full", "/dev/null", str(folder), "/proc/x.html", "x" * 300):
        yield f"report -o {out[:40]}", ["report", str(store), "-o", out]
    for words in (
        ["init", "opd", str(job)],
        ["store", "copy", str(store), str(job)],
        ["store", "copy", str(store), f"{store}/in"],
        ["store", "copy", str(store), "c", "--where", "no such"],
        [
            "import",
            "os:system",
            str(folder / "good.jsonl"),
            "--store",
            "i",
            "--tokenizer",
            str(folder / "tokenizer"),
            "--stage",
            "s",
            "--domain",
            "d",
        ],
        [
            "import",
            "plain",
            str(folder / "good.jsonl"),
            "--store",
            "i",
            "--tokenizer",
            str(folder / "tokenizer"),
            "--stage",
            "../s",
            "--domain",
            "d",
        ],
        ["export", str(store), str(job)],
        ["export", str(store), "o", "--where", "no such"],
    ):
        yield " ".join(words)[:60], words


def _jobs(folder: Path, job: Path) -> Iterator[tuple[str, list[str]]]:
    for key in KEYS:
        for value in VALUES:
            yield f"plan --set {key}={value}", ["plan", str(job), "--set", f"{key}={value}"]
    for number, text in enumerate(EXTENDS):
        child = folder / f"extends{number}.toml"
        child.write_text(f"extends = {text}\n{JOB}")
        yield f"extends = {text}", ["plan", str(child)]
    for number, content in enumerate((b"", b"\xff\xfe", b"[[[", b"a = 1", b"[" * 9000, b"stages = 1", b"\0")):
        broken = folder / f"broken{number}.toml"
        broken.write_bytes(content)
        yield f"job file {content[:10]!r}", ["run", str(broken)]
    for words in (
        ["plan", "/proc/nothing"],
        ["run", str(folder)],
        ["run", "x" * 400],
        ["plan", str(job), "--set", "x"],
    ):
        yield " ".join(words)[:60], words


def _stores(folder: Path) -> Iterator[tuple[str, list[str]]]:
    file = folder / "a-file"
    file.write_text("mine")
    places = [
        str(file),
        str(file / "below"),
        "/proc/store",
        "x" * 400,
        "nowhere",
        "",
        "s3://me:pw@bucket/x",
        "zz://b/x",
    ]
    for number, mark in enumerate(MARKS):
        store = folder / f"store{number}"
        store.mkdir()
        (store / "store.json").write_text(mark)
        places.append(str(store))
    for uri in places:
        for words in (["query", uri, "select 1"], ["show", uri, "3f"], ["report", uri, "-o", "r.html"],
                      ["store", "verify", uri], ["store", "info", uri], ["store", "compact", uri],
                      ["export", uri, "out.parquet"]):  # fmt: skip
            yield " ".join(words)[:80], words


def _imports(folder: Path) -> Iterator[tuple[str, list[str]]]:
    from mopd_dataplane.models.initial_weights import character_tokenizer

    tokenizer, broken = folder / "tokenizer", folder / "broken-tokenizer"
    character_tokenizer().save_pretrained(str(tokenizer))
    broken.mkdir()
    (broken / "tokenizer.json").write_text(json.dumps({"model": 5}))
    names = ["--stage", "s", "--domain", "d"]
    for number, row in enumerate(ROWS):
        file = folder / f"rows{number}.jsonl"
        file.write_text(row + "\n")
        for source in FORMATS:
            words = ["import", source, str(file), "--store", "imported", "--tokenizer", str(tokenizer), *names]
            yield f"import {source} {row[:60]}", words
    for tokenizer_path in (broken, folder / "nothing"):
        words = [
            "import",
            "plain",
            str(folder / "rows9.jsonl"),
            "--store",
            "imported",
            "--tokenizer",
            str(tokenizer_path),
            *names,
        ]
        yield f"import with {tokenizer_path.name}", words
