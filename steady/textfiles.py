"""Files of your own as documents: the rows of JSON, CSV and Parquet files, and whole text files.

| name | documents |
|---|---|
| .jsonl, .ndjson, .json | every row: an object per line, or a list of objects |
| .csv, .tsv | every row below the header |
| .parquet | every row |
| others | the file, which must be UTF-8 text |

All but Parquet may be packed as .gz or .zst. A file is read in parts, so that memory stays constant
whatever its size, and so that an interrupted preparation goes on with the parts that are missing.
Which rows are held out depends on their number in the file and on the file's among all.
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
GOLDEN = 0.618034  # its multiples spread evenly: rows of many small files are held out too
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
         ".parquet": "parquet"}  # fmt: skip
PACKED = {".gz": "gzip", ".zst": "zstd"}
ACCEPTED = ".jsonl, .ndjson, .json, .csv, .tsv (each also .gz or .zst), .parquet, or UTF-8 text"


class Part(NamedTuple):
    """A piece of a file that is read on its own."""

    path: Path
    kind: str  # json, csv, parquet or text
    start: int  # first byte, of a packed text when unpacked; first row group of a Parquet file
    stop: int  # one after the last
    first_row: int = 0  # rows (lines of JSON) before it
    phase: float = 0.0  # in [0, 1): how much of a row is held out before the file's first
    size: int = 0  # bytes
    split: str = ""  # of a text: train or val
    begins: bool = True  # of a text: whether the document begins with this part
    ends: bool = True  # of a text: whether the document ends with this part


def files_matching(pattern: str) -> list[Path]:
    """The files of that name, or that match it as a glob, sorted.

    Hidden ones must be asked for, as in a shell. `**` follows no links to folders: a link to a
    folder above it would never end.
    """
    given = Path(pattern)
    if given.exists():
        if not given.is_file() and not given.is_dir():
            raise UserError(f"--input={pattern} is no regular file")
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
    """The parts of all files, grouped so that a group has PART_BYTES or is a single part.

    seam: of the tokenizer, says where a long text can be cut.

    Raises UserError that names a file that cannot be read, or is none that is accepted.
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
    """A file's parts: lines of JSON, row groups of Parquet, a text between seams; a packed file's
    rows are one part."""
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
    """Raises UserError unless the beginning of a file is text, and no rows under another name."""
    with open_bytes(path) as file:
        beginning = file.read(2**16)
    problem, first_row = None, None
    if b"\0" in beginning:
        problem = "NUL characters"
    elif kind == "text":
        try:
            text = codecs.getincrementaldecoder("utf-8-sig")().decode(beginning)
        except UnicodeDecodeError as error:
            problem = f"bytes that are no UTF-8 ({error.reason} at byte {error.start})"
        else:
            with contextlib.suppress(ValueError, RecursionError):
                first, ends, _ = text.partition("\n")
                cut = not ends and re.match(r'\s*\{\s*"[^"]*"\s*:', first)  # a longer row
                first_row = {} if cut else json.loads(first)
    if problem:
        raise UserError(
            f"{path} is no text: it holds {problem}. Accepted are {ACCEPTED}; unpack archives, and "
            "convert other encodings with iconv"
        )
    if isinstance(first_row, dict | list) and path.suffix.lower() not in (".txt", ".md"):
        raise UserError(f"{path} holds rows of JSON: name it .jsonl, or .txt to take it as text")


def holds_list(path: Path) -> bool:
    """Whether a JSON file is a list of rows."""
    with open_bytes(path) as file:
        while block := file.read(2**16):
            if block := block.removeprefix(codecs.BOM_UTF8).lstrip():
                return block[:1] == b"["
    return False


