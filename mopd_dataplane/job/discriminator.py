"""Settings of a stage's discriminator."""

from __future__ import annotations

from pydantic import Field

from mopd_dataplane.job.section import Fixed, Section


class Discriminator(Section):
    """Distinguishes a teacher's text from the student's; its score is the reward (GAD, arXiv 2511.10643)."""

    fixed_because = "the discriminator has learnt to tell this text apart"
    text: Fixed[str] = "reference"
    """The teacher's text: `reference` for the stored answers, or an earlier stage whose samples it is."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Learning rate of its optimizer (AdamW)."""
    batch_pairs: int = Field(default=32, ge=1)
    """Pairs of a teacher's and a student's text in one step."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each window's pairs, before the window is scored."""
    warmup_epochs: int = Field(default=0, ge=0)
    """Further passes over the first window's pairs."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of its gradient; a larger one is scaled down."""
