"""From a seed to a sequence of steps. A step stands for itself: leaving one out changes no other."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

WRITERS = 3
LENGTH = 9
"""Steps of a sequence, on average."""
WEIGHTS = {
    "ask": 0.8, "commit": 5.0, "import": 0.8, "score": 1.6, "reward": 1.6, "label": 1.6, "plan": 1.0, "train": 1.0,
    "delete": 1.6, "repair": 0.3, "copy": 0.5, "copy where": 0.3, "upgrade": 0.05, "compact": 0.3, "compact now": 0.8,
    "tag": 1.2, "release": 0.6, "put": 1.6, "clear": 0.8, "verify": 0.2,
    "power loss": 1.0, "clock": 0.8, "restart": 0.6,
}  # fmt: skip
"""Operations of a writer, then what happens to the machine."""
FOCUSED = ("fork", "compact a fork", "delete from a fork", "commit together")
"""Operations of sequences that are focused on them."""
MACHINE = ("power loss", "clock", "restart", "end", "audit")
ALWAYS = ("commit", "restart")
FAULTS = {"killed": 3.0, "suspended": 4.0, "disk full": 1.0, "failed sync": 1.0, "lost reply": 1.0}
FAULTY = 0.5
"""Share of the operations that something befalls."""
AUDITED = 0.3
"""Share of the sequences that end with `verify`."""
ACTIVE = 0.55
"""Share of the operations that a seed uses: sequences of few kinds reach states that mixtures of all do not."""


OFTEN = 6
"""Factor for one operation of each seed, which so meets itself."""


@dataclass(frozen=True)
class Fault:
    """What befalls an operation: killed or suspended at its `after`-th pause, or its `after`-th call of the disk."""

    kind: str
    after: int


@dataclass(frozen=True)
class Step:
    """One operation of a writer. A writer that is suspended first goes on with what it was doing."""

    writer: int
    operation: str
    choice: int
    """Seed of the operation's own values."""
    fault: Fault | None = None

    def __str__(self) -> str:
        fault = "" if self.fault is None else f", {self.fault.kind} at {self.fault.after}"
        who = "machine" if self.operation in MACHINE else f"writer {self.writer}"
        return f"{who}: {self.operation} #{self.choice}{fault}"


def sequence(seed: int, focus: Collection[str] = ()) -> list[Step]:
    """The steps of a seed. focus: operations that every sequence has, as often as commits; also of forks."""
    draw = random.Random(seed)
    operations = [name for name in WEIGHTS if name in (*ALWAYS, *focus) or draw.random() < ACTIVE]
    operations += [name for name in FOCUSED if name in focus]
    faults = [kind for kind in FAULTS if draw.random() < ACTIVE]
    often = draw.choice(operations)
    weights = [
        WEIGHTS["commit"] if name in focus else WEIGHTS[name] * (OFTEN if name == often else 1) for name in operations
    ]
    steps = []
    for _ in range(draw.randint(LENGTH - 3, LENGTH + 3)):
        [operation] = draw.choices(operations, weights)
        fault = None
        if operation not in MACHINE and faults and draw.random() < FAULTY:
            [kind] = draw.choices(faults, [FAULTS[name] for name in faults])
            fault = Fault(kind, min(int(draw.expovariate(0.25)), 40))
        steps.append(Step(draw.randrange(WRITERS), operation, draw.randrange(1000), fault))
    steps.append(Step(0, "audit" if draw.random() < AUDITED else "end", 0))
    return steps
