"""The policy as a module whose forward pass ends in a loss, not in logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from mopd_kernels.heads import Head
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.sections import Lora, Train
from mopd_dataplane.models.adapter_files import is_adapter, weights_folder
from mopd_dataplane.models.adapters import continued_adapter, new_adapter
from mopd_dataplane.models.architecture import (
    attention_implementation,
    context_length,
    has_length_dependent_rope,
    text_decoder,
)
from mopd_dataplane.models.hf import (
    embedding_weight,
    head_weight,
    hidden_states,
    lm_head,
    load_merged,
    load_model,
    weights_digest,
)
from mopd_dataplane.models.layer_types import LayerTypes
from mopd_dataplane.models.router_replay import Routing
from mopd_dataplane.models.self_check import SelfCheck, check_forward
from mopd_dataplane.train import attention
from mopd_dataplane.train.context import check_heads
from mopd_dataplane.train.microbatch import Layout, MicroBatch, starts_of
from mopd_dataplane.train.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

Result = TypeVar("Result")
_SHORT_WINDOW = 256
"""Widest sliding window for which packing is tested; a longer text would take seconds."""
PACKED_ALIKE = 1e-2
"""Largest difference of a packed pass from one sequence at a time: products of other shapes round differently."""
NO_LEAK = 1e-5
"""Largest change of a sequence when its neighbour changes. In correct models only experts see both sequences, with
products of other shapes: 1e-7. Short convolutions leak 4e-4 in a model of small random weights."""


class Student(nn.Module):
    """A causal LM whose forward pass calls a loss on the hidden states of the trained tokens.

    The head is used inside `forward`, so that sharded parameters are whole while an op reads them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype = torch.float32,
        freeze_head: bool = False,
        context_group: ProcessGroup | None = None,
    ) -> None:
        """Wrap a model. context_group: ranks that share each micro-batch (context.py). Raises MismatchError when they
        cannot."""
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.freeze_head = freeze_head
        self.layout: Layout = "packed" if packs_apart(model) else "rows"
        """Layout of the micro-batches that this model can read."""
        self._context_group = context_group
        self._longest = context_length(model.config) if has_length_dependent_rope(model.config) else None
        """Length in tokens beyond which the states of a sequence would depend on its neighbours."""
        self._mixed = any(p.is_floating_point() and p.dtype != dtype for p in model.parameters())
        self._routing = Routing.of(model)
        self._keeps_states = LayerTypes(model.config).has_states
        self.self_check: SelfCheck | None = None
        """Comparison of the loaded weights with the plain pass."""
        if context_group is not None:
            _check_shares(model, self.layout, context_group.size())

    def forward(self, batch: MicroBatch, compute_loss: Callable[[Tensor, Head], Result]) -> Result:
        """Run the model and return compute_loss(hidden, head): hidden [M, D] predicts the trained tokens of
        `batch.targets`.

        Raises MismatchError for a sequence past the original context of a rotary embedding that depends on the length.
        """
        if self._longest is not None and (length := int(batch.position_ids.max()) + 1) > self._longest:
            raise MismatchError(
                f"a sequence of {length} tokens is past the original context of {type(self.model).__name__}, "
                f"{self._longest}, where its rotary embedding depends on what else is in the pack; set "
                f"plan.pack_tokens = {self._longest} and plan.overlong = 'drop', or give the model a rope whose "
                "frequencies are fixed (yarn)"
            )
        self._follow(batch.experts)
        device = batch.input_ids.device.type
        lower = torch.autocast(device, self.dtype) if self._mixed else nullcontext()
        packed: dict[str, object] = {}
        if self.layout == "packed":
            packed = {
                "sequence_lengths": batch.sequence_lengths,
                "sequence_starts": batch.sequence_starts,
                "context_group": self._context_group,
            }
            if self._keeps_states:
                packed |= _starts_of_states(batch.sequence_lengths, batch.sequence_starts)
        with lower:
            states = hidden_states(self.model, batch.input_ids, position_ids=batch.position_ids, **packed)
        rows = states.flatten(0, 1)[batch.predictors].to(self.dtype)
        head = lm_head(self.model)
        weight = head.weight.to(self.dtype)
        if self.freeze_head:  # not through requires_grad: a tied matrix is the embedding too, which still learns
            weight = weight.detach()
        return compute_loss(rows, Head(weight, head.bias, head.softcap, head.logit_scale))

    def _follow(self, experts: Tensor | None) -> None:
        """Send tokens to the experts that they were sampled with (R3); the gates are still the student's own."""
        if self._routing is not None:
            self._routing.replay(experts)
        elif experts is not None:
            raise MismatchError(
                f"the samples have recorded experts, and {type(self.model).__name__} has no router to follow "
                "them; train the model that sampled"
            )


