"""OpenWebText, an open version of GPT-2's training set, in GPT-2's byte-pair encoding.

    python data/openwebtext/prepare.py --num_proc=8

8 million documents, about 9 billion tokens, 17 GB on disk (twice that while writing). 0.05% of the
documents are held out, as in nanoGPT.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
import steady

steady.start_script()

from steady.prepare import prepare_hub_dataset

# data set
path = "Skylion007/openwebtext"  # repository on the hub, or a local copy of it
name = ""  # configuration (subset) of the data set
val_fraction = 0.0005  # fraction of the documents held out for validation

if __name__ == "__main__":
    prepare_hub_dataset(globals())
