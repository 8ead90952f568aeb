"""RolloutReport: counts and rates of one call of run_rollout."""

from dataclasses import dataclass, field

from mopd_dataplane.base.log.filesystem import Level


@dataclass(kw_only=True)
class RolloutReport:
    """Counts and rates of one rollout."""

    stage: str
    iteration: int
    level: Level = "durable"
    """Level that the log can promise for tokens, `durable` or `logged`; samples are `committed`."""
    filesystem: str = ""
    """Kind of the file system under the log."""
    samples: int = 0
    """Samples that this call acknowledged as `committed`."""
    tokens: int = 0
    """Tokens that this call sampled."""
    seconds: float = 0.0
    resumed: int = 0
    """Samples continued from the log."""
    exact: int = 0
    """Resumed samples whose last logged tokens scored the same bits again; the others are statistical."""
    max_drift: float = 0.0
    """Largest |log-prob now - logged log-prob| at a resume, in nat."""
    restored: int = 0
    """Resumed samples whose keys and values a graceful stop had saved; the others were prefilled again."""
    dropped: int = 0
    """Samples whose uid is in the store with other content: the first commit stands."""
    weight_changes: int = 0
    """Newer policies loaded while sampling."""
    torn_bytes: int = 0
    """Bytes after the cut that recovery made."""
    finish_reasons: dict[str, int] = field(default_factory=dict)
    abandoned: dict[str, int] = field(default_factory=dict)
    """Samples that this call abandoned, by reason."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def committed(self, reason: str) -> None:
        """Count a committed sample."""
        self.samples += 1
        self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