def load_student(
    folder: Path,
    ranks: Ranks,
    train: Train | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    check_texts: Sequence[NDArray[np.int64]] = (),
) -> Student:
    """Load a policy folder as a trainable module: forward pass in `dtype`, sharded over the ranks.

    Trained weights are held in float32, or in `dtype` if the optimizer has a copy in float32. If `train.lora` has a
    rank, an adapter in float32 is trained instead: the folder's own, or a new one that is drawn with `seed`; the base
    is then frozen, in `dtype`. check_texts: token ids that the leading rank's self-check reads besides those made up.
    Raises MismatchError when the adapter does not fit.

    Without `train.dropout` the model stays in evaluation mode, so that two passes over the same tokens agree: neither
    dropout nor a router's jitter moves the ratio of two equal policies away from 1.
    """
    train = train or Train()
    # Several ranks load into host memory, where equal mapped files share pages, and shard from it.
    device = str(ranks.device) if ranks.world == 1 else "cpu"
    if train.lora.r:
        torch.manual_seed(seed)
        model = _adapted(folder, train.lora, dtype=_name(dtype), device=device)
    else:
        weights_dtype = dtype if train.master_weights or train.offload else torch.float32
        model = load_merged(folder, dtype=_name(weights_dtype), device=device)
    passed = check_forward(model, "Training", check_texts if ranks.leads else ())
    student = Student(model, dtype=dtype, freeze_head=train.freeze_head, context_group=ranks.group)
    student.self_check = passed
    head = head_weight(model)
    if train.freeze_head and head is not embedding_weight(model):
        head.requires_grad_(False)
    if train.gradient_checkpointing:
        _recompute(_layers(model), type(model).__name__)
    student.train(train.dropout)
    if train.lora.dropout:
        for name, module in model.named_modules():
            if name.endswith("lora_dropout"):
                module.train()
    ranks.shard(student, _layers(model), dtype=dtype)
    return student


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _adapted(folder: Path, lora: Lora, *, dtype: str, device: str) -> PreTrainedModel:
    """Load the frozen base of a policy with the adapter to train."""
    model = load_model(weights_folder(folder), dtype=dtype, device=device)
    if is_adapter(folder):
        weights_digest(folder)  # checks that the base is the one that the adapter was trained on
        continued_adapter(model, folder, lora)
    else:
        new_adapter(model, lora)
    return model


@torch.no_grad()
def packs_apart(model: PreTrainedModel) -> bool:
    """Replace `sdpa`, or plain attention with sinks, in a model by packed attention, and test that sequences in one row
    then do not affect each other.

    Models with another attention of their own fail the test, and recurrent ones do unless their kernels start anew with
    each sequence: they keep their attention and get one sequence per row. Small weights make a leak small, so rounding
    must not hide it: the test compares two passes of the same shape, of which only the first sequence differs. The
    second sequence is longer than the window of layers that have a short one. Packed attention knows no chunks, so
    models with chunks get one sequence per row.
    Returns True if sequences can be packed.
    """
    types = LayerTypes(model.config)
    if "chunked_attention" in types.windows:
        return False
    training, before = model.training, model.config._attn_implementation
    model.train(False)
    device = model.device
    first, second = 5, 7 + (types.longest_window if types.longest_window <= _SHORT_WINDOW else 0)
    ids = (torch.arange(first + second, device=device) * 7919 + 1) % len(embedding_weight(model))
    positions = torch.cat([torch.arange(first), torch.arange(second)]).to(device)
    other = torch.cat([ids[:first].flip(0), ids[first:]])
    apart = torch.cat([hidden_states(model, part[None])[0] for part in (ids[:first], ids[first:])])
    if before == "sdpa" or _has_sinks(model):
        model.set_attn_implementation(attention.NAME)
    lengths = [first, second]
    states = _starts_of_states(lengths, starts_of(lengths).to(device)) if types.has_states else {}
    try:
        packed, beside = (
            hidden_states(model, row[None], position_ids=positions[None], sequence_lengths=lengths, **states)[0].float()
            for row in (ids, other)
        )
        same = (packed - apart).norm() < PACKED_ALIKE * apart.norm()
        leak = (packed - beside)[first:].norm() / packed[first:].norm()
        good = bool(same & (leak < NO_LEAK))
    except TypeError:  # its forward pass takes no such argument
        good = False
    if not good:
        model.set_attn_implementation(before)
    model.train(training)
    return good


def _starts_of_states(lengths: list[int], starts: Tensor) -> dict[str, object]:
    """Where the sequences of a row begin, by the names that transformers gives it for recurrent layers: cu_seq_lens for
    linear attention, seq_idx [1, T] for Mamba and short convolutions. starts: as MicroBatch.sequence_starts."""
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=starts.device)
    sequence = torch.repeat_interleave(numbers, starts.diff(), output_size=sum(lengths))
    longest = max(lengths)
    return {
        "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest,
        "seq_idx": sequence[None],
    }  # fmt: skip


def _has_sinks(model: PreTrainedModel) -> bool:
    """Whether attention has sinks and nothing else that only plain attention computes."""
    sinks = any(isinstance(getattr(module, "sinks", None), Tensor) for module in model.modules())
    return sinks and attention_implementation(model.config) is None


def _check_shares(model: PreTrainedModel, layout: Layout, members: int) -> None:
    name = type(model).__name__
    if layout == "packed" and LayerTypes(model.config).has_states:
        raise MismatchError(
            f"scale.context_parallel = {members}: {name} keeps a state from token to token, which ranks cannot share; "
            "set scale.context_parallel = 1"
        )
    if layout != "packed":
        raise MismatchError(
            f"scale.context_parallel = {members}: {name} brings attention of its own, which cannot share a pack; set "
            "scale.context_parallel = 1"
        )
    check_heads(model.config.num_attention_heads, members, name)


def _recompute(layers: list[nn.Module], name: str) -> None:
    """Recompute layers in the backward pass from their inputs. transformers' own switch works in training mode
    alone."""
    if not layers:
        raise MismatchError(f"train.gradient_checkpointing: {name} has no list of layers; set it to false")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of a model, in order; empty if transformers does not name them."""
    decoder = text_decoder(model)
    layers = getattr(decoder, "layers", None)
    if isinstance(layers, nn.ModuleList):
        return list(layers)
    return [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
