"""FineWeb-Edu, educational web pages, the sample of 10 billion tokens.

    python data/fineweb_edu/prepare.py --num_proc=8

About 20 GB as tokens (and as much again while it is written), 27 GB to download.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import steady

steady.start_script()

from steady.prepare import prepare_hub_dataset

# data set
path = "HuggingFaceFW/fineweb-edu"  # repository on the hub, or a local copy of it
name = "sample-10BT"  # its configuration
val_fraction = 0.0005  # share of the documents held out for validation

if __name__ == "__main__":
    prepare_hub_dataset(globals())
