"""Your own files as documents: the rows of JSON, CSV and Parquet files, and whole text files.

| name | documents |
|---|---|
| .jsonl, .ndjson, .json | every row: an object per line, or a list of objects |
| .csv, .tsv | every row below the header |
| .parquet | every row |
| others | the whole file, which must be UTF-8 text |

All but Parquet may be compressed as .gz or .zst. Files are read piece by piece, which keeps memory
constant; only a JSON list is read whole. The choice of held-out rows depends on the row's number in
the file and the file's number.
"""

import codecs
import contextlib
import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from steady import UserError
from steady.folder import require_file
from steady.output import shown
from steady.tokenizer import Tokenizer, cut_text

READ_SIZE = 2**22  # bytes or characters read at a time
GOLDEN = 0.618034  # its multiples spread evenly, so small files have held-out rows too
PACKED = {".gz": "gzip", ".zst": "zstd"}
ACCEPTED = ".jsonl, .ndjson, .json, .csv, .tsv (each also .gz or .zst), .parquet, or UTF-8 text"

Row = tuple[str, str, str | None]  # place for messages, text, and problem or None


class Piece(NamedTuple):
    """A document, or a part of a long text."""

    split: str  # train or val
    text: str
    where: str  # for messages
    problem: str | None = None  # the reason why a row has no text
    before: str = ""  # the text around a part, which can affect its ids; empty at both ends
    after: str = ""


def files_matching(pattern: str) -> list[Path]:
    """The file of that name, or the files that match it as a glob, sorted.

    Hidden files need a pattern that begins with a dot, as in a shell. `**` does not follow symbolic
    links to folders: a link to a parent folder would never end.
    """
    given = Path(pattern)
    if given.exists() or given.is_symlink():
        return [given] if not given.is_dir() else []
    parts = given.relative_to(given.anchor).parts
    parts = [part if part == "**" else part.replace("**", "*") for part in parts]
    parts += ["*"] * (parts[-1] == "**")

    def hidden(part: str) -> bool:
        """Whether part of a path begins with a dot and matches no part of the pattern that does."""
        return part[0] == "." and not any(p[0] == "." and fnmatch(part, p) for p in parts)

    def matches(n: int) -> list[Path]:
        """The paths that match the first n parts of the pattern."""
        found = Path(given.anchor).glob("/".join(parts[:n]))
        return [path for path in found if not any(map(hidden, path.parts))]

    for n in range(1, len(parts)):
        needed = os.X_OK | (os.R_OK if re.search(r"[*?\[]", parts[n]) else 0)  # to list it
        for folder in matches(n):
            readable = folder.name == "lost+found" or os.access(folder, needed)
            if not readable and folder.is_dir():  # glob would pass over it
                raise UserError(f"--input={pattern}: no permission to read the folder {folder}")
    return sorted(path for path in matches(len(parts)) if not path.is_dir())


def pieces_of(
    path: Path, number: int, column: str, val_fraction: float, tokenizer: Tokenizer
) -> Iterator[Piece]:
    """The documents of the file with that number. A text file's last `val_fraction` is held out; in
    other files, evenly spread rows.

    tokenizer: cuts long texts. Raises UserError with the file's name if it cannot be read.
    """
    rows_of = ROWS.get(unpacked_suffix(path))
    if rows_of is None:
        yield from text_pieces(path, val_fraction, tokenizer)
        return
    with reading(path) as file:
        phase = number * GOLDEN % 1
        for row, (where, text, problem) in enumerate(rows_of(path, file, column)):
            before, after = (n * val_fraction + phase for n in (row, row + 1))
            split = "val" if int(after) > int(before) else "train"
            yield Piece(split, text, f"{path}, {where}", problem)


def unpacked_suffix(path: Path) -> str:
    """The file name's suffix without .gz or .zst, in lower case."""
    inner = path.with_suffix("") if path.suffix.lower() in PACKED else path
    return inner.suffix.lower()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The unpacked content of a file. Errors inside the block name the file."""
    try:
        with open(path, "rb") as file:
            if packing := PACKED.get(path.suffix.lower()):
                import pyarrow

                file = io.BufferedReader(pyarrow.input_stream(file, packing), READ_SIZE)
            yield file
    except UserError:
        raise
    except UnicodeError as error:
        raise UserError(
            f"cannot read {path} as UTF-8 text: {getattr(error, 'reason', error)}. Use {ACCEPTED}; "
            "unpack archives, and convert other encodings with iconv"
        ) from None
    except (OSError, EOFError, ValueError, NotImplementedError, RecursionError) as error:
        # damaged, of an unsupported kind, or under a wrong name
        raise UserError(f"cannot read {path}: {error}") from None


def check_start(path: Path) -> None:
    """Raises UserError unless a file is regular and begins with text. Rows of JSON and tables must
    have the name of their kind."""
    require_file(path)
    suffix = unpacked_suffix(path)
    if path.suffix.lower() in PACKED and not path.stat().st_size:  # an interrupted download
        raise UserError(f"{path} is empty: download it again")
    if suffix == ".parquet":
        return
    with reading(path) as file:
        if suffix in ROWS:
            if b"\0" in file.read(2**16):
                raise UnicodeError("a NUL character")  # UTF-16, for example
            return
        start = next(blocks(io.TextIOWrapper(file, "utf-8-sig"), 2**16), "")
    rows = re.match(r'\[?\s*\{\s*"[^"\n]*"\s*:', start.lstrip())
    # e.g. data.csv?download=true, or data.csv.bak
    table = re.search(r"(\.csv|\.tsv|\.tab)(?=[?~.]|$)", path.name.lower())
    if (rows or table) and suffix not in (".txt", ".md"):
        held = "rows of JSON" if rows else "a table"
        name = ".jsonl" if rows else ".csv" if table[1] == ".csv" else ".tsv"
        packed = path.suffix if path.suffix.lower() in PACKED else ""
        raise UserError(
            f"{path} holds {held}: name it {name}{packed}, or .txt{packed} to read it as text"
        )


def text_pieces(path: Path, val_fraction: float, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The training document of a text file, which is its beginning, and the validation document,
    which is its last `val_fraction` in characters."""
    with reading(path) as file:
        length = sum(map(len, blocks(io.TextIOWrapper(file, "utf-8-sig", newline=""))))
    cut = int(length * (1 - val_fraction))
    with reading(path) as file:
        whole = io.TextIOWrapper(file, "utf-8-sig", newline="")  # line ends stay as they are
        for split, count in (("train", cut), ("val", length - cut)):
            for before, text, after in cut_text(tokenizer, blocks(whole, count)):
                yield Piece(split, text, str(path), None, before, after)


