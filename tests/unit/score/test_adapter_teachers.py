"""Teachers that are adapters: many on one base in memory, each scoring as its merged form does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import TINY
from peft import LoraConfig, get_peft_model

from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.models.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.score.readers import TeacherForward
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

AdapterMaker = Callable[..., Path]
IDS = [np.arange(5, 40)]
PREDICTED = [np.arange(10, 35)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TINY | {"tie_word_embeddings": False}
    return make_student(sections.Student(config=config), tmp_path_factory.mktemp("base") / "base", seed=0)


@pytest.fixture(scope="module")
def make_adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterMaker:
    """An adapter as peft itself writes one, with factors that change what the base says."""

    def make(seed: int = 1, on: Path = base, **settings: Any) -> Path:
        torch.manual_seed(seed)
        config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
        model = get_peft_model(hf.load_model(on), LoraConfig(**config))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        folder = tmp_path_factory.mktemp("adapter")
        model.peft_config["default"].base_model_name_or_path = str(on)
        model.save_pretrained(folder)
        return folder

    return make


def pool_of(folders: dict[str, Path], base: Path, **changes: Any) -> TeacherPool:
    settings = changes.pop("settings", {})
    return TeacherPool(
        {
            name: TeacherSpec(folder, sections.Teacher(source=str(folder), **settings))
            for name, folder in folders.items()
        },
        student_tokenizer=hf.load_tokenizer(base),
        **changes,
    )


def logprobs(forward: TeacherForward) -> torch.Tensor:
    with torch.no_grad():
        states, head = forward.states(IDS, PREDICTED), forward.head
        return (states @ head.weight.T).log_softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"r": 8, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"]},
        {"use_rslora": True},
        {"use_dora": True},
        {"target_modules": ["v_proj", "lm_head"]},
        {"r": 8, "rank_pattern": {"q_proj": 2}, "layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]},
    ],
    ids=["all", "some", "rslora", "dora", "head", "pattern"],
)
def test_an_adapter_scores_as_what_peft_merges(
    base: Path, make_adapter: AdapterMaker, tmp_path: Path, settings: dict[str, Any]
) -> None:
    from peft import PeftModel

    folder = make_adapter(**settings)
    merged = PeftModel.from_pretrained(hf.load_model(base), folder).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    hf.copy_tokenizer(base, tmp_path / "merged")
    pool = pool_of({"adapter": folder, "merged": tmp_path / "merged", "base": base}, base, max_resident=3)
    # W x + s B (A x) and (W + s B A) x round at other places: some 1e-7 a product, through two layers.
    torch.testing.assert_close(logprobs(pool.teacher("adapter")), logprobs(pool.teacher("merged")), rtol=0, atol=5e-5)
    assert (logprobs(pool.teacher("base")) - logprobs(pool.teacher("merged"))).abs().max() > 0.05
    ours = hf.load_merged(folder).state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)


def test_adapters_share_a_base_that_is_loaded_once(base: Path, make_adapter: AdapterMaker, tmp_path: Path) -> None:
    folders = {f"t{seed}": make_adapter(seed) for seed in range(3)}
    pool = pool_of(folders, base)
    apart = {name: logprobs(pool_of({name: folder}, base).teacher(name)) for name, folder in folders.items()}
    for name in ("t0", "t1", "t2", "t0"):
        assert torch.equal(logprobs(pool.teacher(name)), apart[name])
    assert list(pool.loads.values()) == [1]
    assert pool.resident == ("t0", "t1", "t2")
    assert pool.switches == 4
    assert not torch.equal(apart["t0"], apart["t1"])
    records = [pool.register(name, tmp_path) for name in folders]
    assert len({record.weights_digest for record in records}) == 3
    assert hf.weights_digest(base) not in {record.weights_digest for record in records}
    assert len(list((tmp_path / "heads").iterdir())) == 1
    touched = pool_of({"head": make_adapter(target_modules=["lm_head"])}, base).register("head", tmp_path)
    assert touched.head_file == "heads/head.safetensors"


def test_the_model_holds_one_adapter_of_each_shape(base: Path, make_adapter: AdapterMaker) -> None:
    """Else peft would walk through all of them at every switch: seconds with a hundred."""
    folders = {f"t{seed}": make_adapter(seed) for seed in range(3)}
    folders |= {
        "wide": make_adapter(3, r=8),
        "scaled": make_adapter(4, lora_alpha=2),
        "dora": make_adapter(use_dora=True),
    }
    apart = {name: logprobs(pool_of({name: folder}, base).teacher(name)) for name, folder in folders.items()}
    pool = pool_of(folders, base)
    for name in ("t0", "wide", "t1", "dora", "scaled", "t1", "t2", "wide", "dora", "t0"):
        assert torch.equal(logprobs(pool.teacher(name)), apart[name]), name
    assert len(pool.model("t0").peft_config) == 4


def test_a_blend_of_adapters_fits_where_one_base_does(base: Path, make_adapter: AdapterMaker) -> None:
    folders = {"a": make_adapter(1), "b": make_adapter(2)}
    pool = pool_of(folders, base)
    pool._specs["both"] = TeacherSpec(None, sections.Teacher(blend={"a": 0.5, "b": 0.5}))
    models = [hf.load_merged(folder) for folder in folders.values()]
    with torch.no_grad():
        logits = sum(0.5 * model(torch.from_numpy(IDS[0])[None]).logits[0, 9:34] for model in models)
    torch.testing.assert_close(logprobs(pool.teacher("both")), logits.log_softmax(-1), rtol=0, atol=1e-4)


def test_the_digest_is_of_what_is_computed_and_not_of_places(
    base: Path, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    folder = make_adapter()
    before = hf.weights_digest(folder)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (tmp_path / "elsewhere").symlink_to(base)
    (folder / ADAPTER_CONFIG).write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "elsewhere"), "lora_dropout": 0.3})
    )
    assert hf.weights_digest(folder) == before
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": 9}))
    assert hf.weights_digest(folder) != before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 8}, "adapter of another rank"),
        ({"target_modules": ["q_proj", "nothing"]}, "no module 'nothing'"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' takes the factors' start out of the base"),
        ({"init_lora_weights": "lora_ga"}, "'lora_ga' takes the factors' start out of the base"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    base: Path, make_adapter: AdapterMaker, change: dict[str, Any], said: str
) -> None:
    folder = make_adapter(target_modules=["q_proj"])
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, **change}))
    with pytest.raises(MismatchError, match=said):
        pool_of({"t": folder}, base).teacher("t")


@pytest.mark.parametrize(
    ("settings", "reads", "url", "said"),
    [
        ({"use_dora": True}, "states", "", "use_dora = true.*merged form"),
        ({"rank_pattern": {"q_proj": 1024}}, "states", "", "rank 1024, and vLLM takes at most 512"),
        ({"target_modules": ["v_proj", "lm_head"]}, "prompt_logprobs", "", r"lm_head.*set score\.reads = \"states\""),
        ({}, "prompt_logprobs", "http://127.0.0.1:8000/v1", r"server at http://127.0.0.1:8000/v1.*take out url"),
    ],
    ids=["dora", "rank", "head", "server"],
)
def test_what_vllm_cannot_score_with_is_refused_before_it_starts(
    base: Path, make_adapter: AdapterMaker, settings: dict[str, Any], reads: Any, url: str, said: str
) -> None:
    config = {key: value for key, value in settings.items() if key != "rank_pattern"}
    folder = make_adapter(**config)
    written = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(written | settings))
    with pytest.raises(MismatchError, match=said):
        pool_of({"t": folder}, base, engine="vllm", reads=reads, settings={"url": url})


def test_pickles_quantised_bases_and_tied_heads_are_refused(
    base: Path, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    folder = make_adapter()
    with pytest.raises(MismatchError, match="quantisation"):
        pool_of({"t": folder}, base, settings={"quantisation": "int8"})
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(UnknownNameError, match="pickled"):
        pool_of({"t": folder}, base).teacher("t")
    tied = make_student(sections.Student(config=TINY | {"tie_word_embeddings": True}), tmp_path / "tied", seed=0)
    with pytest.raises(MismatchError, match="one matrix"):
        hf.load_model(make_adapter(on=tied, target_modules=["lm_head"]))