def line_borders(path: Path) -> list[tuple[int, int]]:
    """Where lines begin, about every PART_BYTES: (byte offset, lines before it)."""
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
    """The training document, which is the beginning of a text, and the validation document, which
    is its last `val_fraction`, counted in bytes and cut between characters."""
    size, packed = path.stat().st_size, is_packed(path)
    total = size
    with open_bytes(path) as file:
        begin = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        if packed:
            total = 0
            file = open_bytes(path)
            while block := file.read(READ_BYTES):
                total += len(block)
        # the next byte that begins a character
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
                if at is None:  # none here: this part is longer
                    break
                borders.append(reach + begins + len(window[:at].encode()))
            for first, last in zip(borders, [*borders[1:], stop], strict=True):
                yield Part(path, "text", first, last, split=split, begins=first == start,
                           ends=last == stop, size=int((last - first) * share))  # fmt: skip


def window_around(block: bytes, middle: int) -> tuple[str, int]:
    """WINDOW characters, or fewer, on each side of the byte `middle` of a block of a text, and at
    which byte of the block they begin."""
    while block[middle] & 0xC0 == 0x80:
        middle -= 1
    before = block[:middle].decode("utf-8", errors="ignore")[-WINDOW:]
    after = block[middle:].decode("utf-8", errors="ignore")[:WINDOW]
    n = min(len(before), len(after))
    before = before[len(before) - n :]
    return before + after[:n], middle - len(before.encode())


class BadRow(Exception):
    """A row that holds no text."""


def rows(part: Part, column: str) -> Iterator[tuple[int, str, str, str | None]]:
    """(number in the file, its name for messages, text, what is wrong or None) of every row.

    Raises UserError that names a file that cannot be read.
    """
    readers = {"json": json_rows, "csv": csv_rows, "parquet": parquet_rows}
    try:
        yield from readers[part.kind](part, column)
    except BadRow as error:
        raise UserError(f"{part.path} has {error}") from None
    except (OSError, EOFError, ValueError, csv.Error) as error:  # damaged, or not what it is named
        raise UserError(f"cannot read {part.path}: {error}") from None


def json_rows(part: Part, column: str) -> Iterator[tuple[int, str, str, str | None]]:
    if holds_list(part.path):
        with open_bytes(part.path) as file:
            # bytes that are no UTF-8 become halves of characters, and so bad rows
            text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape")
            row = -1
            try:
                for row, value in enumerate(list_items(text)):
                    yield row, f"row {row + 1}", *text_in(value, column)
            except (ValueError, RecursionError) as error:  # where the next row begins is not known
                raise ValueError(f"row {row + 2} is no JSON: {error}") from None
        return
    packed = is_packed(part.path)
    with open_bytes(part.path) as file:
        file.seek(part.start) if not packed else None
        left = part.stop - part.start
        for row, line in enumerate(file, part.first_row):
            if line.strip():
                text, problem = text_in_line(line, column)
                if problem and row == 0 and ".json" in part.path.suffixes:
                    problem += "; a .json file has a row per line, or is a list of rows"
                yield row, f"line {row + 1}", text, problem
            left -= len(line)
            if left <= 0 and not packed:
                break


def text_in_line(line: bytes, column: str) -> tuple[str, str | None]:
    try:  # decoded here: json.loads lets bytes of surrogates through
        return text_in(json.loads(line.decode("utf-8-sig")), column)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
        return "", f"no JSON ({error})"


def text_in(row: Any, column: str) -> tuple[str, str | None]:
    """The text in a row of JSON, and what is wrong with it or None."""
    if not isinstance(row, dict):
        return "", f"a {type(row).__name__}, not an object with {column!r}"
    if column not in row:
        return "", f"no {column!r}, only {shown(', '.join(row) or '{}')}: pass --column=NAME"
    return checked(row[column], column)


def checked(text: object, column: str) -> tuple[str, str | None]:
    """The text in a row, and what is wrong with it or None."""
    if not isinstance(text, str):
        return "", f"{column!r} is {'null' if text is None else type(text).__name__}, not text"
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # as surrogateescape decodes other bytes
            return "", f"no UTF-8 (byte 0x{ord(text[error.start]) - 0xDC00:02x})"
        return "", f"half a character ({error})"
    return text, None