def blocks(file: TextIO, count: int = sys.maxsize) -> Iterator[str]:
    """The next `count` characters. Raises UnicodeError for NULs, which binary files have."""
    while block := file.read(min(READ_SIZE, count)):
        if "\0" in block:
            raise UnicodeError("a NUL character")
        count -= len(block)
        yield block


def json_rows(path: Path, file: BinaryIO, column: str) -> Iterator[Row]:
    if file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        # bytes that are not UTF-8 become surrogates, which make bad rows
        text = file.read().decode("utf-8-sig", errors="surrogateescape")
        for row, value in enumerate(json.loads(text, strict=False), 1):  # takes control characters
            yield f"row {row}", *text_in(value, column)
        return
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:  # decode here: json.loads accepts encoded surrogates
            text, problem = text_in(json.loads(line.decode("utf-8-sig")), column)
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
            text, problem = "", f"not JSON ({error})"
            if number == 1 and ".json" in path.suffixes:
                problem += "; a .json file must have one row per line or be a list of rows"
        yield f"line {number}", text, problem


def text_in(row: Any, column: str) -> tuple[str, str | None]:
    """The text in a row of JSON, and the problem with it or None."""
    if not isinstance(row, dict):
        return "", f"a {type(row).__name__}, not an object with {column!r}"
    if column not in row:
        remedy = "pass --column=NAME"
        if row and not any(isinstance(value, str) for value in row.values()):  # a chat's messages
            remedy = "write each row as a text first (docs/pretrained.md)"
        return "", f"no {column!r}, only {shown(', '.join(row) or '{}')}: {remedy}"
    return checked(row[column], column)


def checked(text: object, column: str) -> tuple[str, str | None]:
    """The text in a row, and the problem with it or None."""
    if not isinstance(text, str):
        return "", f"{column!r} is {'null' if text is None else type(text).__name__}, not text"
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        return "", f"not UTF-8 at character {error.start + 1}"
    return text, None


def csv_rows(path: Path, file: BinaryIO, column: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    # bytes that are not UTF-8 become surrogates, which make bad rows
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    # strict: otherwise an unclosed quote merges all following rows into one
    delimiter = "\t" if unpacked_suffix(path) == ".tsv" else ","
    reader, place = csv.reader(text, delimiter=delimiter, strict=True), "header"
    try:
        header = next(reader, [])
        require_column(path, column, header)
        place = f"row that starts at line {reader.line_num + 1}"
        for fields in reader:
            found, problem = "", f"{len(fields)} fields, not {len(header)}: check the quotes"
            if len(fields) == len(header):
                found, problem = checked(fields[header.index(column)], column)
            # most .tsv files have no quoting: such quotes belong to the text, and swallow rows
            several = [field for field in fields if "\n" in field]
            if delimiter == "\t" and any("\t" in f or len(header) == 1 for f in several):
                raise csv.Error("a quoted cell of a .tsv file may not have line breaks")
            if fields:
                yield f"line {reader.line_num}", found, problem
            place = f"row that starts at line {reader.line_num + 1}"
    except csv.Error as error:  # where the next row begins is not known
        raise ValueError(f"{error} in the {place}: check the quotes") from None


def require_column(path: Path, column: str, names: list[str]) -> None:
    """Raises UserError unless one column has that name."""
    if (count := names.count(column)) != 1:
        raise UserError(
            f"{path} has {count or 'no'} columns named {column!r} among {shown(str(names))}: pass "
            "--column=NAME, or separate columns by commas (by tabs in a .tsv file)"
        )


def parquet_rows(path: Path, file: BinaryIO, column: str) -> Iterator[Row]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
    require_column(path, column, table.schema_arrow.names)
    batches = table.iter_batches(batch_size=1000, columns=[column])
    for row, value in enumerate((value for batch in batches for value in batch.column(column)), 1):
        try:
            text, problem = checked(value.as_py(), column)
        except UnicodeDecodeError as error:  # in one row
            text, problem = "", f"not UTF-8 ({error})"
        yield f"row {row}", text, problem


ROWS = {".jsonl": json_rows, ".ndjson": json_rows, ".json": json_rows, ".csv": csv_rows,
        ".tsv": csv_rows, ".parquet": parquet_rows}  # fmt: skip
