"""Your own text as a data set.

    python data/text/prepare.py --input=book.txt --out=data/book --tokenizer=char
    python data/text/prepare.py --input="notes/**/*.md" --out=data/notes
    python data/text/prepare.py --input=code.jsonl.gz --out=data/code --tokenizer=bpe:8192
    python train.py config/train_shakespeare_char_cpu.py --dataset=notes --out_dir=out-notes

Every text file is a document, and its last tenth is held out for validation. Of .jsonl, .ndjson,
.json, .csv, .tsv and .parquet files every row's `text` is a document, and every tenth is held out.
What ends in .gz or .zst is unpacked. Documents end with the tokenizer's end-of-text token (byte:
256; char: the last id, but none where a single text file is all there is). Line ends stay as they
are, CR LF too, with every tokenizer. Files of any size are prepared in little memory; an
interrupted run, repeated, goes on where it was. In a glob `**` follows no links to folders, and no
file is read twice.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import steady

steady.start_script()

from configurator import configure
from steady import UserError
from steady.prepare import FILES, prepare_from_files
from steady.textfiles import files_matching

input = ""  # a file or a glob, or several with commas between
tokenizer = "gpt2"  # gpt2, char, byte, bpe:SIZE (new), hf:PATH_OR_HUB_ID, run:FOLDER
special_tokens = False  # read special tokens that texts spell as tokens: for chat data
val_fraction = 0.1  # share held out for validation
column = "text"  # the name of the text in a row
skip_bad_rows = False  # leave out rows without text, and say which; False: stop at the first
num_proc = 1  # processes that tokenize
out = ""  # folder to write to; default: data/text

configure(globals(), positional="")

if not input:
    raise UserError("no input: pass --input=FILE, or a glob such as --input='notes/**/*.md'")
folder = Path(out or Path(__file__).parent)
written = {(folder / name).resolve() for name in FILES}
paths: dict[Path, Path] = {}  # as given, by where they really are
for name in input.split(","):
    pattern = os.path.expanduser(name.strip())
    if not pattern:
        raise UserError(f"--input={input} has an empty name between its commas, or at an end")
    found = [(path.resolve(), path) for path in files_matching(pattern)]
    # what an earlier run has made of the text is no text
    found = [(place, path) for place, path in found if place not in written]
    if not found:
        hint = f": name its files, such as --input='{pattern}/**/*.txt'"
        raise UserError(f"no file matches --input={pattern}" + hint * Path(pattern).is_dir())
    for place, path in found:
        paths.setdefault(place, path)
files = list(paths.values())
prepare_from_files(folder, tokenizer, files, column, val_fraction, num_proc, skip_bad_rows,
                   special_tokens)  # fmt: skip
