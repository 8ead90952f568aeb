"""Rules of the house that a parser can check, over every source file of the two packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "mopd_dataplane").rglob("*.py"), *(ROOT / "kernels" / "mopd_kernels").rglob("*.py")])
STAGES = {"rollout", "store", "score", "plan", "load", "train", "query"}
NEIGHBOURS_ALLOWED = {("load", "store"), ("load", "plan"), ("query", "store")}
"""The loader process reads the store and deals packs with the planner's pure function; queries read the store. No
other stage knows another; a process's __main__ puts its parts together."""
LANCE_ALLOWED = {"store", "bench"}
"""The store, and measurements of Lance itself."""
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load"}
WAITS = {"wait": 0, "join": 0, "result": 0, "communicate": 0, "acquire": 0, "get": 0, "wait_for": 1}
"""Methods that wait for ever unless they are given more arguments than this. A worker thread that waits for the next
task of its own process says `for task in iter(queue.get, None)`."""
RUNS = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
UNSAFE_ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code"}
WRITES_IN_PLACE = {"write_text", "write_bytes", "rename", "os.rename", "os.replace", "shutil.move", "shutil.copyfile"}
"""What `publish_file`, `publish_folder` and `duplicate_file` of base/files.py are for: written beside, synced, renamed,
and nothing replaced that is no file. Also `open` for writing."""
WRITES = {
    "base/files.py": "the helpers themselves",
    "base/file_checksums.py": "into a folder that is published whole", "models/adapters.py": "the same",
    "train/checkpoint.py": "the same", "run/upgrade.py": "the same",
    "base/file_urls.py": "a scratch file on its way to a URL; a finished scratch moved to a new place",
    "interchange/exporter.py": "a scratch that is published whole", "view/export.py": "a new folder, its mark last",
    "run/follow.py": "a scratch of this process", "run/rehearsal.py": "the same", "store/remote/objects.py": "the same",
    "run/sweep.py": "a run's output is appended to its log",
    "run/token_log_copy.py": "into a staging folder; segments come last",
    "base/log/segment_file.py": "the log: its header is synced first", "rollout/log/ownership.py": "O_EXCL",
    "rollout/engines/kv_file.py": "a cache with a checksum that may be lost", "store/remote/range_cache.py": "the same",
    "score/vllm_connector.py": "between two processes, read once", "train/token_stats.py": "the same",
    "train/metrics.py": "lines with a checksum each are appended", "train/stop.py": "a lock",
    "store/queue/fold.py": "the log of a dead process, before it is removed",
    "store/format/manifests.py": "a torn manifest is set aside, the folder synced",
    "job/reference.py": "generated pages of this repository", "store/format/schemas.py": "the same",
}  # fmt: skip
"""Files that write otherwise, and why; bench/ measures the disk."""


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=relative(file))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def type_only_lines(tree: ast.Module) -> set[int]:
    """Lines under `if TYPE_CHECKING:`, which never run."""
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


def waits_for_ever(call: ast.Call, name: str) -> bool:
    """Whether a call can hang: a peer may die, be stopped or never have started."""
    named = {keyword.arg for keyword in call.keywords}
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method in WAITS:
        return len(call.args) == WAITS[method] and not named & {"timeout", "blocking"}
    if name == "fcntl.flock":
        return not any(flag in ast.unparse(call) for flag in ("LOCK_NB", "LOCK_UN"))
    return (name in RUNS and "timeout" not in named) or ast.unparse(call).endswith("settimeout(None)")


