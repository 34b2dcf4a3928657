"""ClimbMix, shuffled: web pages that were chosen and mixed for how much small models learn of them.

    python data/climbmix/prepare.py --num_proc=8
    python data/climbmix/prepare.py --max_tokens=10000000000
    python train.py config/train_openwebtext.py --dataset=climbmix

400 billion tokens in all; the first billion (2 GB, and as much again while it is written) if
--max_tokens does not say otherwise. Only as many files are read from the hub as that takes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import steady

steady.start_script()

from steady.prepare import prepare_hub_dataset

# data set
path = "karpathy/climbmix-400b-shuffle"  # repository on the hub, or a local copy of it
name = ""  # its configuration
val_fraction = 0.0005  # share of the documents held out for validation
streaming = True  # read over the network without keeping a copy of the text
max_tokens = 1_000_000_000  # of the training set: the first so many; 0: all

if __name__ == "__main__":
    prepare_hub_dataset(globals())
