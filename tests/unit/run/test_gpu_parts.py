"""`make gpu`, rehearsed on a CPU: every part runs, writes its figures, and the page follows; nothing is published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mopd_dataplane.bench import gpu, gpu_parts

ROOT = Path(__file__).parents[3]


def test_the_published_page_is_what_was_run() -> None:
    assert gpu.PAGE.read_text() == gpu.render(gpu.PAGE.parent / gpu.RAW)


def test_a_part_is_rehearsed_and_written(tmp_path: Path) -> None:
    gpu.run(["sampler"], device="cpu", small=True, page=tmp_path / "gpu.md")
    assert all(json.loads((tmp_path / gpu.RAW / "sampler.json").read_text())["figures"].values())
    page = (tmp_path / "gpu.md").read_text()
    assert "figures mean nothing" in page
    assert page.count("**never run**") == 7, "all others"


@pytest.mark.slow
def test_all_parts_are_rehearsed_and_written_as_they_end(tmp_path: Path) -> None:
    parts = ["kernels", "attention", "sampler", "step", "engine", "score", "smollm2"]
    gpu.run(parts, device="cpu", small=True, page=tmp_path / "gpu.md")
    results = {name: json.loads((tmp_path / gpu.RAW / f"{name}.json").read_text()) for name in parts}
    for name in parts[:-1]:
        assert "figures" in results[name], results[name]
        assert all(value for value in results[name]["figures"].values()), results[name]
    page = (tmp_path / "gpu.md").read_text()
    assert "figures mean nothing" in page
    assert "| reverse | trained | fwd+bwd |" in page
    assert "error goals met | 18 of 18" in page
    assert page.count("**never run**") == 1, "the loader, which was not asked for"


@pytest.mark.slow
def test_the_loaders_part_is_rehearsed(tmp_path: Path) -> None:
    gpu.run(["loader"], device="cpu", small=True, page=tmp_path / "gpu.md")
    assert "tokens_per_s" in json.loads((tmp_path / gpu.RAW / "loader.json").read_text())["figures"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kernels", "sampler"])
def test_kernels_and_sampler_need_torch_and_triton_only(part: str) -> None:
    """In a process that finds none of the other packages."""
    others = ["pyarrow", "lance", "pydantic", "transformers", "safetensors", "tokenizers", "rich", "typer", "duckdb"]
    code = (
        f"import sys; sys.modules |= dict.fromkeys({others!r})\n"
        f"from mopd_dataplane.bench import gpu_parts; gpu_parts.main([{part!r}, 'cpu', 'small'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert "figures" in json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mopd_dataplane.rollout.engines.hf", None)
    monkeypatch.setattr(gpu_parts, "_machine", lambda device: "here")
    gpu_parts.main(["engine", "cpu", "small"])
    assert json.loads(capsys.readouterr().out) == {"not_run": "mopd_dataplane.rollout.engines.hf missing"}


def test_a_part_that_takes_too_long_or_fails_says_so_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.run(["sampler"], device="cpu", small=True, page=tmp_path / "late.md", limit_s=0.01)
    assert "took longer than 0.01 s" in (tmp_path / "late.md").read_text()
    gpu.run(["sampler"], device="nowhere", small=True, page=tmp_path / "wrong.md")
    assert "exit code 1" in (tmp_path / "wrong.md").read_text()


def test_all_parts_fit_a_quarter_of_an_hour() -> None:
    """With the start of the machine."""
    assert sum(gpu.LIMITS_S.values()) <= 12 * 60


def test_a_rehearsal_is_not_published(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--device", "cpu"], ["--parts", "kernel"]):
        monkeypatch.setattr(sys, "argv", ["gpu", *words])
        with pytest.raises(SystemExit):
            gpu.main()
    assert "parts are kernels, attention" in capsys.readouterr().err


def test_operations_of_a_step_are_counted() -> None:
    """By hand for one layer: 6 a weight and token, and the head."""
    config = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), 1)
    config |= {"head_dim": 1, "num_hidden_layers": 1, "vocab_size": 10}
    assert gpu_parts.step_flops(config, tokens=5, trained=2, pairs=25) == 6 * 7 * 5 + 6 * 25 + 8 * 10 * 2
