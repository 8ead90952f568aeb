"""Teachers in vLLM say what the same teachers say in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import TOLERANCE
from peft_adapters import write_adapter
from serving import Server, serving

from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.records import Signal
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec
from mopd_dataplane.score.vllm_states import ExtractingReader

KINDS = ("logprob", "topk", "hidden")
SETTINGS = sections.Score(hidden_codec="fp32", topk=5)


@pytest.fixture(scope="module")
def samples() -> list[Scorable]:
    """Texts of very different length, sampled at two temperatures, with holes in the mask."""
    rng = np.random.default_rng(0)
    scorables = []
    for i in range(9):
        prompt, response = int(rng.integers(1, 40)), int(rng.integers(2, 300 if i == 3 else 60))
        mask = np.ones(response, np.uint8)
        mask[: response // 5] = 0
        tokens = rng.integers(4, 100, prompt + response).astype(np.int32)
        scorables.append(
            Scorable(
                uid=f"{i:032x}", sample_row=i, prompt_id=str(i), prompt_len=prompt, tokens=tokens, loss_mask=mask,
                temperature=0.7 if i % 3 == 0 else 1.0,
            )
        )  # fmt: skip
    return scorables


def pool_of(folder: Path, root: Path, url: str = "", **settings: Any) -> TeacherPool:
    """A pool of one registered teacher."""
    tokenizer = load_tokenizer(folder)
    spec = TeacherSpec(folder, sections.Teacher(source=str(folder), url=url))
    pool = TeacherPool({"teacher": spec}, student_tokenizer=tokenizer, **settings)
    assert pool.register("teacher", root).norm_placement == "post"
    return pool


def scored(
    pool: TeacherPool, samples: list[Scorable], settings: sections.Score = SETTINGS, *, teacher: str = "teacher"
) -> dict[Any, Signal]:
    """Every signal by uid and kind."""
    kinds = KINDS[:2] if settings.reads == "prompt_logprobs" else KINDS
    return {(s.uid, s.kind): s for s in score_samples(pool, teacher, kinds, samples, settings)}


def assert_same(ours: dict[Any, Signal], theirs: dict[Any, Signal]) -> None:
    """The same signals within float tolerance."""
    assert ours.keys() == theirs.keys()
    for key, signal in ours.items():
        other = theirs[key]
        if signal.kind == "logprob":
            np.testing.assert_allclose(signal.logprob, other.logprob, atol=TOLERANCE)
        elif signal.kind == "topk":
            np.testing.assert_array_equal(signal.topk_ids, other.topk_ids)
            np.testing.assert_allclose(signal.topk_logprobs, other.topk_logprobs, atol=TOLERANCE)
        else:
            mine, his = (np.ascontiguousarray(s.hidden).view("<f4") for s in (signal, other))
            np.testing.assert_allclose(mine, his, atol=TOLERANCE)


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path], samples: list[Scorable], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers says."""
    return scored(pool_of(models[0], tmp_path_factory.mktemp("hf")), samples)


def test_states_of_vllm_on_this_machine(
    models: tuple[Path, Path], samples: list[Scorable], expected: Any, tmp_path: Path
) -> None:
    with closing(pool_of(models[0], tmp_path, engine="vllm")) as pool:
        assert_same(scored(pool, samples), expected)


def test_states_that_vllm_writes_out_before_its_final_norm(
    models: tuple[Path, Path], samples: list[Scorable], expected: Any, tmp_path: Path
) -> None:
    extracted = SETTINGS.model_copy(update={"engine": "vllm", "reads": "extract_hidden_states"})
    with closing(pool_of(models[0], tmp_path, engine="vllm", reads="extract_hidden_states")) as pool:
        assert_same(scored(pool, samples, extracted), expected)
        assert_same(scored(pool, samples, extracted), expected)
        reader = pool.reader("teacher")
        assert isinstance(reader, ExtractingReader)
        files = Path(reader._files.name)
        assert not list(files.iterdir()), "read states take no more room"
    assert not files.exists()


def at_one(samples: list[Scorable]) -> list[Scorable]:
    """The samples that were drawn at temperature 1."""
    return [sample for sample in samples if sample.temperature == 1]


def said(expected: dict[Any, Signal], samples: list[Scorable]) -> dict[Any, Signal]:
    """What of the expected signals follows from log-probs of text."""
    uids = {sample.uid for sample in at_one(samples)}
    return {key: signal for key, signal in expected.items() if key[0] in uids and key[1] != "hidden"}


LOGPROBS = SETTINGS.model_copy(update={"engine": "vllm", "reads": "prompt_logprobs"})


def test_logprobs_of_vllm_on_this_machine(
    models: tuple[Path, Path], samples: list[Scorable], expected: Any, tmp_path: Path
) -> None:
    with closing(pool_of(models[0], tmp_path, engine="vllm", reads="prompt_logprobs")) as pool:
        assert_same(scored(pool, at_one(samples), LOGPROBS), said(expected, samples))
        with pytest.raises(MismatchError, match=r"temperature 0\.7"):
            scored(pool, samples, LOGPROBS)
        with pytest.raises(MismatchError, match="cannot produce hidden signals"):
            next(score_samples(pool, "teacher", ["hidden"], samples, LOGPROBS))


def test_logprobs_of_a_server(
    models: tuple[Path, Path], samples: list[Scorable], expected: Any, tmp_path: Path
) -> None:
    with serving(models[0]) as server:
        pool = pool_of(models[0], tmp_path, server.url, engine="vllm", reads="prompt_logprobs")
        with closing(pool):
            assert_same(scored(pool, at_one(samples), LOGPROBS), said(expected, samples))
            with pytest.raises(EngineError, match="logprobs"):
                scored(pool, at_one(samples), LOGPROBS.model_copy(update={"topk": 64}))


