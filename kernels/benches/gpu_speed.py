"""Speed of the ops and of their parts on the device at hand; every ratio is to bare products timed in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_accuracy import with_grad
from mopd_kernels import decode, encode, policy_loss
from mopd_kernels.dispatch import has_triton, make_plan
from mopd_kernels.epilogue import Products
from mopd_kernels.forms import divergence_form
from mopd_kernels.testing import Case, Inputs, make_inputs
from ops import EAGER, OURS, Op, products
from timing import Bench

TARGETS = {
    ("reverse", True, True): ("G1", 1.25),
    ("forward", True, True): ("G1", 1.25),
    ("reverse", False, True): ("G2", 1.32),
    ("jsd", True, True): ("G3", 1.32),
    ("skew_reverse", True, True): ("G3", 1.32),
    ("reverse", True, False): ("G4", 1.20),
    ("logprob", True, False): ("G5", 1.20),
    ("logprob", True, True): ("G6", 1.20),
    ("policy", True, True): ("G6", 1.20),
}
"""(op, trained head, backward) to goal and its ratio to the bare products."""


def product_ms(bench: Bench, inputs: Inputs) -> tuple[float, float]:
    """Milliseconds of one student and one teacher product of the whole problem, bfloat16 in and out."""
    hidden, head = inputs.student_hidden.detach(), inputs.student_head.detach()
    teacher, teacher_head = inputs.teacher_hidden, inputs.teacher_head
    return bench.milliseconds(lambda: hidden @ head.t()), bench.milliseconds(lambda: teacher @ teacher_head.t())


def run_op(op: Op, inputs: Inputs, *, trained_head: bool, backward: bool) -> Callable[[], None]:
    fresh = with_grad(inputs)
    fresh.student_head.requires_grad_(trained_head)

    def call() -> None:
        fresh.student_hidden.grad = fresh.student_head.grad = None
        with torch.set_grad_enabled(backward):
            loss = op(fresh)
        if backward:
            loss.backward()

    return call


def op_rows(bench: Bench, case: Case) -> Iterator[str]:
    inputs = make_inputs(case, dtype=torch.bfloat16, device=bench.device)
    student_ms, teacher_ms = product_ms(bench, inputs)
    flops = 2e-9 * case.rows * case.vocabulary
    plan = make_plan(device=torch.device(bench.device), operand=torch.bfloat16, rows=case.rows, columns=case.vocabulary)
    yield f"**{case}**: student product {student_ms:.2f} ms ({flops * case.student_width / student_ms:.0f} TFLOP/s), "
    yield f"teacher product {teacher_ms:.2f} ms. {plan}\n"
    yield "| op | head | pass | ms | TFLOP/s | ratio to bare products | goal | peak GiB | host syncs |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, op in OURS.items():
        for trained in (True, False):
            for backward in (True, False):
                if not backward and not trained:
                    continue  # the head's gradient plays no part in a forward pass
                of_student, of_teacher = products(name, trained_head=trained, backward=backward)
                floor = of_student * student_ms + of_teacher * teacher_ms
                call = run_op(op, inputs, trained_head=trained, backward=backward)
                ms, peak = bench.milliseconds(call), bench.peak_bytes(call)
                work = flops * (of_student * case.student_width + of_teacher * case.teacher_width)
                goal, target = TARGETS.get((name, trained, backward), ("", 0.0))
                met = f"{goal} ≤ {target}" if goal else ""
                yield (
                    f"| {name} | {'trained' if trained else 'frozen'} | {'fwd+bwd' if backward else 'fwd'} | {ms:.2f} "
                    f"| {work / ms:.0f} | {ms / floor:.2f} | {met} | {peak / 2**30:.2f} "
                    f"| {'yes' if bench.host_syncs(call) else 'no'} |"
                )


def peer_rows(bench: Bench, case: Case) -> Iterator[str]:
    """Eager, torch.compile and Liger on the same inputs; a peer that runs out of memory says so."""
    inputs = make_inputs(case, dtype=torch.bfloat16, device=bench.device)
    peers: dict[str, Op] = {f"eager {name}": op for name, op in EAGER.items() if name != "policy"}
    if bench.on_gpu:
        peers |= {f"compile {name}": torch.compile(EAGER[name]) for name in ("reverse", "logprob")}
        peers |= _liger()
    yield "| peer | ms fwd+bwd | peak GiB |"
    yield "| --- | --- | --- |"
    for name, op in peers.items():
        call = run_op(op, inputs, trained_head=True, backward=True)
        try:
            yield f"| {name} | {bench.milliseconds(call):.2f} | {bench.peak_bytes(call) / 2**30:.2f} |"
        except torch.OutOfMemoryError:
            yield f"| {name} | out of memory | |"
            torch.cuda.empty_cache()


def _liger() -> dict[str, Op]:
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearJSD
    except ImportError:
        return {}
    chunked = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0)
    fused, cross_entropy = LigerFusedLinearJSD(jsd_beta=1.0), LigerFusedLinearCrossEntropyLoss()
    return {
        "liger fused_linear_jsd": lambda i: fused(
            i.student_hidden, i.student_head, i.teacher_hidden, i.teacher_head, None
        ),
        "liger chunked jsd": lambda i: chunked(
            i.student_hidden, i.student_head, i.teacher_hidden, i.teacher_head, i.token_ids
        ),
        "liger cross entropy": lambda i: cross_entropy(i.student_head, i.student_hidden, i.token_ids),
    }


def part_rows(bench: Bench, case: Case) -> Iterator[str]:
    """What decides the chunk sizes and tiles: products by chunk, row kernels by tile."""
    inputs = make_inputs(case, dtype=torch.bfloat16, device=bench.device)
    head = inputs.student_head
    yield "| part | setting | ms | rate |"
    yield "| --- | --- | --- | --- |"
    if bench.on_gpu:
        for rows in (256, 512, 1024, 2048):
            hidden = inputs.student_hidden[:rows]
            ms = bench.milliseconds(lambda h=hidden: torch.mm(h, head.t(), out_dtype=torch.float32))
            rate = 2e-9 * rows * case.vocabulary * case.student_width / ms
            yield f"| product, float32 out | {rows} rows | {ms:.3f} | {rate:.0f} TFLOP/s |"
    if has_triton():
        yield from _tile_rows(bench, case)
    states = inputs.teacher_hidden
    for codec in ("int8", "fp8"):
        stored = encode(states, codec)
        ms = bench.milliseconds(lambda s=stored, c=codec: decode(s, c, case.teacher_width))
        moved = (stored.numel() + 2 * states.numel()) * 1e-6
        yield f"| decode {codec} | {len(states)} x {case.teacher_width} | {ms:.4f} | {moved / ms:.0f} GB/s |"
    for tokens in (8192, 1_000_000 if bench.on_gpu else 20_000):
        values = torch.randn(5, tokens, device=bench.device).unbind()
        ms = bench.milliseconds(
            lambda v=values: policy_loss(v[0], v[1], v[2], v[3], clip=(0.2, 0.28), correction="icepop")
        )
        yield f"| policy loss | {tokens} tokens | {ms:.4f} | goal G12 |"


def _tile_rows(bench: Bench, case: Case) -> Iterator[str]:
    from mopd_kernels.triton_rows.fdiv import fdiv_rows

    rows = 512 if bench.on_gpu else 2
    zs = torch.randn(rows, case.vocabulary, device=bench.device)
    zt = zs + 0.1 * torch.randn_like(zs)
    gradient = torch.empty_like(zs, dtype=torch.bfloat16 if bench.on_gpu else torch.float32)
    coefficient = torch.ones(rows, device=bench.device)
    for kind, reads in (("reverse", 2), ("jsd", 3)):
        moved = rows * case.vocabulary * (8 * reads + gradient.element_size()) * 1e-6
        for block in (2048, 4096, 8192) if bench.on_gpu else (2048,):
            for warps in (4, 8, 16) if bench.on_gpu else (8,):
                ms = bench.milliseconds(
                    lambda k=kind, b=block, w=warps: fdiv_rows(
                        Products(zs, zt), divergence_form(k), coefficient, gradient, block=b, warps=w
                    )
                )
                yield f"| row kernel {kind} | block {block} warps {warps} | {ms:.3f} | {moved / ms:.0f} GB/s |"
