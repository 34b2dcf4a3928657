"""The Python standard library's own sources as a character-level data set: no download.

    python data/stdlib_char/prepare.py

It takes the top-level modules that are pure ASCII: about 160 files with 4 to 5 million characters,
depending on the Python version. Every tenth file is held out for validation.
"""

import os
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
import steady

steady.start_script()

from configurator import configure
from steady import UserError
from steady.prepare import write_dataset
from steady.tokenizer import CharTokenizer

out = ""  # folder to write to; default: this one

configure(globals(), positional="")

sources = []
for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
    content = path.read_bytes()
    if content.isascii():
        sources.append(content.decode("ascii").replace("\r\n", "\n"))
if not sources:
    raise UserError("this Python has no sources of its standard library")

splits = {
    "train": ["".join(source for i, source in enumerate(sources) if i % 10 != 9)],
    "val": ["".join(source for i, source in enumerate(sources) if i % 10 == 9)],
}
write_dataset(out or Path(__file__).parent, CharTokenizer.train("".join(sources)), splits)