def list_items(file: io.TextIOWrapper) -> Iterator[Any]:
    """The items of a JSON list, without holding all of it."""
    decoder = json.JSONDecoder(strict=False)  # texts may contain control characters
    text, size = file.read(READ_BYTES).lstrip()[1:], READ_BYTES
    while True:
        text = text.lstrip(" \t\r\n,")
        if text[:1] == "]":  # of one list: there may be another
            text = text[1:].lstrip()
            while not text and (more := file.read(READ_BYTES)):
                text = more.lstrip()
            if not text:
                return
            if text[0] != "[":
                raise ValueError(f"something follows the list: {shown(text, 40)!r}")
            text = text[1:]
            continue
        try:
            item, end = decoder.raw_decode(text)
        except ValueError as error:
            more = file.read(size)
            if not more:
                raise ValueError(str(error)) from None
            text, size = text + more, size * 2  # a longer item: do not begin it again too often
            continue
        yield item
        text, size = text[end:], READ_BYTES


def csv_rows(part: Part, column: str) -> Iterator[tuple[int, str, str, str | None]]:
    csv.field_size_limit(2**31 - 1)
    inner = part.path.with_suffix("") if is_packed(part.path) else part.path
    with open_bytes(part.path) as file:
        # bytes that are no UTF-8 become halves of characters, and so bad rows
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        # strict: a quote that is never closed would make one row of all that follow
        delimiter = "\t" if inner.suffix.lower() == ".tsv" else ","
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(reader, [])
        require_column(column, header)
        at = header.index(column)
        for row, fields in enumerate(filter(None, closed(reader))):
            if len(fields) == len(header):
                text, problem = checked(fields[at], column)
            else:
                text, problem = "", f"{len(fields)} fields, not {len(header)}: check its quotes"
            yield row, f"line {reader.line_num}", text, problem


def require_column(column: str, names: list[str]) -> None:
    """Raises BadRow unless one column has that name."""
    if names.count(column) > 1:
        raise BadRow(f"{names.count(column)} columns with the name {column!r}")
    if column not in names:
        found = f"only {shown(', '.join(names))}: pass --column=NAME" if names else "it is empty"
        raise BadRow(f"rows without {column!r}, {found}")


def closed(reader: Any) -> Iterator[list[str]]:
    """The rows of a csv.reader; raises ValueError that names the line of a wrong quote."""
    begins = reader.line_num + 1
    try:
        for row in reader:
            yield row
            begins = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{error} in the row that begins at line {begins}: check its quotes"
        ) from None


def parquet_rows(part: Part, column: str) -> Iterator[tuple[int, str, str, str | None]]:
    import pyarrow.parquet

    file, row = pyarrow.parquet.ParquetFile(part.path), part.first_row
    require_column(column, file.schema_arrow.names)
    groups = range(part.start, part.stop)
    for batch in file.iter_batches(batch_size=1000, row_groups=groups, columns=[column]):
        try:
            values = batch.column(0).to_pylist()
        except UnicodeDecodeError:  # of one row
            values = batch.column(0)
        for value in values:
            try:
                value = value.as_py() if hasattr(value, "as_py") else value
                text, problem = checked(value, column)
            except UnicodeDecodeError as error:
                text, problem = "", f"no UTF-8 ({error})"
            yield row, f"row {row + 1}", text, problem
            row += 1


def text_chunks(part: Part) -> tuple[Iterator[str], str, str]:
    """The text of a part in chunks, and WINDOW characters or more of its document on both sides."""
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
                        raise ValueError("it holds NUL characters, as binary files do")
                    yield text
            if left:
                raise ValueError("it has become shorter")
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
    """A file's bytes, unpacked."""
    if not is_packed(path):
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, PACKED[path.suffix.lower()]), READ_BYTES)


def skip(file: BinaryIO, n_bytes: int) -> None:
    """Move on from the beginning of a file, which may be packed."""
    if not isinstance(file, io.BufferedReader) or isinstance(file.raw, io.FileIO):
        file.seek(n_bytes)
        return
    while n_bytes > 0:
        n_bytes -= len(file.read(min(READ_BYTES, n_bytes))) or n_bytes
