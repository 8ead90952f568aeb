"""Common model families, as far as they are known without their files: enough for a tiny stand-in model.

Vocabulary sizes are those of `config.json`, which may be larger than the tokenizer's.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Family:
    """A model type, its vocabulary, and its chat format."""

    model_type: str
    """Name of the architecture in transformers."""
    vocab_size: int
    eos: str
    """End of an answer."""
    pad: str
    bos: str = ""
    """Put before every text; empty for none."""
    turn: str = ""
    """A message of a chat, with {role} and {content}; empty for a model without a chat template."""
    answer: str = ""
    """Text before the model's own turn."""

    @property
    def special(self) -> tuple[str, ...]:
        """Special tokens, each once."""
        found = re.findall(r"<[^<>\n ]+>|\[/?INST\]", self.turn + self.answer)
        return tuple(dict.fromkeys(token for token in (self.pad, self.bos, self.eos, *found) if token))

    @property
    def chat_template(self) -> str:
        """The turn as a Jinja template; empty when there is none."""
        if not self.turn:
            return ""
        turn = self.turn.replace("{role}", "{{ message['role'] }}").replace("{content}", "{{ message['content'] }}")
        start = "{{ bos_token }}" if self.bos and self.bos not in self.turn else ""
        said = "{% for message in messages %}" + turn + "{% endfor %}"
        return f"{start}{said}{{% if add_generation_prompt %}}{self.answer}{{% endif %}}"


_CHATML = {"turn": "<|im_start|>{role}\n{content}<|im_end|>\n", "answer": "<|im_start|>assistant\n"}
FAMILIES = {
    "qwen3": Family("qwen3", 151_936, eos="<|im_end|>", pad="<|endoftext|>", **_CHATML),
    "qwen2": Family("qwen2", 151_936, eos="<|im_end|>", pad="<|endoftext|>", **_CHATML),
    "deepseekr1distillqwen": Family(
        "qwen2", 151_936, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>", pad="<｜end▁of▁sentence｜>",
        turn="<｜User｜>{content}", answer="<｜Assistant｜><think>\n",
    ),
    "smollm2": Family("llama", 49_152, bos="<|im_start|>", eos="<|im_end|>", pad="<|im_end|>", **_CHATML),
    "llama3": Family(
        "llama", 128_256, bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|finetune_right_pad_id|>",
        turn="<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        answer="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma3": Family(
        "gemma3_text", 262_144, bos="<bos>", eos="<end_of_turn>", pad="<pad>",
        turn="<start_of_turn>{role}\n{content}<end_of_turn>\n", answer="<start_of_turn>model\n",
    ),
    "mistral": Family("mistral", 32_768, bos="<s>", eos="</s>", pad="</s>", turn="[INST] {content}[/INST]"),
    "gpt2": Family("gpt2", 50_257, eos="<|endoftext|>", pad="<|endoftext|>"),
}  # fmt: skip
"""By a part of the models' names, in small letters and without punctuation."""
USUAL = "qwen3"
"""The family assumed for a model whose name suggests none."""


def family_of(place: str) -> str:
    """The family that a model's name suggests; empty when it suggests none.

    >>> family_of("meta-llama/Llama-3.2-1B"), family_of("models/Qwen2.5-7B-Instruct"), family_of("models/student")
    ('llama3', 'qwen2', '')
    """
    name = re.sub(r"[^a-z0-9]", "", PurePosixPath(place).name.lower())
    return max((family for family in FAMILIES if family in name), key=len, default="")
