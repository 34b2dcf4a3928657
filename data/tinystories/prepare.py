"""TinyStories, short stories in the words of a small child.

    python data/tinystories/prepare.py --num_proc=8

2 million stories, about 0.5 billion tokens, 1 GB. One in a hundred is held out.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from configurator import configure
from hub import prepare_from_hub
from tokenizer import named

path = "roneneldan/TinyStories"  # repository on the hub, or a local copy of it
name = ""  # its configuration
revision = "main"  # commit, tag or branch: name a commit for a data set that never changes
tokenizer = "gpt2"  # gpt2, byte, or hf:PATH_OR_HUB_ID
val_fraction = 0.01  # share of the documents held out for validation
num_proc = 1  # processes that tokenize
streaming = False  # read over the network without keeping a copy of the text
out = ""  # folder to write to; default: this one

if __name__ == "__main__":
    configure(globals())
    prepare_from_hub(
        out or Path(__file__).parent, named(tokenizer), path, name, revision, val_fraction,
        num_proc, streaming,
    )  # fmt: skip
