"""Files of your own as documents: rows of .jsonl and .parquet, anything else as a text of its own.

A file is read in parts, so that memory stays constant whatever its size, and so that an interrupted
preparation goes on with the parts that are missing. Which rows are held out depends on their number
in the file and on the file's among all. What ends in .gz is unpacked as it is read; such a file is
one part.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from steady import UserError

PART_BYTES = 2**26  # of input; a part takes seconds to minutes
READ_BYTES = 2**22  # read at a time
GOLDEN = 0.618034  # its multiples spread evenly: rows of many small files are held out too


class Part(NamedTuple):
    """A piece of a file that is read on its own."""

    path: Path
    kind: str  # jsonl, parquet or text
    start: int  # first byte of a .jsonl, first row group of a .parquet file
    stop: int  # one after the last
    first_row: int  # rows (lines of a .jsonl file) before it
    phase: float  # in [0, 1): how much of a row is held out before the file's first
    size: int  # bytes


def files_matching(pattern: str) -> list[Path]:
    """The files of that name, or that match it as a glob, sorted.

    Hidden ones must be asked for, as in a shell. `**` follows no links to folders: a link to a
    folder above it would never end.
    """
    given = Path(pattern)
    if given.exists():
        return [given] if given.is_file() else []
    parts = given.relative_to(given.anchor).parts
    parts = [part if part == "**" else part.replace("**", "*") for part in parts]
    parts += ["*"] * (parts[-1] == "**")
    matches, asked = Path(given.anchor).glob("/".join(parts)), set(parts)
    return sorted(
        path for path in matches
        if path.is_file() and not any(p[0] == "." and p not in asked for p in path.parts)
    )  # fmt: skip


def plan(paths: list[Path]) -> list[list[Part]]:
    """The parts of all files, grouped so that a group has PART_BYTES or is a single part.

    Raises UserError that names a file that cannot be read.
    """
    groups: list[list[Part]] = []
    for i, path in enumerate(paths):
        try:
            parts = list(parts_of(path, i * GOLDEN % 1))
        except Exception as error:
            raise UserError(f"cannot read {path}: {error}") from None
        for part in parts:
            if not groups or sum(p.size for p in groups[-1]) + part.size > PART_BYTES:
                groups.append([])
            groups[-1].append(part)
    return groups


def parts_of(path: Path, phase: float) -> Iterator[Part]:
    """A file's parts: lines of a .jsonl, row groups of a .parquet; others have one."""
    size, name = path.stat().st_size, path.name.lower()
    if name.endswith(".parquet"):
        import pyarrow.parquet

        metadata, row = pyarrow.parquet.ParquetFile(path).metadata, 0
        for i in range(metadata.num_row_groups):
            group = metadata.row_group(i)
            yield Part(path, "parquet", i, i + 1, row, phase, group.total_byte_size)
            row += group.num_rows
    elif name.endswith(".jsonl"):
        borders = [*line_borders(path), (size, 0)]
        for (start, row), (stop, _) in zip(borders, borders[1:], strict=False):
            yield Part(path, "jsonl", start, stop, row, phase, stop - start)
    else:
        kind = "jsonl" if name.endswith(".jsonl.gz") else "text"
        yield Part(path, kind, 0, size, 0, phase, size)


def line_borders(path: Path) -> list[tuple[int, int]]:
    """Where lines begin, about every PART_BYTES: (byte offset, lines before it)."""
    borders, offset, lines = [(0, 0)], 0, 0
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            cut = block.rfind(b"\n") + 1
            if cut and offset + cut - borders[-1][0] >= PART_BYTES:
                borders.append((offset + cut, lines + block.count(b"\n", 0, cut)))
            lines += block.count(b"\n")
            offset += len(block)
    return borders if borders[-1][0] < offset else borders[:-1] or borders


