"""Your own files as documents: the rows of JSON, CSV and Parquet files, and whole text files.

| name | documents |
|---|---|
| .jsonl, .ndjson, .json | every row: an object per line, or a list of objects |
| .csv, .tsv | every row below the header |
| .parquet | every row |
| others | the whole file, which must be UTF-8 text |

All but Parquet may be compressed as .gz or .zst. A file is read in parts, which keeps memory
constant and lets an interrupted preparation continue with the missing parts. The choice of held-out
rows depends on the row's number in the file and the file's number.
"""

import codecs
import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from steady import UserError
from steady.output import shown, waiting
from steady.tokenizer import WINDOW

PART_BYTES = 2**24  # of input; a part takes seconds
READ_BYTES = 2**22  # read at a time
GOLDEN = 0.618034  # its multiples spread evenly, so small files have held-out rows too
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
         ".parquet": "parquet"}  # fmt: skip
PACKED = {".gz": "gzip", ".zst": "zstd"}
ACCEPTED = ".jsonl, .ndjson, .json, .csv, .tsv (each also .gz or .zst), .parquet, or UTF-8 text"


class Part(NamedTuple):
    """A piece of a file that can be read independently."""

    path: Path
    kind: str  # json, csv, parquet or text
    start: int  # first byte (after decompression, of a text); first row group of a Parquet file
    stop: int  # one after the last
    first_row: int = 0  # number of rows (lines of JSON) before it
    phase: float = 0.0  # in [0, 1): fraction of a held-out row carried into the file
    size: int = 0  # bytes
    split: str = ""  # text only: train or val
    begins: bool = True  # text only: whether the document begins with this part
    ends: bool = True  # text only: whether the document ends with this part


def files_matching(pattern: str) -> list[Path]:
    """The file of that name, or the files that match it as a glob, sorted.

    Hidden files must be named explicitly, as in a shell. `**` does not follow symbolic links to
    folders: a link to a parent folder would never end.
    """
    given = Path(pattern)
    if given.exists():
        if not given.is_file() and not given.is_dir():
            raise UserError(f"--input={pattern} is not a regular file")
        return [given] if given.is_file() else []
    parts = given.relative_to(given.anchor).parts
    parts = [part if part == "**" else part.replace("**", "*") for part in parts]
    parts += ["*"] * (parts[-1] == "**")
    matches, asked = Path(given.anchor).glob("/".join(parts)), set(parts)
    return sorted(
        path for path in matches
        if path.is_file() and not any(p[0] == "." and p not in asked for p in path.parts)
    )  # fmt: skip


def plan(
    paths: list[Path], val_fraction: float, seam: Callable[[str], int | None]
) -> list[list[Part]]:
    """The parts of all files, in groups of up to PART_BYTES, or of a single larger part.

    seam: the tokenizer's method that finds a place to cut a long text.

    Raises UserError with the name of a file that cannot be read or is not accepted.
    """
    groups: list[list[Part]] = []
    for i, path in enumerate(paths):
        try:
            parts = list(parts_of(path, val_fraction, i * GOLDEN % 1, seam))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"cannot read {path}: {error}") from None
        for part in parts:
            if not groups or sum(p.size for p in groups[-1]) + part.size > PART_BYTES:
                groups.append([])
            groups[-1].append(part)
    return groups


def parts_of(
    path: Path, val_fraction: float, phase: float, seam: Callable[[str], int | None]
) -> Iterator[Part]:
    """A file's parts: lines of JSON, row groups of Parquet, or text between seams. The rows of a
    compressed file are one part."""
    size, packed = path.stat().st_size, is_packed(path)
    kind = KINDS.get((path.with_suffix("") if packed else path).suffix.lower(), "text")
    if kind == "parquet":
        import pyarrow.parquet

        metadata, row = pyarrow.parquet.ParquetFile(path).metadata, 0
        for i in range(metadata.num_row_groups):
            group = metadata.row_group(i)
            yield Part(path, kind, i, i + 1, row, phase, group.total_byte_size)
            row += group.num_rows
        return
    check_text(path, kind)
    if kind == "json" and not packed and not holds_list(path):
        borders = [*line_borders(path), (size, 0)]
        for (start, row), (stop, _) in zip(borders, borders[1:], strict=False):
            yield Part(path, kind, start, stop, row, phase, stop - start)
    elif kind == "text":
        yield from text_parts(path, val_fraction, seam)
    else:
        yield Part(path, kind, 0, size, 0, phase, size)


