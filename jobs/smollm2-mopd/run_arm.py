"""What three specialists make of a pretrained language model, and its alternatives; jobs/arms.py runs an arm at a seed.

python jobs/smollm2-mopd/run_arm.py ARM SEED [--results DIR] [--stores DIR]
python jobs/smollm2-mopd/run_arm.py --list
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from arms import Arm, Comparison, main

SPECIALISTS = ("date", "larger", "json")
ARMS = {
    "base": Arm("SmolLM2-135M-Instruct after 48 examples of all domains", teachers=False),
    "date": Arm("specialist: SFT on 64 dates"),
    "larger": Arm("specialist: GRPO on 128 answers"),
    "json": Arm("specialist: SFT on 64 lines of JSON"),
    "joint-sft": Arm("SFT on all domains' reference answers", ("joint-sft",), teachers=False),
    "teacher-sft": Arm("SFT on the teachers' answers", ("teacher-sft",)),
    "grpo": Arm("GRPO on the mixture", ("grpo",), teachers=False),
    "mopd-sampled": Arm("MOPD, sampled tokens", ("mopd-sampled",)),
    "mopd-exact": Arm("MOPD, full vocabulary", ("mopd-exact",)),
}
COMPARISON = Comparison(Path(__file__).parent, ARMS, SPECIALISTS, points=1, threads=2)


if __name__ == "__main__":
    main(COMPARISON)
