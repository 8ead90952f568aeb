"""Agreement with Liger's chunked distillation loss and TRL's generalised JSD, and where they are not right.

    pip install --no-deps liger-kernel trl
    python kernels/benches/peers.py [--write]

Runs on a CPU: Liger's chunked losses and TRL's are PyTorch. Errors are relative to float64 autograd on the same inputs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from mopd_kernels import divergence, reference
from mopd_kernels.testing import Case, Inputs, make_inputs, relative_error
from torch import Tensor

FAR = Case(rows=24, vocabulary=8192, student_width=128, teacher_width=256)
NEAR = Case(rows=24, vocabulary=8192, student_width=256, teacher_width=256, distance=0.03)
BETAS = {"forward": 0.0, "jsd": 0.5, "reverse": 1.0}
"""Liger and TRL call the KL directions the ends of one beta."""
Loss = Callable[[Tensor, Tensor, Inputs, str], Tensor]


def ours(hidden: Tensor, head: Tensor, inputs: Inputs, kind: str) -> Tensor:
    return divergence(hidden, head, inputs.teacher_hidden, inputs.teacher_head, kind=kind, reduction="sum")  # type: ignore[call-overload,no-any-return]


def liger(hidden: Tensor, head: Tensor, inputs: Inputs, kind: str) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETAS[kind], compiled=False, chunk_size=8
    )
    mean = loss(hidden, head, inputs.teacher_hidden, inputs.teacher_head, inputs.token_ids)
    return mean * len(hidden)


def trl(hidden: Tensor, head: Tensor, inputs: Inputs, kind: str) -> Tensor:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = hidden @ head.t(), inputs.teacher_hidden @ inputs.teacher_head.t()
    return GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=BETAS[kind], reduction="sum")


PEERS: dict[str, Loss] = {"ours": ours, "liger": liger, "trl": trl}


def truth(inputs: Inputs, kind: str, columns: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64, over the first ``columns`` tokens."""
    hidden, head = (t.double().clone().requires_grad_() for t in (inputs.student_hidden, inputs.student_head))
    x = hidden @ head[:columns].t()
    y = inputs.teacher_hidden.double() @ inputs.teacher_head[:columns].double().t()
    loss = reference.divergence(x, y, kind=kind).sum()
    loss.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return loss.detach(), hidden.grad, head.grad


def errors(loss_of: Loss, inputs: Inputs, kind: str) -> str:
    hidden, head = inputs.student_hidden.clone().requires_grad_(), inputs.student_head.clone().requires_grad_()
    loss = loss_of(hidden, head, inputs, kind)
    loss.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    expected = truth(inputs, kind, len(inputs.student_head))
    result = (loss.detach(), hidden.grad, head.grad)
    return " | ".join(f"{relative_error(value, exact):.1e}" for value, exact in zip(result, expected, strict=True))


def table() -> str:
    lines = ["| inputs | kind | who | loss | dH | dW |", "| --- | --- | --- | --- | --- | --- |"]
    settings = (
        ("float32, unrelated teacher", FAR, torch.float32, 0),
        ("bfloat16, near convergence", NEAR, torch.bfloat16, 0),
        ("float32, teacher head padded by 128 rows", FAR, torch.float32, 128),
    )
    for title, case, dtype, padding in settings:
        inputs = make_inputs(case, dtype=dtype)
        if padding:
            # As released checkpoints do: rows past the tokenizer's vocabulary, small and untrained.
            extra = torch.randn(padding, case.teacher_width, generator=torch.Generator().manual_seed(9)) * 0.02
            inputs = inputs._replace(teacher_head=torch.cat((inputs.teacher_head, extra)))
        for kind in BETAS:
            for name, loss_of in PEERS.items():
                if padding and name == "trl":
                    continue  # unequal vocabularies are an error there
                lines.append(f"| {title} | {kind} | {name} | {errors(loss_of, inputs, kind)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table under results/")
    options = parser.parse_args()
    versions = " · ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "liger-kernel", "trl"))
    text = (
        f"# Agreement with Liger and TRL\n\n{date.today()} · {versions} · CPU. Relative errors against float64 "
        "autograd on the same inputs. Command: `python kernels/benches/peers.py --write`.\n\n" + table() + "\n"
    )
    print(text)
    if options.write:
        (Path(__file__).parent / "results" / f"peers_{date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
