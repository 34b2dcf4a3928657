"""Your own text as a data set.

    python data/text/prepare.py --input=book.txt --out=data/book --tokenizer=char
    python data/text/prepare.py --input="notes/**/*.md" --out=data/notes
    python data/text/prepare.py --input=code.jsonl.gz --out=data/code --tokenizer=bpe:8192
    python train.py config/train_shakespeare_char_cpu.py --dataset=notes --out_dir=out-notes

Each text file is a document, and its last tenth is held out for validation. In .jsonl, .ndjson,
.json, .csv, .tsv and .parquet files, the `text` of each row is a document, and every tenth row is
held out. Files ending in .gz or .zst are unpacked. Each document ends with the tokenizer's
end-of-text token (byte: 256; char: the last id, or none for a single text file). Empty documents
are left out. Line endings, including CR LF, are kept (but some tokenizers normalise them). Files of
any size need little memory, except for JSON lists. `**` in a glob does not follow links to folders,
and each file is read only once, under whatever names and links.
"""

import glob
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
import steady

steady.start_script()

from configurator import configure
from steady import UserError
from steady.prepare import FILES, prepare_from_files
from steady.textfiles import files_matching

input = ""  # required: a file or glob, or several separated by commas
tokenizer = "gpt2"  # gpt2, char, byte, bpe:SIZE (trained here), hf:PATH_OR_HUB_ID, run:FOLDER
special_tokens = False  # encode special tokens that are spelled out in the text (for chat data)
val_fraction = 0.1  # fraction held out for validation
column = "text"  # name of the column with the text
skip_bad_rows = False  # skip and report bad rows; False: stop at the first
num_proc = 1  # number of tokenizer threads
out = ""  # folder to write to; default: data/text

configure(globals(), positional="")

if not input:
    raise UserError("no input: pass --input=FILE, or a glob such as --input='notes/**/*.md'")


def identity(path: Path) -> object:
    """The same for all names of a file: its resolved path, or its inode if it has hard links."""
    place = os.path.realpath(path)  # Path.resolve fails on links that form a loop
    if os.path.exists(place) and (status := os.stat(place)).st_nlink > 1:
        return status.st_dev, status.st_ino
    return place


folder = Path(out or Path(__file__).parent)
written = {identity(folder / name) for name in FILES}
paths: dict[object, Path] = {}  # identity: path as given
whole = os.path.isfile(os.path.expanduser(input))  # a name with a comma
for name in [glob.escape(input)] if whole else input.split(","):
    pattern = os.path.expanduser(name if whole else name.strip())
    if not pattern:
        raise UserError(f"--input={input} has an empty name between its commas, or at either end")
    found = [(identity(path), path) for path in files_matching(pattern)]
    # skip the output of an earlier run
    found = [(file, path) for file, path in found if file not in written]
    if not found:
        files = shlex.quote(f"{glob.escape(pattern)}/**/*.txt")
        hint = f": name its files, such as --input={files}"
        raise UserError(f"no file matches --input={pattern}" + hint * Path(pattern).is_dir())
    for file, path in found:
        paths.setdefault(file, path)
files = list(paths.values())
prepare_from_files(folder, tokenizer, files, column, val_fraction, num_proc, skip_bad_rows,
                   special_tokens)  # fmt: skip
