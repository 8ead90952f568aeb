"""Files by URL: read, listed, copied and written whole, on a real web server, a real object store, and in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from mopd_dataplane import Store, create_store, load_job
from mopd_dataplane.base import file_urls
from mopd_dataplane.cli.app import app
from mopd_dataplane.errors import DeadlineError, InputError, JobFileError, ResourceError, UnknownNameError
from mopd_dataplane.interchange.row_files import read_rows
from mopd_dataplane.job.read import read_job
from mopd_dataplane.job.sections import Domain
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.prompts import load_prompts

ROWS = [{"input": f"{i} + 1 =", "output": f" {i + 1}", "gts": str(i + 1), "score": 1.0, "step": 3} for i in range(4)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(URL, folder) of a web server on the loopback interface; it knows no byte ranges."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder
    server.shutdown()
    server.server_close()


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder of fsspec's memory, empty."""
    system = fsspec.filesystem("memory")
    root = f"/{request.node.originalname}"
    yield f"memory:/{root}"
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> str:
    """A place to write to, of each kind."""
    if request.param == "memory":
        return str(request.getfixturevalue("memory"))
    return str(request.getfixturevalue("s3"))


def test_what_is_written_is_read_listed_and_replaced(root: str) -> None:
    assert not file_urls.exists(f"{root}/a/10.jsonl")
    for name, content in (("10.jsonl", b"ten"), ("9.jsonl", b"nine"), ("note.txt", b"no"), ("deep/2.jsonl", b"two")):
        file_urls.write_file(f"{root}/a/{name}", content)
    assert file_urls.read_file(f"{root}/a/10.jsonl") == b"ten"
    assert file_urls.read_file(f"{root}/a/10.jsonl", most=1) == b"te"
    below = [url.rpartition("/a/")[2] for url in file_urls.files_at(f"{root}/a", (".jsonl",))]
    assert below == ["9.jsonl", "deep/2.jsonl", "10.jsonl"]
    [nine] = file_urls.files_at(f"{root}/a/?.jsonl", (".jsonl",))
    assert file_urls.read_file(nine) == b"nine"
    file_urls.write_file(f"{root}/a/10.jsonl", b"other")
    assert file_urls.read_file(f"{root}/a/10.jsonl") == b"other"
    with pytest.raises(UnknownNameError, match="nothing at"):
        file_urls.read_file(f"{root}/a/none")
    with pytest.raises(InputError, match="exists"):
        file_urls.check_new(f"{root}/a/10.jsonl")
    with pytest.raises(InputError, match=r"no \.parquet file"):
        file_urls.files_at(f"{root}/a", (".parquet",))


def test_a_rollout_dump_comes_from_a_url_and_samples_leave_by_one(root: str, tmp_path: Path, tokenizer: Path) -> None:
    file_urls.write_file(f"{root}/dump/3.jsonl", LINES)
    for name in sorted(tokenizer.iterdir()):
        file_urls.write_file(f"{root}/model/{name.name}", name.read_bytes())
    store = create_store(str(tmp_path / "store"))
    options = ["--store", store.uri, "--stage", "student", "--domain", "sums", "--json"]
    run = CliRunner().invoke(app, ["import", "verl", f"{root}/dump", "--tokenizer", f"{root}/model", *options])
    assert run.exit_code == 0, run.output
    assert len(store.samples(["uid"])) == len(ROWS)
    for kind in ("parquet", "jsonl"):
        run = CliRunner().invoke(app, ["export", store.uri, f"{root}/out.{kind}", "--format", kind])
        assert run.exit_code == 0, run.output
        copy = create_store(str(tmp_path / kind))
        run = CliRunner().invoke(
            app,
            ["import", "plain", f"{root}/out.{kind}", "--tokenizer", str(tokenizer), "--store", copy.uri],
        )
        assert run.exit_code == 0, run.output
        assert copy.samples(["uid"]) == store.samples(["uid"])
    again = CliRunner().invoke(app, ["export", store.uri, f"{root}/out.jsonl", "--format", "jsonl"])
    assert again.exit_code == 2


def test_a_folder_goes_out_whole(root: str, tmp_path: Path) -> None:
    with file_urls.scratch_beside(f"{root}/folder") as scratch:
        (scratch / "made" / "deep").mkdir(parents=True)
        (scratch / "made" / "deep" / "data.arrow").write_bytes(b"data")
        (scratch / "made" / "state.json").write_bytes(b"{}")
        file_urls.publish_new(scratch / "made", f"{root}/folder")
    with file_urls.local_copy(f"{root}/folder") as copy:
        assert (copy / "deep" / "data.arrow").read_bytes() == b"data"
        assert (copy / "state.json").read_bytes() == b"{}"
    assert not copy.exists()


