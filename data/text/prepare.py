"""Your own text as a data set.

    python data/text/prepare.py --input=book.txt --tokenizer=char
    python data/text/prepare.py --input="notes/**/*.md" --out=data/notes
    python train.py config/train_shakespeare_char_cpu.py --dataset=notes

Every text file is a document, and its last tenth is held out for validation. Of .jsonl and .parquet
files every row's `text` is a document, and every tenth is held out. What ends in .gz is unpacked.
"""

import glob
import gzip
import json
import reprlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from steady.prepare import split_text, write_dataset
from steady.tokenizer import CharTokenizer, named

from configurator import configure

input = ""  # a file or a glob, or several with commas between
tokenizer = "gpt2"  # gpt2, char, byte, or hf:PATH_OR_HUB_ID
val_fraction = 0.1  # share held out for validation
column = "text"  # the text's name in .jsonl and .parquet files
out = ""  # folder to write to; default: data/text

configure(globals())

if not input:
    raise ValueError("no input: pass --input=FILE, or a glob such as --input='notes/**/*.md'")


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each row of a .jsonl or .parquet file is, and what it has for a text."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        batches = pyarrow.parquet.ParquetFile(path).iter_batches(columns=[column])
        values = (value for batch in batches for value in batch.column(0).to_pylist())
        yield from ((f"row {number}", value) for number, value in enumerate(values, 1))
        return
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number} is no JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no JSON object")
                yield f"line {number}", row[column]


def open_text(path: Path):
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig")


paths = []
for pattern in input.split(","):
    found = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not found:
        raise ValueError(f"no file matches --input={pattern}")
    paths += map(Path, found)
chosen = None if tokenizer == "char" else named(tokenizer)

splits: dict[str, list[str]] = {"train": [], "val": []}
for path in paths:
    try:
        if path.suffix == ".parquet" or path.name.endswith((".jsonl", ".jsonl.gz")):
            for i, (place, text) in enumerate(rows(path)):  # spread evenly over the rows
                if not isinstance(text, str):
                    raise ValueError(f"{place} has {reprlib.repr(text)} for {column!r}, no text")
                held_out = int((i + 1) * val_fraction) > int(i * val_fraction)
                splits["val" if held_out else "train"].append(text)
        else:
            with open_text(path) as file:
                for name, parts in split_text(file.read(), val_fraction).items():
                    splits[name] += parts
    except KeyError:
        raise ValueError(f"{path} has rows without {column!r}: pass --column=NAME") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path} as UTF-8 text: {error}") from None
    except Exception as error:  # not gzip, not JSON, not parquet, no such column
        raise ValueError(f"cannot read {path}: {error}") from None

if chosen is None:
    chosen = CharTokenizer.train("".join(text for texts in splits.values() for text in texts))
write_dataset(out or Path(__file__).parent, chosen, splits)
