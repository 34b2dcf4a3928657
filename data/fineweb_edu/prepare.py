"""FineWeb-Edu: educational web pages, the 10-billion-token sample.

    python data/fineweb_edu/prepare.py --num_proc=8

27 GB to download and about 20 GB of tokens on disk (twice that while writing).
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
import steady

steady.start_script()

from steady.prepare import prepare_hub_dataset

# data set
path = "HuggingFaceFW/fineweb-edu"  # repository on the hub, or a local copy of it
name = "sample-10BT"  # configuration (subset) of the data set
val_fraction = 0.0005  # fraction of the documents held out for validation

if __name__ == "__main__":
    prepare_hub_dataset(globals())