def test_a_job_file_extends_another_behind_the_same_url(root: str) -> None:
    text = (Path(__file__).parents[2] / "jobs" / "quickstart" / "job.toml").read_bytes()
    file_urls.write_file(f"{root}/jobs/first/job.toml", text)
    child = b'extends = { job = "../first", stages = ["base"] }\nstore = "elsewhere"\n'
    file_urls.write_file(f"{root}/jobs/second/job.toml", child)
    job = load_job(f"{root}/jobs/second")
    assert (job.store, [stage.name for stage in job.stages]) == ("elsewhere", ["base"])
    file_urls.write_file(f"{root}/jobs/wrong.toml", b"trian = 1\n" + text)
    with pytest.raises(JobFileError, match=r"wrong\.toml, line 1: unknown key `trian`"):
        load_job(f"{root}/jobs/wrong.toml")


def test_prompts_come_from_every_file_a_pattern_fits(root: str) -> None:
    for part in range(3):
        file_urls.write_file(f"{root}/part-{part}.jsonl", json.dumps({"text": f"{part}?", "answer": "x"}).encode())
    prompts = load_prompts("sums", Domain(source=f"{root}/part-*.jsonl", train=3))
    assert [prompt.text for prompt in prompts] == ["0?", "1?", "2?"]


@pytest.mark.slow
def test_a_report_goes_to_a_url(root: str, demo_store: Store) -> None:
    run = CliRunner().invoke(app, ["report", demo_store.uri, "-o", f"{root}/report.html"])
    assert run.exit_code == 0, run.output
    assert file_urls.read_file(f"{root}/report.html").startswith(b"<!doctype html>")


def test_a_model_of_a_url_is_downloaded_once(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file_urls.write_file(f"{root}/model/config.json", b"{}")
    folder = model_folder(f"{root}/model")
    assert (folder / "config.json").read_bytes() == b"{}"
    (folder / "config.json").write_bytes(b"mark")
    assert (file_urls.kept_copy(f"{root}/model", folder.parent) / "config.json").read_bytes() == b"mark"
    file_urls.write_file(f"{root}/model/config.json", b'{"a": 1}')
    fresh = file_urls.kept_copy(f"{root}/model", folder.parent)
    assert (fresh / "config.json").read_bytes() == b'{"a": 1}'


def test_a_web_server_is_read_and_never_written(web: tuple[str, Path]) -> None:
    url, folder = web
    (folder / "prompts.jsonl").write_text('{"text": "a?", "answer": "b"}\n')
    (folder / "dump.jsonl").write_bytes(LINES)
    [prompt] = load_prompts("sums", Domain(source=f"{url}/prompts.jsonl", train=1))
    assert (prompt.text, prompt.answer) == ("a?", "b")
    assert file_urls.read_file(f"{url}/dump.jsonl") == LINES
    assert len(list(read_rows(f"{url}/dump.jsonl"))) == len(LINES.splitlines())
    (folder / "job.toml").write_text('name = "far"\n')
    assert read_job(f"{url}/job.toml", [])[0]["name"] == "far"
    with pytest.raises(UnknownNameError, match="nothing at"):
        file_urls.read_file(f"{url}/none.jsonl")
    with pytest.raises(InputError, match="http:// can only be read"):
        file_urls.write_file(f"{url}/x", b"")
    assert sorted(file.name for file in folder.iterdir()) == ["dump.jsonl", "job.toml", "prompts.jsonl"]


def test_a_model_over_http_is_refused_with_what_works(web: tuple[str, Path]) -> None:
    url, folder = web
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_bytes(b"{}")
    with pytest.raises(InputError, match=r"http lists none; download it .* s3://"):
        model_folder(f"{url}/model")


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ResourceError, match="its server fails"):
        file_urls.read_file("http://127.0.0.1:9/x")


@pytest.mark.parametrize("host", ["127.0.0.1:9", "host.invalid"])
def test_a_server_of_another_protocol_that_is_not_there_is_named(host: str) -> None:
    url = f"ftp://{host}/rows.jsonl"
    for use in (file_urls.read_file, model_folder, lambda url: file_urls.files_at(url, [".jsonl"])):
        with pytest.raises(DeadlineError, match=rf"{url}: no server answers \(.+\); check the name"):
            use(url)


def test_credentials_and_unknown_protocols_are_refused() -> None:
    with pytest.raises(InputError, match="must not carry") as refused:
        file_urls.read_file("https://me:verysecret@host/x")
    assert "verysecret" not in str(refused.value)
    with pytest.raises(InputError, match=r"nothing here opens nosuch://.*give a path, or a URL that begins with hf://"):
        file_urls.read_file("nosuch://x/y")


def test_a_write_that_breaks_off_leaves_the_old_file(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system has no whole writes, the content arrives beside its name."""
    monkeypatch.setattr(file_urls, "_WHOLE_WRITES", ())
    file_urls.write_file(f"{memory}/a", b"old")
    system = fsspec.filesystem("memory")

    def broken(*args: object) -> None:
        raise OSError("the line is cut")

    monkeypatch.setattr(type(system), "mv", broken)
    with pytest.raises(OSError, match="the line is cut"):
        file_urls.write_file(f"{memory}/a", b"new")
    assert [name.rpartition("/")[2] for name in system.find(memory.removeprefix("memory:/"))] == ["a"]
    assert file_urls.read_file(f"{memory}/a") == b"old"