@pytest.fixture(scope="module")
def pooling_server(models: tuple[Path, Path]) -> Iterator[Server]:
    """A server of states."""
    flags = ("--runner", "pooling", "--convert", "embed")
    settings = '{"task": "token_embed", "use_activation": false}'
    with serving(models[0], *flags, "--pooler-config", settings) as running:
        yield running


def test_states_of_a_server(
    pooling_server: Server, models: tuple[Path, Path], samples: list[Scorable], expected: Any, tmp_path: Path
) -> None:
    with closing(pool_of(models[0], tmp_path, pooling_server.url, engine="vllm")) as pool:
        assert_same(scored(pool, samples), expected)


def test_a_server_of_another_teacher_is_refused(
    pooling_server: Server, models: tuple[Path, Path], samples: list[Scorable], tmp_path: Path
) -> None:
    pool = pool_of(models[1], tmp_path, pooling_server.url, engine="vllm")
    with pytest.raises(MismatchError, match="this run needs"):
        scored(pool, samples)


def test_a_server_that_dies_is_an_engine_error(
    pooling_server: Server, models: tuple[Path, Path], samples: list[Scorable], tmp_path: Path
) -> None:
    """Runs last: the server is gone afterwards."""
    with closing(pool_of(models[0], tmp_path, pooling_server.url, engine="vllm")) as pool:
        pool.reader("teacher")
        pooling_server.kill()
        with pytest.raises(EngineError, match="does not answer"):
            scored(pool, samples)


def adapter_pool(adapters: tuple[Path, ...], root: Path, url: str = "", **settings: Any) -> TeacherPool:
    """A pool of registered teachers that are adapters on one base."""
    tokenizer = load_tokenizer(adapters[0])
    specs = {
        f"t{number}": TeacherSpec(folder, sections.Teacher(source=str(folder), url=url))
        for number, folder in enumerate(adapters)
    }
    pool = TeacherPool(specs, student_tokenizer=tokenizer, **settings)
    heads = {pool.register(name, root).head_file for name in specs}
    assert len(heads) == 1
    assert next(iter(heads)).startswith("heads/base-")
    return pool


def scored_by_all(pool: TeacherPool, samples: list[Scorable], settings: sections.Score) -> dict[Any, Signal]:
    """Every signal of every teacher, teacher after teacher."""
    return {
        (name, *key): signal
        for name in ("t0", "t1")
        for key, signal in scored(pool, samples, settings, teacher=name).items()
    }


@pytest.fixture(scope="module")
def expected_of_adapters(
    adapters: tuple[Path, Path], samples: list[Scorable], tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, Signal]:
    """What transformers says with each adapter."""
    return scored_by_all(adapter_pool(adapters, tmp_path_factory.mktemp("hf")), samples, SETTINGS)


@pytest.mark.parametrize("reads", ["states", "extract_hidden_states", "prompt_logprobs"])
def test_adapters_on_one_base_score_in_one_vllm_as_they_do_in_transformers(
    adapters: tuple[Path, Path], samples: list[Scorable], expected_of_adapters: Any, tmp_path: Path, reads: Any
) -> None:
    settings = SETTINGS.model_copy(update={"engine": "vllm", "reads": reads})
    texts, due = samples, expected_of_adapters
    if reads == "prompt_logprobs":
        texts = at_one(samples)
        uids = {sample.uid for sample in texts}
        due = {key: signal for key, signal in due.items() if key[1] in uids and key[2] != "hidden"}
    with closing(adapter_pool(adapters, tmp_path, engine="vllm", reads=reads)) as pool:
        assert_same(scored_by_all(pool, texts, settings), due)
        assert list(pool.loads.values()) == [1], "the base is read once for both"
        assert (pool.resident, pool.switches) == (("t0", "t1"), 2)
        assert_same(scored_by_all(pool, texts, settings), due)
        assert list(pool.loads.values()) == [1]


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_an_adapter_may_change_the_embedding_or_the_head_which_is_applied_here(
    models: tuple[Path, Path], samples: list[Scorable], tmp_path: Path, end: str
) -> None:
    folder = write_adapter(models[0], tmp_path / "adapter", target_modules=["v_proj", end])
    due = scored(pool_of(folder, tmp_path / "hf"), samples)
    with closing(pool_of(folder, tmp_path / "vllm", engine="vllm")) as pool:
        assert_same(scored(pool, samples), due)
    with pytest.raises(MismatchError, match=r'outside the numbered layers.*score\.reads = "states"'):
        pool_of(folder, tmp_path / "third", engine="vllm", reads="prompt_logprobs")


def test_adapters_behind_one_pooling_server(
    models: tuple[Path, Path], adapters: tuple[Path, Path], samples: list[Scorable], expected_of_adapters: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    flags = ("--runner", "pooling", "--convert", "embed", "--enable-lora", "--max-lora-rank", "8")
    settings = '{"task": "token_embed", "use_activation": false}'
    started = serving(models[0], *flags, "--pooler-config", settings, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True")
    with started as server, closing(adapter_pool(adapters, tmp_path, server.url, engine="vllm")) as pool:
        assert_same(scored_by_all(pool, samples, SETTINGS), expected_of_adapters)
    with pytest.raises(MismatchError, match=r"as the server at .* is by default"):
        adapter_pool(adapters, tmp_path, server.url, engine="vllm", reads="prompt_logprobs")
