"""Next steps that messages about models, tokenizers and prompts name: each is taken, and works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from advice import advises
from transformers import AutoConfig

from mopd_dataplane.errors import InputError
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf, render_limits
from mopd_dataplane.models.adapter_files import ADAPTER_CONFIG, read_adapter_config
from mopd_dataplane.models.chat_template import ChatOptions, answer_tokens, render_messages
from mopd_dataplane.models.checkpoint_quantisation import check_trainable
from mopd_dataplane.models.devices import resolve_device
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import character_tokenizer, make_student, student_config
from mopd_dataplane.models.layer_types import LayerTypes
from mopd_dataplane.prompts import load_prompts, render, render_answer

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS = "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"
TOOLS = TEMPLATE + "{% if tools %}{{ tools[0].name }}{% endif %}"
QUESTION = [{"role": "user", "content": "2 + 2"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer."""
    student = sections.Student(config=CONFIG, tokenizer="characters")
    return make_student(student, tmp_path_factory.mktemp("models") / "tiny", seed=0)


def tokenizer(template: str = "") -> Any:
    letters = character_tokenizer()
    letters.chat_template = template or None
    return letters


def test_sizes_of_a_student() -> None:
    def config(**changes: Any) -> Any:
        return student_config(sections.Student(config=CONFIG | changes, tokenizer="characters"))

    with advises("; raise vocab_size"):
        config(vocab_size=7)
    config(vocab_size=500)
    with advises("; give a whole number of 1 or more"):
        config(hidden_size=0)
    with advises("divide; give one of ") as refused:
        config(num_attention_heads=4, num_key_value_heads=3)
    assert str(refused.value).endswith("give one of 1, 2, 4")
    for heads in (1, 2, 4):
        config(num_attention_heads=4, num_key_value_heads=heads)


def test_folders_and_names_of_models(tiny: Path, tmp_path: Path) -> None:
    with advises("; download it and give the folder, or a name of the hub"):
        model_folder("http://127.0.0.1/model")
    with advises("; check the name, give a folder, or download it first where there is a network: hf download "):
        model_folder("nobody/nothing")
    assert model_folder(str(tiny)) == tiny
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    with pytest.raises(InputError, match="copy the model's folder again"):
        hf.load_model(broken)
    shutil.copytree(tiny, broken, dirs_exist_ok=True)
    hf.load_model(broken)
    (broken / "config.json").write_text(json.dumps(CONFIG | {"model_type": "unheard of"}))
    with advises("`save_pretrained` wrote, or copy it again"):
        hf.load_model(broken)
    shutil.copytree(tiny, broken, dirs_exist_ok=True)
    hf.load_model(broken)


def test_adapters_that_cannot_be_read(tmp_path: Path) -> None:
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}

    def read(**changes: Any) -> dict[str, Any]:
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(plain | changes))
        return read_adapter_config(tmp_path)

    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with advises("merge the adapter into its base (peft: merge_and_unload) and give the merged folder"):
        read(bias="all")
    with advises("path_initial_model_for_weight_conversion), or merge it into its base and give the merged folder"):
        read(init_lora_weights="pissa")
    assert read()["r"] == 4


def test_weights_of_a_student(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "gptq"}}))
    with advises("every policy version: give the model in bfloat16"):
        check_trainable(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))
    check_trainable(tmp_path)


def test_devices() -> None:
    with advises('; set "auto" or "cpu", or install the build of torch for that device'):
        resolve_device("xpu")
    for name in ("auto", "cpu"):
        resolve_device(name)


def test_a_final_norm_that_is_no_module(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `score.reads = "states"` needs of the model is read from it all the same."""
    states = hf.hidden_states
    with monkeypatch.context() as other:
        other.setattr(hf, "hidden_states", lambda model, ids: states(model, ids) * 1.0)
        with advises('its final norm cannot be taken out; set score.reads = "states"'):
            hf.load_final_norm(tiny, dtype="float32")
    assert states(hf.load_model(tiny), torch.zeros(1, 3, dtype=torch.int64)).shape[-1] == CONFIG["hidden_size"]


def layers_of(kind: str) -> LayerTypes:
    config = AutoConfig.for_model(**CONFIG)
    config.layer_types = [kind]
    return LayerTypes(config)


def test_layers_that_the_sampler_does_not_decode() -> None:
    with advises(" has layers of type "):
        layers_of("lightning").require_decodable()
    layers_of("full_attention").require_decodable()


def test_chat_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    with advises("and the tokenizer has no chat template; give one that has"):
        render_messages(tokenizer(), QUESTION)
    with advises("change the messages, or give a tokenizer whose template writes them"):
        render_messages(tokenizer("{{ messages[5].content }}"), QUESTION)
    tools = ChatOptions(tools=({"name": "clock"},))
    answer = [{"role": "assistant", "content": "4"}]
    with advises("tools, which the chat template does not write; give a "):
        answer_tokens(tokenizer(TEMPLATE), QUESTION, answer, options=tools)
    assert "clock" in render_messages(tokenizer(TOOLS), QUESTION, options=tools)
    monkeypatch.setattr(render_limits, "RENDER_CHARACTERS", 100)
    with advises(" characters for one conversation; at most "):
        render_messages(tokenizer("{{ 'x' * 101 }}"), QUESTION)
    monkeypatch.setattr(render_limits, "RENDER_S", 0.5)
    with advises(" MiB for one conversation; "):
        render_messages(tokenizer(ENDLESS), QUESTION)
    assert render_messages(tokenizer(TEMPLATE), QUESTION) == "<user>2 + 2\n"


def test_prompts_and_answers() -> None:
    letters = tokenizer(TEMPLATE)
    with advises(' messages needs the chat template: set prompt_template = "chat"'):
        render(QUESTION, letters)
    assert render(QUESTION, letters, template="chat")
    letters.eos_token = None
    with advises("with which an answer ends; set eos_token in its "):
        render_answer("2 + 2", "4", letters)
    assert render_answer("2 + 2", "4", tokenizer())[1]


def test_sources_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(3)))

    def domain(**settings: Any) -> sections.Domain:
        return sections.Domain(**({"source": str(few), "train": 3, "eval": 0} | settings))

    with advises("were asked for; lower them or widen the source"):
        load_prompts("few", domain(eval=4))
    assert len(load_prompts("few", domain())) == 3
    with few.open("a") as rows:
        rows.writelines(json.dumps({"prompt": f"more{number}"}) + "\n" for number in range(4))
    assert len(load_prompts("few", domain(eval=4))) == 7
