"""OpenWebText, an open version of GPT-2's training set, in GPT-2's byte-pair encoding.

    python data/openwebtext/prepare.py --num_proc=8

8 million documents, about 9 billion tokens, 17 GB (and as much again while it is written). As in
nanoGPT 0.05% of the documents are held out.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from configurator import configure
from hub import prepare_from_hub
from tokenizer import named

path = "Skylion007/openwebtext"  # repository on the hub, or a local copy of it
name = ""  # its configuration
revision = "main"  # commit, tag or branch: name a commit for a data set that never changes
tokenizer = "gpt2"  # gpt2, byte, or hf:PATH_OR_HUB_ID
val_fraction = 0.0005  # share of the documents held out for validation
num_proc = 1  # processes that tokenize
streaming = False  # read over the network without keeping a copy of the text
out = ""  # folder to write to; default: this one

if __name__ == "__main__":
    configure(globals())
    prepare_from_hub(
        out or Path(__file__).parent, named(tokenizer), path, name, revision, val_fraction,
        num_proc, streaming,
    )  # fmt: skip
