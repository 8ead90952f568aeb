"""What a student gains by each teacher that is added; jobs/arms.py runs an arm at a seed.

python jobs/teacher-count/run_count.py ARM SEED [--results DIR] [--stores DIR]
python jobs/teacher-count/run_count.py --list
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from arms import Arm, Comparison, main

ORDER = ("spell-high", "sort-low", "spiral-high", "spell-low", "spiral-low", "spell-max", "sort-high", "sort-max",
         "sum-low", "sum-high")  # fmt: skip
"""Teachers in the order in which they are added, each with the domain of its name."""
COUNTS = {"one": 1, "two": 2, "three": 3, "five": 5, "ten": 10}
ARMS = {
    "generalist": Arm("the start of all students", teachers=False),
    **{name: Arm(f"taught by {', '.join(ORDER[:count])}", (name,)) for name, count in COUNTS.items()},
}
COMPARISON = Comparison(Path(__file__).parent, ARMS, ORDER, base="generalist", points=1)


if __name__ == "__main__":
    main(COMPARISON)