def documents(
    part: Part, column: str, val_fraction: float, skipped: list[str] | None
) -> Iterator[tuple[str, str, bool]]:
    """The text of a part as (train or val, text, whether the document ends with it).

    Of rows the `val_fraction` is spread evenly; of a text file the end is held out. Rows without
    text are named in `skipped`; without such a list they raise ValueError with file and line, as
    does a file that cannot be read.
    """
    try:
        if part.kind == "text":
            yield from split_file(part.path, val_fraction)
            return
        rows = parquet_rows if part.kind == "parquet" else json_rows
        for row, text, problem in rows(part, column):
            if problem is None:
                before, after = (n * val_fraction + part.phase for n in (row, row + 1))
                held_out = int(after) > int(before)
                yield "val" if held_out else "train", text, True
                continue
            where = f"{part.path}, {'row' if rows is parquet_rows else 'line'} {row + 1}: {problem}"
            if skipped is None:
                raise BadRow(f"{where} (--skip_bad_rows=True leaves such rows out)")
            skipped.append(where)
    except BadRow as error:
        raise UserError(str(error)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {part.path} as UTF-8 text: {error}") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:  # not gzip, damaged, not parquet
        raise UserError(f"cannot read {part.path}: {error}") from None


class BadRow(Exception):
    """A row that holds no text."""


def json_rows(part: Part, column: str) -> Iterator[tuple[int, str, str | None]]:
    """(number, text, what is wrong) of every line that is not blank."""
    packed = is_packed(part.path)
    with gzip.open(part.path) if packed else open(part.path, "rb") as file:
        file.seek(part.start)
        left = part.stop - part.start
        for row, line in enumerate(file, part.first_row):
            if line.strip():
                yield row, *text_in(line, column)
            left -= len(line)
            if left <= 0 and not packed:
                break


def text_in(line: bytes, column: str) -> tuple[str, str | None]:
    """The text in a line of JSON, and what is wrong with it or None."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
        return "", f"no JSON ({error})"
    if not isinstance(row, dict):
        return "", f"a {type(row).__name__}, not an object with {column!r}"
    if column not in row:
        return "", f"no {column!r}, only {', '.join(row) or '{}'}: pass --column=NAME"
    if b"\\u" in line and isinstance(row[column], str):
        try:
            row[column].encode()
        except UnicodeEncodeError as error:
            return "", f"half a character ({error})"
    return check_text(row[column], column)


def check_text(text: object, column: str) -> tuple[str, str | None]:
    if isinstance(text, str):
        return text, None
    return "", f"{column!r} is {'null' if text is None else type(text).__name__}, not text"


def parquet_rows(part: Part, column: str) -> Iterator[tuple[int, str, str | None]]:
    """(number, text, what is wrong) of every row."""
    import pyarrow.parquet

    file, row = pyarrow.parquet.ParquetFile(part.path), part.first_row
    if column not in file.schema_arrow.names:
        found = ", ".join(file.schema_arrow.names)
        raise BadRow(f"{part.path} has rows without {column!r}, only {found}: pass --column=NAME")
    groups = range(part.start, part.stop)
    for batch in file.iter_batches(batch_size=1000, row_groups=groups, columns=[column]):
        for text in batch.column(0).to_pylist():
            yield row, *check_text(text, column)
            row += 1


def split_file(path: Path, val_fraction: float) -> Iterator[tuple[str, str, bool]]:
    """A text file as (split, piece, whether it is the last); the last `val_fraction` of its
    characters is the validation set."""
    with open_text(path) as file:
        cut = int(sum(map(len, iter(lambda: file.read(READ_BYTES), ""))) * (1 - val_fraction))
    held = {"train": "", "val": ""}
    with open_text(path) as file:
        while block := file.read(READ_BYTES):
            here = min(cut, len(block))
            cut -= here
            for split, piece in (("train", block[:here]), ("val", block[here:])):
                held[split] += piece
                if len(held[split]) >= READ_BYTES:
                    end = safe_border(held[split])
                    yield split, held[split][:end], False
                    held[split] = held[split][end:]
    for split, rest in held.items():
        yield split, rest, True


def safe_border(text: str) -> int:
    """Before the last space that follows another character, where GPT-2's tokenizer ends a token
    anyway; the end if there is none, or a file without spaces would be held whole."""
    parts = text.rsplit(maxsplit=1)
    return len(parts[0]) if len(parts) == 2 else len(text)


def is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def open_text(path: Path) -> IO[str]:
    opener = gzip.open if is_packed(path) else open
    return opener(path, "rt", encoding="utf-8-sig")