def writes_in_place(call: ast.Call, name: str) -> bool:
    """Whether a call leaves half a file behind when it is interrupted, or replaces what is no file."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else name
    if method == "open" and not name.startswith(("os.", "tarfile.")):
        modes = [*call.args[name == "open" :][:1], *(word.value for word in call.keywords if word.arg == "mode")]
        return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)
    return name in WRITES_IN_PLACE or (method in ("write_text", "write_bytes", "rename") and len(call.args) == 1)


def may_write(file: Path) -> bool:
    """Whether a file of the package is one of WRITES, or measures."""
    below = file.relative_to(ROOT).as_posix().removeprefix("mopd_dataplane/")
    return below in WRITES or below.startswith("bench/")


def test_every_exception_of_writing_is_needed() -> None:
    """A file that writes no more in place leaves the list."""
    for below in WRITES:
        file = ROOT / "mopd_dataplane" / below
        calls = (node for node in ast.walk(parse(file)) if isinstance(node, ast.Call))
        assert any(writes_in_place(call, ast.unparse(call.func)) for call in calls), below


def breaches(file: Path, tree: ast.Module) -> Iterator[str]:
    """Every breach in one file, as `line: what`."""
    stage = file.relative_to(ROOT).parts[1]
    for_types = type_only_lines(tree)
    for line, module in imported(tree):
        root, _, rest = module.partition(".")
        if root in UNSAFE_MODULES:
            yield f"{line}: imports {root}"
        if root in ("lance", "lancedb") and stage not in LANCE_ALLOWED and line not in for_types:
            yield f"{line}: imports lance"
        other = rest.partition(".")[0]
        strange = {*STAGES, "run", "cli"} - {stage, *(b for a, b in NEIGHBOURS_ALLOWED if a == stage)}
        if root == "mopd_dataplane" and stage in STAGES and other in strange and file.name != "__main__.py":
            yield f"{line}: stage {stage} imports {other}"
        if root == "mopd_dataplane" and file.is_relative_to(ROOT / "kernels"):
            yield f"{line}: a kernel imports mopd_dataplane"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in UNSAFE_CALLS:
                yield f"{node.lineno}: calls {name}"
            if writes_in_place(node, name) and not may_write(file):
                yield f"{node.lineno}: {name} writes in place"
            if waits_for_ever(node, name):
                yield f"{node.lineno}: {name} waits without a deadline"
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in UNSAFE_ARGUMENTS and not is_off:
                    yield f"{node.lineno}: passes {keyword.arg}="
        if isinstance(node, ast.Attribute) and node.attr in ("AF_INET", "AF_INET6"):
            yield f"{node.lineno}: opens a network socket"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{node.lineno}: catches everything"


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_file_keeps_the_rules(file: Path) -> None:
    tree = parse(file)
    assert list(breaches(file, tree)) == []
    assert ast.get_docstring(tree), "a module docstring says what the file is for"
    assert len(file.read_text().splitlines()) <= 500, "a file fits in the head"


@pytest.mark.parametrize(
    ("code", "breach"),
    [
        ("import pickle", "imports pickle"),
        ("from lance import dataset", "imports lance"),
        ("def f():\n    from mopd_dataplane.store.dataset import Store", "stage plan imports store"),
        ("import mopd_dataplane.run.pipeline", "stage plan imports run"),
        ("eval('1')", "calls eval"),
        ("torch.load(path)", "calls torch.load"),
        ("path.write_text(page)", "path.write_text writes in place"),
        ("open(path, 'w')", "open writes in place"),
        ("staging.rename(target)", "staging.rename writes in place"),
        ("run('ls', shell=True)", "passes shell="),
        ("socket.socket(socket.AF_INET)", "opens a network socket"),
        ("process.wait()", "process.wait waits without a deadline"),
        ("condition.wait_for(ready)", "condition.wait_for waits without a deadline"),
        ("subprocess.run(command, check=True)", "subprocess.run waits without a deadline"),
        ("fcntl.flock(lock, fcntl.LOCK_EX)", "fcntl.flock waits without a deadline"),
        ("try:\n    pass\nexcept:\n    pass", "catches everything"),
    ],
)
def test_each_rule_catches_its_breach(code: str, breach: str) -> None:
    file = ROOT / "mopd_dataplane" / "plan" / "sample.py"
    assert [message.partition(": ")[2] for message in breaches(file, ast.parse(code))] == [breach]


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_docstrings_say_what_the_thing_is(file: Path) -> None:
    """A hover shows one docstring alone: "Of …", "The same …" and "See the module" mean nothing there."""
    vague = re.findall(r'^\s*"""(?:Of|The same|See the module)\b.*', file.read_text(), re.MULTILINE)
    assert vague == []


LINES, PARAMETERS = 80, 12


def too_large(file: Path, tree: ast.Module) -> Iterator[str]:
    """Functions over LINES lines or PARAMETERS parameters. The parameters of a command are its options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in parameters if name not in ("self", "cls")])
            if (node.end_lineno or 0) - node.lineno >= LINES or (count > PARAMETERS and "cli" not in file.parts):
                yield f"{relative(file)}: {node.name}"


def test_functions_fit_in_the_head() -> None:
    files = [file for file in SOURCES if file.is_relative_to(ROOT / "mopd_dataplane")]
    assert [name for file in files for name in too_large(file, parse(file))] == []


@pytest.mark.parametrize(
    "code", ["def f(" + ", ".join(f"a{index}" for index in range(13)) + "): ...", "def f():\n" + "    x = 1\n" * 80]
)
def test_the_rule_of_sizes_catches_its_breach(code: str) -> None:
    assert len(list(too_large(ROOT / "mopd_dataplane" / "plan" / "sample.py", ast.parse(code)))) == 1
