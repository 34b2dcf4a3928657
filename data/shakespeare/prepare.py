"""Tiny Shakespeare in GPT-2's byte-pair encoding (nanoGPT's data set, the same split).

python data/shakespeare/prepare.py
python data/shakespeare/prepare.py --tokenizer=byte --out=data/shakespeare_byte
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [os.path.abspath(f"{__file__}/../.."), os.path.abspath(f"{__file__}/../../..")]
import steady

steady.start_script()

from configurator import configure
from steady.prepare import split_text, write_dataset
from steady.tokenizer import load_tokenizer
from tiny_shakespeare import tiny_shakespeare

tokenizer = "gpt2"  # gpt2, byte, or hf:PATH_OR_HUB_ID
input = ""  # a local copy of the text; default: download it
out = ""  # folder to write to; default: this one

configure(globals(), positional="")

splits = split_text(tiny_shakespeare(input))
write_dataset(out or Path(__file__).parent, load_tokenizer(tokenizer), splits)
