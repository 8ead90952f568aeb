"""What one can do with three specialists of the quickstart's world; jobs/arms.py runs an arm at a seed.

python jobs/alternatives/run.py ARM SEED [--results DIR] [--stores DIR]
python jobs/alternatives/run.py --list
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import merging
from arms import FACTORS, Arm, Comparison, main

SPECIALISTS = ("speller", "sorter", "walker")
ARMS = {
    "base": Arm("the start of all others", teachers=False),
    **{name: Arm(f"specialist of one domain: {name}") for name in SPECIALISTS},
    "joint-sft": Arm("SFT on all domains' reference answers", ("joint-sft",), FACTORS, teachers=False),
    "grpo": Arm("GRPO on the mixture", ("grpo",), FACTORS, teachers=False),
    "cascade": Arm("GRPO one domain after another", ("cascade-spelling", "cascade-sorting", "cascade"), FACTORS,
                   teachers=False),
    "average": Arm("mean of the specialists' weights", merge=merging.average),
    "task-arithmetic": Arm("base + scale x sum of weight changes", (), (0.3, 0.5, 1.0), merging.task_arithmetic),
    "ties": Arm("trimmed, signs elected, merged", (), (0.5, 1.0, 1.5), merging.ties),
    "teacher-sft": Arm("SFT on the teachers' answers", ("teacher-sft",), FACTORS),
    "teacher-forward": Arm("forward KL on the teachers' answers", ("teacher-forward",), FACTORS),
    "gkd": Arm("GKD: half the teachers' answers, half its own, JSD", ("gkd",), FACTORS),
    "mopd-sampled": Arm("MOPD, sampled tokens", ("mopd-sampled",), FACTORS),
    "mopd-baseline": Arm("MOPD, sampled tokens, less their mean", ("mopd-baseline",), FACTORS),
    "mopd-exact": Arm("MOPD, full vocabulary", ("mopd-exact",), FACTORS),
    "mopd-outcome": Arm("MOPD, sampled, with the outcome's advantage", ("mopd-outcome",), FACTORS),
    "one-teacher": Arm("one teacher, spelling", ("one-teacher",), like="mopd-exact"),
    "two-teachers": Arm("two teachers, spelling and sorting", ("two-teachers",), like="mopd-exact"),
    "group-4": Arm("four answers to each of a quarter of the prompts", ("group-4",), like="mopd-exact"),
    "wrong-teacher": Arm("the sorter scores spelling too", ("wrong-teacher",), like="mopd-exact"),
    "weak": Arm("a weaker start: a fifth of the base's examples", like="mopd-exact", start="weak", teachers=False),
    "weak-on-policy": Arm("MOPD from the weaker start", ("weak-on-policy",), like="mopd-exact", start="weak"),
    "weak-imitation-first": Arm("the same after forward KL on the teachers' answers, half of all",
                                ("weak-imitation", "weak-imitation-first"), like="mopd-exact", start="weak"),
}  # fmt: skip
COMPARISON = Comparison(Path(__file__).parent, ARMS, SPECIALISTS)


if __name__ == "__main__":
    main(COMPARISON)
