"""A discriminator between a teacher's text and a student's, whose score rewards text like the teacher's (GAD).

    loss = mean over pairs of  -log sigma(D(prompt, teacher text) - D(prompt, student text))        Bradley-Terry

A pair of equal texts has loss log 2 and no gradient; it is left out of the pass, where rounding would give it one. Only
text of the teacher is needed: no logits, no weights, not even its tokenizer (arXiv 2511.10643).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.file_checksums import check_folder, write_checksums
from mopd_dataplane.base.files import make_folder
from mopd_dataplane.errors import DamagedError, EngineError
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.models.architecture import text_decoder

WEIGHTS, OPTIMIZER = "discriminator.safetensors", "optimizer.safetensors"
SCORE_TOKENS = 16384
"""Number of tokens in one forward pass without gradient, with padding."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One comparison: prompt and response of each side, as token ids."""

    teacher: NDArray[np.int64]
    """[P + R] token ids"""
    student: NDArray[np.int64]
    """[P + R'] token ids"""


class Discriminator:
    """A scalar head on a policy's body, and its optimizer. A saved version continues with the same bits on one
    machine's CPU.

    policy: folder with the initial body. seed: of the head's initial weights.
    """

    def __init__(self, policy: Path, settings: sections.Discriminator, *, seed: int, device: str = "cpu") -> None:
        self._settings = settings
        self._seed = seed
        self._critic = _Critic(policy, seed).to(device)
        self._optimizer = torch.optim.AdamW(
            self._critic.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.steps = 0
        """Number of updates so far, over all versions."""

    def update(
        self, pairs: Sequence[Pair], *, epochs: int, progress: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """Train on the pairs in a seeded order. Returns {"loss", "accuracy"} of the last pass.

        Accuracy is the share of pairs whose teacher side scores higher, before the update that used them; equal texts
        count half. Raises EngineError, naming the update, when the loss is not finite.
        """
        figures = {"loss": float("nan"), "accuracy": float("nan")}
        size = self._settings.batch_pairs
        for _ in range(epochs):
            order = np.random.default_rng((self._seed, self.steps)).permutation(len(pairs))
            losses, right = 0.0, 0.0
            for start in range(0, len(order), size):
                loss, margin = self._step([pairs[index] for index in order[start : start + size].tolist()])
                losses += loss * len(margin)
                right += float((margin > 0).sum() + 0.5 * (margin == 0).sum())
                progress(self.steps)
            figures = {"loss": losses / len(pairs), "accuracy": right / len(pairs)}
        return figures

    @torch.no_grad()
    def scores(self, texts: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """Score each prompt with its response: [N]."""
        scores = np.zeros(len(texts), np.float32)
        ordered = sorted(range(len(texts)), key=lambda index: (-len(texts[index]), index))
        while ordered:
            rows = max(1, SCORE_TOKENS // len(texts[ordered[0]]))
            places, ordered = ordered[:rows], ordered[rows:]
            scores[places] = self._critic([texts[index] for index in places]).cpu().numpy()
        return scores

    def save(self, folder: Path) -> None:
        """Write a version durably: a temporary folder, then one rename. An existing version is left unchanged."""
        critic = {name: tensor.detach().cpu().contiguous() for name, tensor in self._critic.named_parameters()}
        state = {
            f"{key}/{name}": torch.as_tensor(value).cpu().contiguous()
            for name, parameter in self._critic.named_parameters()
            for key, value in self._optimizer.state[parameter].items()
        }

        def fill(staging: Path) -> None:
            save_file(critic, staging / WEIGHTS, metadata={"steps": str(self.steps)})
            save_file(state, staging / OPTIMIZER)
            write_checksums(staging)
            fault_point("discriminator.written")

        make_folder(folder, fill)
        fault_point("discriminator.published")

    def load(self, folder: Path) -> None:
        """Continue from a saved version. Raises DamagedError when its files have changed, or do not fit."""
        check_folder(folder)
        try:
            weights, state = load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER)
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                self.steps = int(file.metadata()["steps"])
            with torch.no_grad():
                for name, parameter in self._critic.named_parameters():
                    parameter.copy_(weights[name])
                    mine = {key.partition("/")[0]: value for key, value in state.items() if key.endswith(f"/{name}")}
                    self._optimizer.state[parameter] = {
                        key: value if key == "step" else value.to(parameter) for key, value in mine.items()
                    }
        except (OSError, SafetensorError, LookupError, RuntimeError, TypeError) as error:
            raise DamagedError(
                f"{folder} is not a version of this discriminator ({error}); delete it and what came after it, then "
                "run again"
            ) from None

    def _step(self, pairs: list[Pair]) -> tuple[float, NDArray[np.float32]]:
        """Make one update. Returns the mean loss, and D(teacher) - D(student) of each pair before it."""
        fault_point("discriminator.step")
        margin = np.zeros(len(pairs), np.float32)
        apart = [index for index, pair in enumerate(pairs) if not np.array_equal(pair.teacher, pair.student)]
        if apart:
            self._optimizer.zero_grad(set_to_none=True)
            scores = self._critic([pairs[i].teacher for i in apart] + [pairs[i].student for i in apart])
            teacher, student = scores.chunk(2)
            loss = -nn.functional.logsigmoid(teacher - student).sum() / len(pairs)
            if not torch.isfinite(loss):
                raise EngineError(
                    f"the discriminator's loss is {float(loss.detach())} at update {self.steps}; its last version is "
                    "intact: lower discriminator.learning_rate and run again"
                )
            loss.backward()
            nn.utils.clip_grad_norm_(self._critic.parameters(), self._settings.grad_clip)
            self._optimizer.step()
            margin[apart] = (teacher - student).detach().cpu().numpy()
        self.steps += 1
        return float(np.logaddexp(0, -margin.astype(np.float64)).mean()), margin


class _Critic(nn.Module):
    """The body of a policy and a linear head on its last token's state."""

    def __init__(self, policy: Path, seed: int) -> None:
        super().__init__()
        model = hf.load_model(policy)
        self.body = text_decoder(model)
        width = hf.head_weight(model).shape[1]
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Parameter(torch.randn(width, generator=generator) / width)
        self.train(False)

    def forward(self, texts: Sequence[NDArray[np.int64]]) -> Tensor:
        """Score each text at its last token: [N]. Padding is on the right, where causal attention hides it."""
        device = self.head.device
        ends = torch.tensor([len(text) - 1 for text in texts])
        ids = pad_sequence([torch.from_numpy(text) for text in texts], batch_first=True)
        states = self.body(input_ids=ids.to(device), use_cache=False).last_hidden_state
        last: Tensor = states[torch.arange(len(texts), device=device), ends.to(device)]
        return last.float() @ self.head
