"""Tiny Shakespeare, one token per character (nanoGPT's data set, the same split).

python data/shakespeare_char/prepare.py
python data/shakespeare_char/prepare.py --input=input.txt
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [os.path.abspath(f"{__file__}/../.."), os.path.abspath(f"{__file__}/../../..")]
import steady

steady.start_script()

from configurator import configure
from steady.prepare import split_text, write_dataset
from steady.tokenizer import CharTokenizer
from tiny_shakespeare import tiny_shakespeare

input = ""  # a local copy of the text; default: download it
out = ""  # folder to write to; default: this one

configure(globals(), positional="")

text = tiny_shakespeare(input)
write_dataset(out or Path(__file__).parent, CharTokenizer.train(text), split_text(text))
