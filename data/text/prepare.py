"""Your own text as a data set.

    python data/text/prepare.py --input=book.txt --tokenizer=char
    python data/text/prepare.py --input="notes/**/*.md" --out=data/notes
    python train.py config/train_shakespeare_char_cpu.py --dataset=notes

Every file is a document, and the last tenth of every file is held out for validation.
"""

import glob
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from configurator import configure
from tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer
from writer import split_text, write_dataset

input = ""  # a file or a glob, or several with commas between
tokenizer = "gpt2"  # gpt2, char or byte
val_fraction = 0.1  # share of every file held out for validation
out = ""  # folder to write to; default: data/text

configure(globals())

if not input:
    raise ValueError("no input: pass --input=FILE, or a glob such as --input='notes/**/*.md'")
if tokenizer not in ("gpt2", "char", "byte"):
    raise ValueError(f"unknown tokenizer={tokenizer!r}: use gpt2, char or byte")
if not 0 < val_fraction < 1:
    raise ValueError(f"val_fraction={val_fraction} must be above 0 and below 1")

documents = []
for pattern in input.split(","):
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not paths:
        raise ValueError(f"no file matches --input={pattern}")
    for path in paths:
        try:
            documents.append(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path} as UTF-8 text: {error}") from None

if tokenizer == "char":
    chosen = CharTokenizer.train("".join(documents))
else:
    chosen = GPT2Tokenizer() if tokenizer == "gpt2" else ByteTokenizer()
splits = [split_text(document, val_fraction) for document in documents]
write_dataset(
    out or Path(__file__).parent,
    chosen,
    {name: [part for split in splits for part in split[name]] for name in ("train", "val")},
)
