"""Write documents.jsonl, the data of the task: 200 pieces of data/stdlib_char's held-out text.

python dev/harness/documents.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import steady

steady.start_script()


import numpy as np

from configurator import configure
from steady.dataloader import read_meta
from steady.tokenizer import from_meta

configure(globals(), positional="")
folder = ROOT / "data" / "stdlib_char"
ids = np.fromfile(folder / "val.bin", dtype="uint16")
tokenizer = from_meta(read_meta(folder))
starts = np.linspace(0, len(ids) - 256, 200).astype(int)
with open(Path(__file__).parent / "documents.jsonl", "w", encoding="utf-8") as file:
    for start in starts:
        text = tokenizer.decode(ids[start : start + 256].tolist())
        file.write(json.dumps({"text": text}) + "\n")
