"""Which forms of the objective learn from a near teacher, and at which rate; jobs/arms.py runs an arm at a seed.

python jobs/near/run_near.py ARM SEED [--results DIR] [--stores DIR]
python jobs/near/run_near.py --list
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from arms import Arm, Comparison, main

RATES = (1.0, 7.5)
"""Of 2e-4: the low rate, and the quickstart's."""
ARMS = {
    "base": Arm("the start of all others", teachers=False),
    "near": Arm("the teacher: the base after 4,000 sorted lists at a low rate"),
    "exact": Arm("reverse KL, full vocabulary", ("exact",), RATES),
    "skew-reverse": Arm("skewed reverse KL, alpha 0.1", ("skew-reverse",), RATES),
    "skew-forward": Arm("skewed forward KL, alpha 0.1", ("skew-forward",), RATES),
    "corrected-8": Arm("teacher's top 8, corrected", ("corrected-8",), RATES),
    "corrected-64": Arm("teacher's top 64, corrected", ("corrected-64",), RATES),
    "tail-8": Arm("student's top 8 and a tail", ("tail-8",), RATES),
    "icepop": Arm("sampled tokens, IcePop", ("icepop",), RATES),
    "uncorrected": Arm("sampled tokens, no correction", ("uncorrected",), RATES),
    "outcome": Arm("sampled tokens and the outcome's advantage", ("outcome",), RATES),
    "outcome-alone": Arm("the outcome's advantage alone", ("outcome-alone",), RATES, teachers=False),
}
COMPARISON = Comparison(Path(__file__).parent, ARMS, ("near",), points=3)


if __name__ == "__main__":
    main(COMPARISON)
