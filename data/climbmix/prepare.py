"""ClimbMix, shuffled: web pages, filtered and mixed so that small models learn much from them.

    python data/climbmix/prepare.py --num_proc=8
    python data/climbmix/prepare.py --max_tokens=10000000000
    python train.py config/train_openwebtext.py --dataset=climbmix

It has 400 billion tokens. By default the first billion are prepared (2 GB on disk); --max_tokens
changes that. Only the files needed for that are downloaded.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
import steady

steady.start_script()

from steady.prepare import prepare_hub_dataset

# data set
path = "karpathy/climbmix-400b-shuffle"  # repository on the hub, or a local copy of it
name = ""  # configuration (subset) of the data set
val_fraction = 0.0005  # fraction of the documents held out for validation
streaming = True  # read over the network without keeping a copy of the text
max_tokens = 1_000_000_000  # take this many from the start for training; 0: all

if __name__ == "__main__":
    prepare_hub_dataset(globals())