def check_text(path: Path, kind: str) -> None:
    """Raises UserError unless a file begins as text, and not as rows under a wrong file name."""
    with open_bytes(path) as file:
        beginning = file.read(2**16)
    problem, first_row = None, None
    if b"\0" in beginning:
        problem = "NUL characters"
    elif kind == "text":
        try:
            text = codecs.getincrementaldecoder("utf-8-sig")().decode(beginning)
        except UnicodeDecodeError as error:
            problem = f"bytes that are not UTF-8 ({error.reason} at byte {error.start})"
        else:
            with contextlib.suppress(ValueError, RecursionError):
                first, ends, _ = text.partition("\n")
                cut = not ends and re.match(r'\s*\{\s*"[^"]*"\s*:', first)  # a longer row
                first_row = {} if cut else json.loads(first)
    if problem:
        raise UserError(
            f"{path} is not text: it has {problem}. Use {ACCEPTED}; unpack archives, and convert "
            "other encodings with iconv"
        )
    if isinstance(first_row, dict | list) and path.suffix.lower() not in (".txt", ".md"):
        raise UserError(f"{path} holds rows of JSON: name it .jsonl, or .txt to read it as text")


def holds_list(path: Path) -> bool:
    """Whether a JSON file is a list of rows."""
    with open_bytes(path) as file:
        while block := file.read(2**16):
            if block := block.removeprefix(codecs.BOM_UTF8).lstrip():
                return block[:1] == b"["
    return False


