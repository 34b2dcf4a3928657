"""OpenWebText, an open version of GPT-2's training set, in GPT-2's byte-pair encoding.

    python data/openwebtext/prepare.py --num_proc=8

8 million documents, about 9 billion tokens, 17 GB (and as much again while it is written). As in
nanoGPT 0.05% of the documents are held out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import steady

steady.start_script()

from steady.prepare import prepare_hub_dataset

# data set
path = "Skylion007/openwebtext"  # repository on the hub, or a local copy of it
name = ""  # its configuration
val_fraction = 0.0005  # share of the documents held out for validation

if __name__ == "__main__":
    prepare_hub_dataset(globals())
