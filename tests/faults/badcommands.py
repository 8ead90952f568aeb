"""Bad command lines of every command beside those of `badinput`: `lines(files, job, store)` yields words of `mopd`.

Each must end with an error of one's own, a non-zero exit code, and nothing written. None would run for long if it were
taken up: a measurement that gets a bad option must refuse it before it measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

NOT_NUMBERS = ("-1", "nan", "x", "")
KINDS = ("verl", "trl", "skyrl", "prime-rl", "verifiers", "tinker", "openai", "sft", "preference", "plain", "nothing",
         "module:function", "os:system", "", "../x", "builtins:exec")  # fmt: skip
MEASURED = (
    ("plan", "--samples"), ("plan", "--window"), ("load", "--samples"), ("load", "--hidden-samples"),
    ("write", "--rows"),
    ("commits", "--commits"), ("wal", "--sequences"), ("wal", "--seconds"), ("sample", "--vocabulary"),
    ("sample", "--slots"), ("step", "--iterations"), ("step", "--prompts"), ("length-bias", "--samples"),
    ("length-bias", "--dose"), ("view", "--samples"), ("view", "--mean-tokens"), ("size", "--tokens-per-day"),
    ("size", "--student"), ("size", "--teachers"), ("size", "--hidden-days"), ("size", "--passes"),
    ("size", "--gpu-hour"), ("size", "--topk"), ("size", "--fidelity"), ("size", "--codec"),
)  # fmt: skip
"""Measurements and an option of each that takes a number, or a word of a few."""
SECRET = "s3://me:pw@bucket/x"


def lines(files: Path, job: Path, store: Path) -> Iterator[list[str]]:
    """Every command line. files: those that `badinput` wrote; job: a job file; store: a sound store."""
    file = str(files / "good.jsonl")
    yield from _measurements(str(files), file)
    yield from _questions(str(store), file)
    yield from _views(str(store), file)
    yield from _imports(files)
    yield from _exports(str(store), file)
    yield from _stores(str(store), str(files), file)
    yield from _jobs(str(job), str(files), file)
    yield from _loaders(str(store), file)


def _measurements(folder: str, file: str) -> Iterator[list[str]]:
    for name, option in MEASURED:
        yield from (["bench", name, option, value] for value in NOT_NUMBERS)
    for option in ("--tokens-per-day", "--student", "--teachers", "--hidden-days", "--passes", "--gpu-tflops"):
        yield ["bench", "size", option, "inf"]
    for name in ("plan", "load", "write", "commits", "wal", "view", "step"):
        yield from (["bench", name, "--folder", bench_folder] for bench_folder in (file, "nowhere/x", "y" * 400))
    for name in ("adapters", "train-memory", "resume"):
        yield from (["bench", name, model] for model in ("nowhere", file, "", "x" * 400, folder))
    yield ["bench", "adapters", folder, "--count", "0"]
    yield ["bench", "step", "--model", "nowhere"]
    yield from (["bench", "step", "--peers", python] for python in ("nowhere", file))
    yield ["bench", "sample", "--model", "nowhere"]
    yield ["bench", "view", "--store", "nowhere"]
    yield ["bench", "load", "--peers", "--plot", "/dev/full"]
    yield ["bench", "load", "--plot", "plot.png"]
    yield ["bench", "length-bias", "--samples", "100", "--plot", "/dev/full"]
    yield from (["bench", *words] for words in ([], ["nothing"]))


def _questions(store: str, file: str) -> Iterator[list[str]]:
    pairs = ((store, store), (store, "nowhere"), (f"{store}#x", store), (f"{store}#", f"{store}#@"), ("", ""),
             (f"{store}#student@-1", store), (f"{store}#student@{10**20}", store), (file, store),
             (SECRET, store))  # fmt: skip
    yield from (["compare", *pair] for pair in pairs)
    yield from (["compare", store, store, "--plot", plot] for plot in ("/dev/full", "plot.doc"))
    yield from (["schema", store, table] for table in ("nothing", "../x", "samples; drop"))
    yield ["schema", "nowhere"]
    for words in (["--worst"], ["--random"], ["--disagreement"], ["--domain", "x"], ["--tokenizer", "nowhere"], []):
        yield ["show", store, *words]
    for words in (["--limit", "-1"], ["--limit", "x"], ["--csv", "--json"]):
        yield ["query", store, "select 1", *words]
    tasks = ["--tasks", "arc_easy"]
    for words in ([], ["--tasks", ""], ["--tasks", "nothing"], [*tasks, "--policy", "x"], [*tasks, "--version", "-1"],
                  [*tasks, "--limit", "-1"], [*tasks, "--batch-size", "0"], [*tasks, "--dtype", "x"],
                  [*tasks, "--include-path", "nowhere"]):  # fmt: skip
        yield ["eval", store, *words]


def _views(store: str, file: str) -> Iterator[list[str]]:
    for words in (
        ["--port", "-1"],
        ["--port", "70000"],
        ["--where", "true"],
        ["--sample", "zz"],
        ["--limit", "3"],
        ["--json"],
    ):
        yield ["view", store, *words]
    for folder in (file, "/proc/x", "/dev/full"):
        yield ["view", store, "--export", folder]
    for words in (["--where", "no such"], ["--where", "1; drop table samples"], ["--order", "nothing"],
                  ["--limit", "-1"],
                  ["--sample", "zz"], ["--tokenizer", "nowhere"], ["--follow"]):  # fmt: skip
        yield ["view", store, "--export", "page", *words]
    for uri in ("nowhere", file, "", "/proc/x", SECRET):
        yield ["view", uri]
        yield ["view", uri, "--export", "page"]
    yield ["view", store, "nowhere"]
    yield ["view"]


def _imports(files: Path) -> Iterator[list[str]]:
    names = ["--store", "i", "--tokenizer", str(files / "tokenizer"), "--stage", "s", "--domain", "d"]
    paths = ("nowhere.jsonl", str(files / "tokenizer"), "*.nothing", "/dev/zero", "/proc/self/mem",
             "http://me:pw@127.0.0.1:9/x.jsonl", f"{SECRET}.jsonl")  # fmt: skip
    for kind in KINDS:
        yield from (["import", kind, path, *names] for path in paths)
    for words in (["--policy", "../x"], ["--teacher", "../x"], ["--stage", ""], ["--domain", ""], ["--domain", "a\nb"]):
        yield ["import", "plain", str(files / "rows9.jsonl"), *names, *words]


def _exports(store: str, file: str) -> Iterator[list[str]]:
    for form in ("plain", "sft", "messages", "tokens", "traces", "nothing", ""):
        for out in ("o.jsonl", "o.parquet", "o.nothing", file, "/dev/full", "/proc/o.jsonl", "x" * 300 + ".jsonl",
                    "http://me:pw@host/o.jsonl"):  # fmt: skip
            yield ["export", store, out, "--as", form, "--where", "no such"]
    for words in (["--signals", "nothing"], ["--teacher", "nobody"], ["--format", "nothing"],
                  ["--where", "true; drop table samples"], ["--signals", "logprob", "--teacher", "../x"],
                  ["--where", "(select count(*) from read_csv('/etc/passwd')) > 0"]):  # fmt: skip
        yield ["export", store, "o.jsonl", *words]


def _stores(store: str, folder: str, file: str) -> Iterator[list[str]]:
    for words in ([], ["--where", ""], ["--where", "no such"], ["--where", "true"],
                  ["--where", "1; drop table samples"],
                  ["--where", "uid = 'x'", "--yes"], ["--where", "uid = 'x'", "--dry-run"]):  # fmt: skip
        yield ["store", "delete", store, *words]
    for uri in ("nowhere", file, "", "/proc/x"):
        yield ["store", "delete", uri, "--where", "true", "--yes"]
        yield ["store", "copy", uri, "copy"]
        yield ["store", "upgrade", uri, "new"]
        yield ["store", "upgrade", store, uri]
    for uri in ("/proc/x", file, folder, f"{store}/inside", store, "", "x" * 400, SECRET, "zz://x"):
        yield ["store", "copy", store, uri]
    yield from (["store", "upgrade", uri, "new"] for uri in (store, folder))


def _jobs(job: str, folder: str, file: str) -> Iterator[list[str]]:
    for rate in ("rollout", "rollout=", "rollout=-1", "rollout=nan", "rollout=inf", "=5", "nothing=5", "rollout=0",
                 "rollout=x", "rollout=5=5", ""):  # fmt: skip
        yield ["check", job, "--rate", rate]
    yield from (["check", job_path] for job_path in ("nowhere", folder, "/dev/zero", "/proc/self/mem"))
    yield ["check", job, "--seed", "x"]
    yield ["check", job, "--store", "/proc/x"]
    for words in (
        [],
        ["--stage", "x"],
        ["--samples", "-1"],
        ["--topk", "0"],
        ["--samples", "x"],
        ["--store", "nowhere"],
    ):
        yield ["teachers", job, *words]
    for command in ("rollout", "score", "reward", "train"):
        yield from ([command, job, *words] for words in ([], ["--stage", "nothing"]))
        yield [command, "nowhere"]
    for words in (["recipes", "nowhere"], ["recipes", file], ["init", "nothing"], ["init", "opd", file],
                  ["init", "opd", "/proc/x"], ["init", "opd", "x" * 300], ["init", "../opd"], ["help", "nothing"],
                  ["help", "train..x"], ["help", "\u202e"], ["nothing"], [""], ["--nothing"], ["store"]):  # fmt: skip
        yield words


def _loaders(store: str, file: str) -> Iterator[list[str]]:
    yield ["load", "serve", store]
    for words in (["--slots", "-1"], ["--socket", file], *(["--signal", name] for name in ("nothing", "../x", ""))):
        yield ["load", "serve", store, "--stage", "x", *words]
    yield ["load", "serve", "nowhere", "--stage", "x"]
