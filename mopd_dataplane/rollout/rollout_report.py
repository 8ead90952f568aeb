"""RolloutReport: counts and rates of one call of run_rollout."""

from dataclasses import dataclass, field

from mopd_dataplane.base.log.filesystem import Level


@dataclass(kw_only=True)
class RolloutReport:
    """Counts and rates of one rollout."""

    stage: str
    iteration: int
    level: Level = "durable"
    """Level that the log can promise for tokens, `durable` or `logged`; `samples` are `committed`."""
    filesystem: str = ""
    """Kind of the file system under the log."""
    samples: int = 0
    """Acknowledged as `committed` by this call."""
    tokens: int = 0
    """Sampled by this call."""
    seconds: float = 0.0
    resumed: int = 0
    """Samples continued from the log."""
    exact: int = 0
    """Resumed samples whose last logged tokens scored the same bits again; the others are statistical."""
    max_drift: float = 0.0
    """Largest |log-prob now - log-prob as logged| at a resume, nat."""
    restored: int = 0
    """Resumed samples whose keys and values a graceful stop had saved; the others were prefilled again."""
    dropped: int = 0
    """Samples whose uid the store has with another content: the first commit stands."""
    weight_changes: int = 0
    """Newer policies taken up while sampling."""
    torn_bytes: int = 0
    """Bytes behind the cut that recovery made."""
    finish_reasons: dict[str, int] = field(default_factory=dict)
    abandoned: dict[str, int] = field(default_factory=dict)
    """Samples given up by this call, by reason."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens over wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def committed(self, reason: str) -> None:
        """Count a sample that the store has taken."""
        self.samples += 1
        self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
