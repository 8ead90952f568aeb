"""What becomes of two skills whose rewards conflict; jobs/arms.py runs an arm at a seed.

python jobs/conflict/run_conflict.py ARM SEED [--results DIR] [--stores DIR]
python jobs/conflict/run_conflict.py --list
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from arms import Arm, Comparison, main

SPECIALISTS = ("larger", "smaller")
ARMS = {
    "base": Arm("SmolLM2-135M-Instruct after 24 examples of each question, and 24 capitals", teachers=False),
    "larger": Arm("specialist: GRPO on 192 answers"),
    "smaller": Arm("specialist: GRPO on 192 answers"),
    "grpo": Arm("GRPO on both rewards together, 384 answers", ("grpo",), teachers=False),
    "cascade": Arm("from `larger`, GRPO on 192 answers to `smaller`", ("cascade",), teachers=False),
    "cascade-kl": Arm("the same with `kl_coef = 0.04` to its start", ("cascade-kl",), teachers=False),
    "cascade-strong-kl": Arm("the same with `kl_coef = 1`", ("cascade-strong-kl",), teachers=False),
    "cascade-entropy": Arm("`cascade` with an entropy bonus of 0.01", ("cascade-entropy",), teachers=False),
    "cascade-strong-entropy": Arm("the same with 0.3", ("cascade-strong-entropy",), teachers=False),
    "mopd-exact": Arm("MOPD of both specialists, full vocabulary, 192 answers", ("mopd-exact",)),
}
COMPARISON = Comparison(Path(__file__).parent, ARMS, SPECIALISTS, points=1)


if __name__ == "__main__":
    main(COMPARISON)
