"""Chat templates in the forms that model families document, and a tokenizer for each.

Each template is written here from the family's documented form of a turn, its generation prompt, its terminator, and
its treatment of thoughts and tools. The tokenizers have a token for every byte and the family's own special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


@dataclass(frozen=True)
class ChatFamily:
    """A family's chat template, with its special tokens and its other added tokens."""

    template: str
    special: tuple[str, ...]
    eos: str
    """The tokenizer's end-of-sequence token, which need not be the one that ends a turn."""
    terminator: str
    """The token that ends an answer."""
    answer: str
    """The answer `four` to `2+2?` as the policy writes it, terminator included."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    call_terminator: str = ""
    """The token that ends a turn with a tool call; empty for a family whose template has no tools."""
    shows_thoughts: bool = False
    """Whether the last answer's thought is written."""
    drops_thoughts: bool = False
    """Whether the thoughts of earlier answers are left out once a new question follows."""
    opens_thought: bool = False
    """Whether the generation prompt begins a thought."""
    takes_system: bool = True
    writes_tools: bool = True
    """Whether the template writes `tools`, given that it writes calls."""


_CALLS_JSON = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
)
_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def _chatml(thought: str, opening: str = "") -> str:
    """ChatML with tools in the system message and replies of tools in a user's turn, as Qwen 2.5 and 3 write it."""
    return (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
        "{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + thought + "{{ m.content }}" + _CALLS_JSON
        + "<|im_end|>\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + opening + "{% endif %}"
    )  # fmt: skip


_LAST_THOUGHT = (
    "{% if loop.index0 > ns.last %}<think>\n{{ (m.reasoning_content or '').strip() }}\n</think>\n\n{% endif %}"
)
_THOUGHT_IF_ANY = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_LLAMA = (
    "{{ bos_token }}"
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ {'name': f.name, 'parameters': f.arguments} | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_HARMONY = (
    "<|start|>system<|message|>You are helpful.{% if tools %}\n{{ tools | tojson }}{% endif %}<|end|>"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }}<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% else %}"
    "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>"
    "{% elif m.role == 'assistant' and m.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
_GLM = (
    "[gMASK]<sop>{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>{{ m.content }}</tool_response>"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "<think>{{ (m.reasoning_content or '') if loop.index0 > ns.last }}</think>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% else %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
_GRANITE = (
    "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>"
    "{% for c in m.tool_calls or [] %}<|tool_call|>{{ c.function | tojson }}{% endfor %}"
    "{{ m.content }}<|end_of_text|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

CHAT_FAMILIES = {
    "qwen3": ChatFamily(
        _chatml(_LAST_THOUGHT), _CHATML, "<|im_end|>", "<|im_end|>", "<think>\n\n</think>\n\nfour<|im_end|>",
        added=_HERMES, call_terminator="<|im_end|>", shows_thoughts=True, drops_thoughts=True,
    ),
    "qwen3-base": ChatFamily(
        _chatml(_LAST_THOUGHT), _CHATML, "<|endoftext|>", "<|im_end|>", "<think>\n\n</think>\n\nfour<|im_end|>",
        added=_HERMES, call_terminator="<|im_end|>", shows_thoughts=True, drops_thoughts=True,
    ),
    "qwen3.5": ChatFamily(
        _chatml(_LAST_THOUGHT, "<think>\n"), _CHATML, "<|im_end|>", "<|im_end|>", "\n</think>\n\nfour<|im_end|>",
        added=_HERMES, call_terminator="<|im_end|>", shows_thoughts=True, drops_thoughts=True, opens_thought=True,
    ),
    "smollm3": ChatFamily(
        _chatml(_THOUGHT_IF_ANY), _CHATML, "<|im_end|>", "<|im_end|>", "four<|im_end|>", added=_HERMES,
        call_terminator="<|im_end|>", shows_thoughts=True,
    ),
    "llama3": ChatFamily(
        _LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        "<|eot_id|>", "<|eot_id|>", "four<|eot_id|>", call_terminator="<|eot_id|>",
    ),
    "llama4": ChatFamily(
        _LLAMA.replace("_header_id|>", "_header|>").replace("<|start_header|>", "<|header_start|>")
        .replace("<|end_header|>", "<|header_end|>").replace("<|eot_id|>", "<|eot|>"),
        ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|end_of_text|>"),
        "<|eot|>", "<|eot|>", "four<|eot|>", call_terminator="<|eot|>",
    ),
    "gpt-oss": ChatFamily(
        _HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        "<|return|>", "<|return|>", "<|channel|>final<|message|>four<|return|>", call_terminator="<|call|>",
        shows_thoughts=True, drops_thoughts=True,
    ),
    "mistral": ChatFamily(
        _MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                   "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>", "</s>", "four</s>", call_terminator="</s>", takes_system=False,
    ),
    "deepseek-r1": ChatFamily(
        _DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
         "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "four<｜end▁of▁sentence｜>", added=("<think>", "</think>"),
        call_terminator="<｜end▁of▁sentence｜>", drops_thoughts=True, opens_thought=True, writes_tools=False,
    ),
    "glm4.5": ChatFamily(
        _GLM, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        "<|endoftext|>", "<|user|>", "<think></think>\nfour<|user|>",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        call_terminator="<|observation|>", shows_thoughts=True, drops_thoughts=True,
    ),
    "gemma3": ChatFamily(
        _GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<end_of_turn>", "four<end_of_turn>",
    ),
    "phi4-mini": ChatFamily(
        _PHI, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), "<|endoftext|>",
        "<|end|>", "four<|end|>",
    ),
    "granite": ChatFamily(
        _GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"), "<|end_of_text|>",
        "<|end_of_text|>", "four<|end_of_text|>", call_terminator="<|end_of_text|>",
    ),
}  # fmt: skip
"""By the name of the family."""


def chat_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes with a family's tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    family = CHAT_FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in family.added])
    bos = next((text for text in family.special if "begin" in text or text in ("<s>", "<bos>")), None)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token=bos, clean_up_tokenization_spaces=False
    )
    fast_tokenizer.chat_template = family.template
    return fast_tokenizer
