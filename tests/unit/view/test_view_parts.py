"""Parts of the viewer that stand alone: decoding of states, the script of an export, exports as files."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from mopd_kernels import decode, encode
from safetensors.numpy import save_file

from mopd_dataplane import Store
from mopd_dataplane.errors import DamagedError, InputError
from mopd_dataplane.query.heads import decode_row, head_logits
from mopd_dataplane.view import bundle
from mopd_dataplane.view.export import export_folder, export_sample
from mopd_dataplane.view.prompt import difference
from mopd_dataplane.view.shown import Shown


@pytest.mark.filterwarnings("ignore::mopd_kernels.codecs.LossyCodecWarning")
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "fp8", "mxfp4"])
@pytest.mark.parametrize("width", [64, 200, 576])
def test_a_row_decodes_as_the_kernels_decode_it(codec: str, width: int) -> None:
    states = torch.randn(5, width, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 5)[:, None]
    encoded = encode(states, codec, backend="torch")
    expected = decode(encoded, codec, width, torch.float32, backend="torch").numpy()
    for row in range(5):
        np.testing.assert_allclose(decode_row(encoded[row].numpy(), codec, width), expected[row], rtol=1e-6, atol=1e-7)


def test_logits_of_a_head_with_bias_scale_and_softcap(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    weight, bias = noise.normal(size=(50, 8)).astype(np.float32), noise.normal(size=50).astype(np.float32)
    state = noise.normal(size=8).astype(np.float32)
    file = tmp_path / "head.safetensors"
    save_file({"weight": weight, "bias": bias}, file, metadata={"logit_scale": "0.5", "logit_softcap": "2.0"})
    expected = np.tanh((weight @ state + bias) * 0.5 / 2.0) * 2.0
    np.testing.assert_allclose(head_logits(file, state), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(DamagedError, match="9"):
        head_logits(file, np.zeros(9, np.float32))
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DamagedError):
        head_logits(file, state)


def test_differences_rebuild_the_other_answer() -> None:
    noise = np.random.default_rng(1)
    for _ in range(50):
        a = noise.integers(0, 5, noise.integers(0, 30)).tolist()
        b = noise.integers(0, 5, noise.integers(0, 30)).tolist()
        parts = difference(a, b)
        assert list(chain.from_iterable(a[i:j] for _, i, j, _, _ in parts)) == a
        assert list(chain.from_iterable(b[k:m] for *_, k, m in parts)) == b
        assert all(a[i:j] == b[k:m] for tag, i, j, k, m in parts if tag == "equal")


def test_the_script_of_an_export_has_every_module_once() -> None:
    script = bundle.script()
    names = re.findall(r"^const of_(\w+) = \(\(\) => \{$", script, re.MULTILINE)
    assert sorted(names) == sorted(file.stem for file in bundle.ASSETS.glob("*.js")), "a module that nothing imports"
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)


def test_modules_in_another_form_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "uPlot.iife.min.js").write_text("")
    (tmp_path / "main.js").write_text('import * as x from "./x.js";\n')
    with pytest.raises(InputError, match=r"main\.js"):
        bundle.script(tmp_path)
    (tmp_path / "main.js").write_text('import { x } from "./other.js";\n')
    (tmp_path / "other.js").write_text('import { y } from "./main.js";\n')
    with pytest.raises(InputError, match="circle"):
        bundle.script(tmp_path)


def test_assets_ask_nothing_of_the_network() -> None:
    for file in bundle.ASSETS.rglob("*.*"):
        text = file.read_text()
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert "vendor" in file.parts or not urls, f"{file.name}: {urls}"
        assert "innerHTML" not in text or "vendor" in file.parts, f"{file.name} makes markup of text"


def test_an_export_holds_what_was_chosen(demo_store: Store, tmp_path: Path) -> None:
    done = export_folder(Shown(demo_store), tmp_path / "out", where="domain = 'chain_sum'", order="-kl", limit=5)
    assert done.samples == 5
    texts = [file.read_text() for file in (tmp_path / "out" / "data").iterdir()]
    assert sum(text.startswith('mopdData("sample/') for text in texts) == 5
    assert not any("<script" in text for text in texts)
    again = export_folder(Shown(demo_store), tmp_path / "out", where="", order="", limit=1)
    assert again.samples == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not an export"):
        export_folder(Shown(demo_store), tmp_path / "mine", where="", order="", limit=1)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_one_sample_is_one_file_without_a_way_out_of_its_script(demo_store: Store, tmp_path: Path) -> None:
    uid = demo_store.sql("select uid from samples where interruptions > 0 limit 1")["uid"][0].as_py()
    done = export_sample(Shown(demo_store), tmp_path / "one.html", uid)
    page = (tmp_path / "one.html").read_text()
    assert done.bytes == len(page.encode())
    assert page.count("<script>") == 1
    assert page.count("</script>") == 1
    assert "connect-src" not in page
    assert "default-src 'none'" in page
    data = json.loads(re.search(r"window\.mopdFiles = \{keys: \{\}, start: .*?, data: (.*)\};\n", page)[1])
    assert "<script>alert(1)</script>" in "".join(data[f"sample/{uid}"]["pieces"])