def line_borders(path: Path) -> list[tuple[int, int]]:
    """Line starts, about one every PART_BYTES, as (byte offset, number of lines before it)."""
    borders, offset, lines = [(0, 0)], 0, 0
    with open(path, "rb") as file:
        blocks = iter(lambda: file.read(READ_BYTES), b"")
        for block in waiting(blocks, path.stat().st_size // READ_BYTES + 1, f"reading {path.name}"):
            cut = block.rfind(b"\n") + 1
            if cut and offset + cut - borders[-1][0] >= PART_BYTES:
                borders.append((offset + cut, lines + block.count(b"\n", 0, cut)))
            lines += block.count(b"\n")
            offset += len(block)
    return borders if borders[-1][0] < offset else borders[:-1] or borders


def text_parts(
    path: Path, val_fraction: float, seam: Callable[[str], int | None]
) -> Iterator[Part]:
    """The parts of the training document, which is the beginning of a text, and of the validation
    document, which is its last `val_fraction` in bytes, cut between characters."""
    size, packed = path.stat().st_size, is_packed(path)
    total = size
    with open_bytes(path) as file:
        begin = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        if packed:
            total = 0
            file = open_bytes(path)
            while block := file.read(READ_BYTES):
                total += len(block)
        # move the cut to the start of the next character
        cut = begin + int((total - begin) * (1 - val_fraction))
        file = open_bytes(path)
        skip(file, cut)
        cut += next((i for i, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)
        share = size / max(total, 1)
        for split, start, stop in (("train", begin, cut), ("val", cut, total)):
            borders = [start]
            while not packed and borders[-1] + 2 * PART_BYTES < stop:
                reach = borders[-1] + PART_BYTES - 2 * WINDOW
                file.seek(reach)
                window, begins = window_around(file.read(4 * WINDOW), 2 * WINDOW)
                at = seam(window)
                if at is None:  # no seam here: one long part
                    break
                borders.append(reach + begins + len(window[:at].encode()))
            for first, last in zip(borders, [*borders[1:], stop], strict=True):
                yield Part(path, "text", first, last, split=split, begins=first == start,
                           ends=last == stop, size=int((last - first) * share))  # fmt: skip


def window_around(block: bytes, middle: int) -> tuple[str, int]:
    """Up to WINDOW characters on each side of the byte `middle` of a block of text, and the byte of
    the block where they begin."""
    while block[middle] & 0xC0 == 0x80:
        middle -= 1
    before = block[:middle].decode("utf-8", errors="ignore")[-WINDOW:]
    after = block[middle:].decode("utf-8", errors="ignore")[:WINDOW]
    n = min(len(before), len(after))
    before = before[len(before) - n :]
    return before + after[:n], middle - len(before.encode())


class BadRow(Exception):
    """A row without text."""


def rows(part: Part, column: str) -> Iterator[tuple[int, str, str, str | None]]:
    """Every row as (number in the file, name for messages, text, problem or None).

    Raises UserError with the file's name if it cannot be read.
    """
    readers = {"json": json_rows, "csv": csv_rows, "parquet": parquet_rows}
    try:
        yield from readers[part.kind](part, column)
    except BadRow as error:
        raise UserError(f"{part.path} has {error}") from None
    except (OSError, EOFError, ValueError, csv.Error) as error:  # damaged, or a wrong name
        raise UserError(f"cannot read {part.path}: {error}") from None


def json_rows(part: Part, column: str) -> Iterator[tuple[int, str, str, str | None]]:
    if holds_list(part.path):
        with open_bytes(part.path) as file:
            # bytes that are not UTF-8 become surrogates, which make bad rows
            text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape")
            row = -1
            try:
                for row, value in enumerate(list_items(text)):
                    yield row, f"row {row + 1}", *text_in(value, column)
            except (ValueError, RecursionError) as error:  # the start of the next row is unknown
                raise ValueError(f"row {row + 2} is not JSON: {error}") from None
        return
    packed = is_packed(part.path)
    with open_bytes(part.path) as file:
        file.seek(part.start) if not packed else None
        left = part.stop - part.start
        for row, line in enumerate(file, part.first_row):
            if line.strip():
                text, problem = text_in_line(line, column)
                if problem and row == 0 and ".json" in part.path.suffixes:
                    problem += "; a .json file must have one row per line or be a list of rows"
                yield row, f"line {row + 1}", text, problem
            left -= len(line)
            if left <= 0 and not packed:
                break


def text_in_line(line: bytes, column: str) -> tuple[str, str | None]:
    try:  # decode here: json.loads accepts encoded surrogates
        return text_in(json.loads(line.decode("utf-8-sig")), column)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
        return "", f"not JSON ({error})"


def text_in(row: Any, column: str) -> tuple[str, str | None]:
    """The text in a row of JSON, and the problem with it or None."""
    if not isinstance(row, dict):
        return "", f"a {type(row).__name__}, not an object with {column!r}"
    if column not in row:
        return "", f"no {column!r}, only {shown(', '.join(row) or '{}')}: pass --column=NAME"
    return checked(row[column], column)


def checked(text: object, column: str) -> tuple[str, str | None]:
    """The text in a row, and the problem with it or None."""
    if not isinstance(text, str):
        return "", f"{column!r} is {'null' if text is None else type(text).__name__}, not text"
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # surrogateescape's form of other bytes
            return "", f"not UTF-8 (byte 0x{ord(text[error.start]) - 0xDC00:02x})"
        return "", f"half a character ({error})"
    return text, None


def list_items(file: io.TextIOWrapper) -> Iterator[Any]:
    """The items of a JSON list, without loading all of it into memory."""
    decoder = json.JSONDecoder(strict=False)  # texts may contain control characters
    text, size = file.read(READ_BYTES).lstrip()[1:], READ_BYTES
    while True:
        text = text.lstrip(" \t\r\n,")
        if text[:1] == "]":  # another list may follow
            text = text[1:].lstrip()
            while not text and (more := file.read(READ_BYTES)):
                text = more.lstrip()
            if not text:
                return
            if text[0] != "[":
                raise ValueError(f"unexpected text after the list: {shown(text, 40)!r}")
            text = text[1:]
            continue
        try:
            item, end = decoder.raw_decode(text)
        except ValueError as error:
            more = file.read(size)
            if not more:
                raise ValueError(str(error)) from None
            text, size = text + more, size * 2  # a long item: do not parse it again too often
            continue
        yield item
        text, size = text[end:], READ_BYTES


def csv_rows(part: Part, column: str) -> Iterator[tuple[int, str, str, str | None]]:
    csv.field_size_limit(2**31 - 1)
    inner = part.path.with_suffix("") if is_packed(part.path) else part.path
    with open_bytes(part.path) as file:
        # bytes that are not UTF-8 become surrogates, which make bad rows
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        # strict: otherwise an unclosed quote merges all following rows into one
        delimiter = "\t" if inner.suffix.lower() == ".tsv" else ","
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(reader, [])
        require_column(column, header)
        at = header.index(column)
        for row, fields in enumerate(filter(None, closed(reader))):
            if len(fields) == len(header):
                text, problem = checked(fields[at], column)
            else:
                text, problem = "", f"{len(fields)} fields, not {len(header)}: check the quotes"
            yield row, f"line {reader.line_num}", text, problem


def require_column(column: str, names: list[str]) -> None:
    """Raises BadRow unless one column has that name."""
    if names.count(column) > 1:
        raise BadRow(f"{names.count(column)} columns named {column!r}")
    if column not in names:
        found = f"only {shown(', '.join(names))}: pass --column=NAME" if names else "it is empty"
        raise BadRow(f"no column {column!r}, {found}")


def closed(reader: Any) -> Iterator[list[str]]:
    """The rows of a csv.reader. Raises ValueError with the line of a wrong quote."""
    begins = reader.line_num + 1
    try:
        for row in reader:
            yield row
            begins = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{error} in the row that starts at line {begins}: check the quotes"
        ) from None


def parquet_rows(part: Part, column: str) -> Iterator[tuple[int, str, str, str | None]]:
    import pyarrow.parquet

    file, row = pyarrow.parquet.ParquetFile(part.path), part.first_row
    require_column(column, file.schema_arrow.names)
    groups = range(part.start, part.stop)
    for batch in file.iter_batches(batch_size=1000, row_groups=groups, columns=[column]):
        try:
            values = batch.column(0).to_pylist()
        except UnicodeDecodeError:  # in one row: convert row by row
            values = batch.column(0)
        for value in values:
            try:
                value = value.as_py() if hasattr(value, "as_py") else value
                text, problem = checked(value, column)
            except UnicodeDecodeError as error:
                text, problem = "", f"not UTF-8 ({error})"
            yield row, f"row {row + 1}", text, problem
            row += 1


def text_chunks(part: Part) -> tuple[Iterator[str], str, str]:
    """The text of a part in chunks, and at least WINDOW characters before and after the part."""
    before = after = ""
    if not (part.begins and part.ends):
        with open(part.path, "rb") as file:
            reach = 4 * WINDOW
            if not part.begins:
                file.seek(part.start - reach)
                before = file.read(reach).decode("utf-8", errors="ignore")
            if not part.ends:
                file.seek(part.stop)
                after = file.read(reach).decode("utf-8", errors="ignore")

    def chunks() -> Iterator[str]:
        decoder, left = codecs.getincrementaldecoder("utf-8")(), part.stop - part.start
        position = part.start
        try:
            with open_bytes(part.path) as file:
                skip(file, part.start)
                while block := file.read(min(READ_BYTES, left)):
                    position = part.stop - left - len(decoder.getstate()[0])
                    left -= len(block)
                    text = decoder.decode(block, final=not left)
                    if "\0" in text:
                        raise ValueError("it has NUL characters, like a binary file")
                    yield text
            if left:
                raise ValueError("it was truncated meanwhile")
        except UnicodeDecodeError as error:
            raise UserError(
                f"cannot read {part.path} as UTF-8 text: {error.reason} at byte "
                f"{position + error.start}"
            ) from None
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"cannot read {part.path}: {error}") from None

    return chunks(), before, after


def is_packed(path: Path) -> bool:
    return path.suffix.lower() in PACKED


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed."""
    if not is_packed(path):
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, PACKED[path.suffix.lower()]), READ_BYTES)


def skip(file: BinaryIO, n_bytes: int) -> None:
    """Skip the first `n_bytes` of a file, which may be compressed."""
    if not isinstance(file, io.BufferedReader) or isinstance(file.raw, io.FileIO):
        file.seek(n_bytes)
        return
    while n_bytes > 0:
        n_bytes -= len(file.read(min(READ_BYTES, n_bytes))) or n_bytes
