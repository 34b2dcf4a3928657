"""TinyStories: short stories in the words of a small child.

    python data/tinystories/prepare.py --num_proc=8

2 million stories, about 0.5 billion tokens, 1 GB. 1% of the stories are held out.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
import steady

steady.start_script()

from steady.prepare import prepare_hub_dataset

# data set
path = "roneneldan/TinyStories"  # repository on the hub, or a local copy of it
name = ""  # configuration (subset) of the data set
val_fraction = 0.01  # fraction of the documents held out for validation

if __name__ == "__main__":
    prepare_hub_dataset(globals())
