"""Documents to token files: a data set that train.py reads is train.bin, val.bin and meta.json.

Token files are headerless little-endian uint16, or uint32 when the vocabulary needs it. meta.json
names the tokenizer, the vocabulary size and the dtype, and of each file the number of tokens, the
bytes of text that they stand for, and the checksum (CRC-32).

Data sets from the Hugging Face hub, and files of one's own, are tokenized in shards. Every shard
becomes files under `.shards/`, which is locked; an interrupted run goes on with those that are
missing. The names of all files that are written belong to one run, and a shard counts once its
record is there, which is written last and says how long the files are. Which documents are held out
depends on their position only, not on processes or restarts.
"""

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from configurator import configure
from steady import UserError, textfiles, visible
from steady.folder import beginning_crc, claim, file_crc, remove_temporary, to_disk, whole_file
from steady.output import shown, waiting
from steady.shuffle import scramble
from steady.tokenizer import (
    PIECE,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    check_meta,
    code_points,
    encode_pieces,
    from_meta,
    load_tokenizer,
    read_json,
    train_bpe,
    write_hf_tokenizer,
)

SPLITS = ("train", "val")
FILES = (*(f"{split}.bin" for split in SPLITS), "meta.json")  # of a data set
BUFFER_TOKENS = 2**20  # tokens held before they are written
DOCUMENTS_PER_SHARD = 50_000
SHARDS = ".shards"  # folder of the finished parts, removed at the end: no name a user would choose
BPE_BYTES = 2**28  # of text that a BPE is trained on

# what the prepare.py of every data set from the hub accepts, besides what it defines itself

# preparation
split = "train"  # split of the repository; val_fraction of it is held out
revision = "main"  # commit, tag or branch: name a commit for a data set that never changes
tokenizer = "gpt2"  # gpt2, byte, hf:PATH_OR_HUB_ID, or run:FOLDER
special_tokens = False  # read special tokens that texts spell as tokens: for chat data
num_proc = 1  # processes that tokenize
streaming = False  # read over the network without keeping a copy of the text
max_tokens = 0  # of the training set: the first so many; 0: all
out = ""  # folder to write to; default: the data set's own


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


class TokenWriter:
    """Appends documents to an open token file, each between the tokenizer's begin-of-text and
    end-of-text tokens where it has them. Counts tokens and the bytes of their text (UTF-8)."""

    def __init__(self, file: Any, tokenizer: Tokenizer):
        self.file, self.tokenizer, self.dtype = file, tokenizer, token_dtype(tokenizer)
        self.encode = getattr(tokenizer, "encode_array", tokenizer.encode)
        self.begin = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
        self.end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        self.chat = getattr(tokenizer, "special_tokens", False)
        self.pieces: list[Sequence[int]] = []
        self.held = 0  # tokens in them, and one for each, since empty ones take memory too
        self.tokens = self.bytes = 0

    def add(self, text: str) -> None:
        """Add a document, or nothing at all if the tokenizer fails."""
        n_bytes = len(text) if text.isascii() else len(text.encode())
        long = len(text) > 2 * PIECE
        pieces = list(encode_pieces(self.tokenizer, [text])) if long else [self.encode(text)]
        begin, end = self.begin, self.end
        if self.chat:  # the text may spell them itself
            begin = begin if list(pieces[0][:1]) != begin else []
            end = end if list(pieces[-1][-1:]) != end else []
        self.bytes += n_bytes
        self.append(begin, *pieces, end)

    def append(self, *pieces: Sequence[int]) -> None:
        """Add ids."""
        self.pieces += pieces
        self.held += sum(map(len, pieces)) + 1
        if self.held >= BUFFER_TOKENS:
            self.flush()

    def flush(self) -> None:
        if self.pieces:
            ids = np.concatenate(self.pieces, dtype=self.dtype, casting="unsafe")
            self.file.write(ids.data)  # ndarray.tofile's error does not say that a disk is full
            self.tokens += len(ids)
        self.pieces, self.held = [], 0

    def counts(self) -> dict[str, int]:
        self.flush()
        return {"tokens": self.tokens, "bytes": self.bytes}


def write_dataset(
    folder: str | Path, tokenizer: Tokenizer, splits: dict[str, Iterable[str]]
) -> dict[str, int]:
    """Tokenize `splits` (`{"train": documents, "val": documents}`) into `folder`.

    Returns the token count of each split and prints them.
    """

    def write(file: Any, split: str) -> dict[str, int]:
        writer = TokenWriter(file, tokenizer)
        for document in splits[split]:
            writer.add(document)
        return writer.counts()

    claim(Path(folder) / SHARDS)  # no other preparation writes here now
    try:
        return complete(Path(folder), tokenizer, write)
    finally:
        shutil.rmtree(Path(folder) / SHARDS)


def complete(
    folder: Path, tokenizer: Tokenizer, write: Callable[[Any, str], dict[str, int]]
) -> dict[str, int]:
    """Make the three files of a data set: `write(file, split)` writes tokens to an open file and
    returns their counts. They appear together, when all of them are on disk."""
    require_ours(folder)
    remove_temporary(folder, FILES)
    kept = own_tokenizer(folder)
    stale = kept is not None and kept != tokenizer.meta().get("json")
    dtype, counts = token_dtype(tokenizer), {}
    replaced = ", replacing an earlier data set" if (folder / "train.bin").exists() else ""
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(whole_file(folder / name)) for name in FILES}
        for split in SPLITS:
            file = files[f"{split}.bin"]
            counts[split] = write(file, split)
            file.flush()
            if counts[split]["tokens"] * dtype.itemsize != file.tell():
                raise AssertionError(f"{split}: {counts[split]}, but {file.tell()} bytes")
            ends = (tokenizer.begin_of_text is not None) + (tokenizer.end_of_text is not None)
            if counts[split]["tokens"] <= ends:  # one text, and nothing in it
                raise UserError(
                    f"the {split} split of {folder} would be empty: use more text, or another "
                    "--val_fraction"
                )
        meta = tokenizer.meta() | {
            "vocab_size": tokenizer.vocab_size,
            "dtype": {2: "uint16", 4: "uint32"}[dtype.itemsize],
            **{key: {split: counts[split][key] for split in SPLITS if key in counts[split]}
               for key in ("tokens", "bytes")},
            "crc32": {split: file_crc(files[f"{split}.bin"].name) for split in SPLITS},
            "begins": {split: beginning_crc(files[f"{split}.bin"].name) for split in SPLITS},
            "unigram_entropy": unigram_entropy(files["val.bin"].name, tokenizer),
        }  # fmt: skip
        files["meta.json"].write(json.dumps(meta, indent=1).encode() + b"\n")
        for file in files.values():
            to_disk(file)
    for name in ("tokenizer.json", "tokenizer_config.json") if stale else ():
        (folder / name).unlink(missing_ok=True)
    for split in SPLITS:
        print(f"{folder / split}.bin: {counts[split]['tokens']:,} tokens{replaced}")
    name = folder.name if folder.resolve().parent.name == "data" else folder
    print(
        f"vocabulary {tokenizer.vocab_size:,}; to train on it: "
        f"python train.py --dataset={shlex.quote(str(name))} --out_dir=out-{folder.name}"
    )
    return {split: counts[split]["tokens"] for split in SPLITS}


def unigram_entropy(path: str, tokenizer: Tokenizer) -> float:
    """The loss of the best model that knows nothing but how often each token occurs, in nats."""
    seen = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with open(path, "rb") as file:
        while len(ids := np.fromfile(file, dtype=token_dtype(tokenizer), count=BUFFER_TOKENS)):
            seen += np.bincount(ids, minlength=len(seen))
    probabilities = seen[seen > 0] / seen.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def require_ours(folder: Path) -> None:
    """Raises UserError where a meta.json would be replaced that describes no data set, or token
    files that none describes (nanoGPT's, unless its meta.pkl asks for a new one)."""
    path = folder / "meta.json"
    if not os.path.lexists(path):
        for bare in (folder / f"{split}.bin" for split in SPLITS):
            there = os.path.lexists(bare) and not bare.is_symlink()
            if there and not (folder / "meta.pkl").exists():
                raise UserError(
                    f"{bare} is there without a meta.json, as nanoGPT's are: move it, or use "
                    "another --out"
                )
        return
    with contextlib.suppress(OSError, ValueError):
        meta = read_json(path)
        if "tokenizer" in meta and "dtype" in meta:
            check_meta(meta, str(path))
            return
    raise UserError(f"{path} is there and belongs to no data set: move it, or use another --out")


def own_tokenizer(folder: Path) -> str | None:
    """The tokenizer.json in `folder` that the data set there was made with, as meta.json has it."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        text = read_json(folder / "meta.json").get("json")
        if text and json.loads(text) == read_json(folder / "tokenizer.json"):
            return text
    return None


def split_text(text: str, val_fraction: float = 0.1) -> dict[str, list[str]]:
    """The last `val_fraction` of a text as validation set, as nanoGPT's prepare scripts do."""
    cut = int(len(text) * (1 - val_fraction))
    return {"train": [text[:cut]], "val": [text[cut:]]}


def prepare_hub_dataset(namespace: dict[str, Any]) -> None:
    """All that a data set's prepare.py does with its `globals()` and the command line."""
    config = configure(namespace, base=__file__, positional="")
    folder = config.pop("out") or Path(namespace["__file__"]).parent
    chosen = tokenizer_named(config.pop("tokenizer"), config.pop("special_tokens"))
    prepare_from_hub(folder, chosen, **config)


def prepare_from_hub(
    folder: str | Path,
    tokenizer: Tokenizer,
    path: str,
    name: str = "",
    split: str = split,
    revision: str = revision,
    val_fraction: float = 0.0005,
    num_proc: int = num_proc,
    streaming: bool = streaming,
    max_tokens: int = max_tokens,
) -> None:
    """Write train.bin, val.bin and meta.json of one split of a data set to `folder`.

    Args:
        path: a repository on the hub, or a local folder of the same form; name: its configuration.
        split: of the repository.
        revision: commit, tag or branch of the repository.
        val_fraction: share of the documents held out for validation.
        streaming: read over the network without keeping a copy; else cached by `datasets`.
        max_tokens: of the training set, from its beginning; 0: all. With streaming nothing more
            than that (and the rest of a shard) is read.

    Raises UserError, one line, when the data cannot be had or the disk is too small.
    """
    folder = Path(folder)
    dataset = load(path, name, split, revision, num_proc, streaming)
    if "text" not in (dataset.column_names or ["text"]):
        raise UserError(
            f"{path} has no column text, only {shown(', '.join(dataset.column_names))}: save it as "
            "Parquet files, and use data/text/prepare.py with --column=NAME"
        )
    n_shards = dataset.num_shards if streaming else math.ceil(len(dataset) / DOCUMENTS_PER_SHARD)
    source = {
        "path": path, "name": name, "split": split, "revision": revision,
        "val_fraction": val_fraction,
        "shards": n_shards, "documents": None if streaming else len(dataset),
    }  # fmt: skip
    size = dataset.info.dataset_size or (0 if streaming else dataset.data.nbytes)
    jobs = [(dataset, n_shards, i, tokenizer, val_fraction) for i in range(n_shards)]
    # a token takes two bytes and stands for about four of text
    write_in_shards(folder, tokenizer, source, write_shard, jobs, size // 2, num_proc, max_tokens)


def prepare_from_files(
    folder: str | Path,
    tokenizer: str,
    paths: list[Path],
    column: str = "text",
    val_fraction: float = 0.1,
    num_proc: int = 1,
    skip_bad_rows: bool = False,
    special_tokens: bool = False,
) -> None:
    """Write train.bin, val.bin and meta.json of the texts in files (see steady/textfiles.py).

    tokenizer: as `load_tokenizer` takes it, or char, or bpe:SIZE, for which all is read twice.

    Raises UserError, one line, for a file that cannot be read and, unless `skip_bad_rows`, for the
    first row without text.
    """
    folder = Path(folder)
    require_ours(folder)
    if tokenizer == "char" or tokenizer.startswith("bpe:"):
        groups = textfiles.plan(paths, val_fraction, ByteTokenizer().seam)
    if tokenizer == "char":
        seen = np.zeros(sys.maxunicode + 1, dtype=bool)
        for text in texts_of(groups, column, skip_bad_rows, "reading characters"):
            seen[code_points(text)] = True
        # a single text file is one long document, as nanoGPT's data sets are
        several = len(paths) > 1 or any(part.kind != "text" for part in groups[0])
        chosen: Tokenizer = CharTokenizer("".join(map(chr, np.flatnonzero(seen))), ends=several)
    elif tokenizer.startswith("bpe:") and not special_tokens:
        chosen = own_bpe(folder, tokenizer, groups, column, skip_bad_rows)
    elif special_tokens and tokenizer.startswith("bpe:"):
        raise UserError("special_tokens=True is for gpt2 and hf: tokenizers, a new BPE has none")
    else:
        chosen = tokenizer_named(tokenizer, special_tokens)
    if special_tokens and not getattr(chosen, "special_tokens", False):
        raise UserError(f"special_tokens=True is for gpt2 and hf: tokenizers, not {tokenizer}")
    groups = textfiles.plan(paths, val_fraction, chosen.seam)
    source = {
        "files": [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths],
        "column": column, "val_fraction": val_fraction, "shards": len(groups),
        "skip_bad_rows": skip_bad_rows,
    }  # fmt: skip
    jobs = [(parts, i, chosen, column, val_fraction, skip_bad_rows)
            for i, parts in enumerate(groups)]  # fmt: skip
    size = sum(part.size for parts in groups for part in parts)
    size = size * 2 if tokenizer in ("char", "byte") else size // 2
    write_in_shards(folder, chosen, source, write_text_shard, jobs, size, num_proc)


def tokenizer_named(name: str, special_tokens: bool) -> Tokenizer:
    """As `load_tokenizer`; run:FOLDER is that of a run of train.py's."""
    if not name.startswith("run:"):
        return load_tokenizer(name, special_tokens)
    from steady import checkpoint  # which needs torch

    path = Path(name.removeprefix("run:"))
    meta = checkpoint.load(path if path.is_file() else checkpoint.find(path))["tokenizer"]
    return from_meta(meta | ({"special_tokens": True} if special_tokens else {}))


def texts_of(
    groups: list[list[textfiles.Part]], column: str, skip_bad_rows: bool, description: str
) -> Iterator[str]:
    """All texts of some parts of files, long ones in chunks."""
    for parts in progress(groups, len(groups), description):
        for part in parts:
            if part.kind == "text":
                yield from textfiles.text_chunks(part)[0]
                continue
            for _, where, text, problem in textfiles.rows(part, column):
                if problem is None:
                    yield text
                elif not skip_bad_rows:
                    raise bad_row(part, where, problem)


def own_bpe(
    folder: Path, name: str, groups: list[list[textfiles.Part]], column: str, skip_bad_rows: bool
) -> Tokenizer:
    """The BPE that `bpe:SIZE` names, trained on the texts (on parts that are spread over them, if
    there are more than BPE_BYTES) and saved in `folder`; an interrupted run's is taken again."""
    size = name.partition(":")[2]
    if not size.isdigit():
        raise UserError(f"unknown tokenizer={name!r}: write the vocabulary's size, as in bpe:8192")
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        if os.path.lexists(path) and not own_tokenizer(folder):
            raise UserError(f"{path} is there and of no data set: move it, or use another --out")
    claim(folder / SHARDS)
    meta = {"size": int(size), "parts": hashlib.sha256(repr(groups).encode()).hexdigest()}
    kept = folder / SHARDS / "tokenizer"
    if kept.is_symlink():
        raise UserError(f"{kept} is a link, which is not followed: delete it")
    with contextlib.suppress(OSError, ValueError):
        if read_json(kept / "of.json") == meta:
            return load_tokenizer(f"hf:{kept}")
    held = sum(part.size for parts in groups for part in parts)
    every = max(1, math.ceil(held / BPE_BYTES))
    texts = texts_of(groups[::every], column, skip_bad_rows, "reading, to train the tokenizer")
    trained = train_bpe((text[i : i + PIECE] for text in texts for i in range(0, len(text), PIECE)),
                        int(size))  # fmt: skip
    if trained.vocab_size < int(size):
        print(f"note: the texts give {trained.vocab_size} tokens, not {size}")
    kept.mkdir(exist_ok=True)
    write_hf_tokenizer(trained.meta(), kept)
    with whole_file(kept / "of.json") as file:
        file.write(json.dumps(meta).encode())
    return load_tokenizer(f"hf:{kept}")  # as it will be read again


def bad_row(part: textfiles.Part, where: str, problem: str) -> UserError:
    return UserError(f"{part.path}, {where}: {problem} (--skip_bad_rows=True leaves such rows out)")


def write_in_shards(
    folder: Path,
    tokenizer: Tokenizer,
    source: dict[str, Any],
    write: Callable[["Shard", tuple], None],
    jobs: list[tuple],
    size: int,
    num_proc: int,
    max_tokens: int = 0,
) -> None:
    """Run `write(shard, job)` for every job whose shard is missing, then join the shards.

    Args:
        source: what the shards depend on, to know those of an interrupted run again.
        size: bytes that the tokens will take, about.
        max_tokens: end with the shard that completes so many in the training set; 0: all shards.
    """
    shards, width = folder / SHARDS, token_dtype(tokenizer).itemsize
    require_ours(folder)
    claim(shards)
    note, source = shards / "source.json", source | {"tokenizer": tokenizer.meta()}
    before = None
    with contextlib.suppress(ValueError):  # a full disk cut it short
        before = read_json(note) or None
    if before != source:
        was = before if isinstance(before, dict) else {}
        other = sorted(k for k in source.keys() | was.keys() if was.get(k) != source.get(k))
        if other == ["skip_bad_rows"] and source.get("skip_bad_rows"):
            other = []  # the shards that are there had no bad row
        if other and before is not None and any(shards.glob("[0-9]*.json")):
            raise UserError(
                f"{shards} holds parts made with other {', '.join(other)} (what an interrupted run "
                "has left): delete it to begin anew"
            )
        with whole_file(note) as file:
            file.write(json.dumps(source).encode())
    key = {k: v for k, v in source.items() if k != "skip_bad_rows"}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    records = [Record(shards / f"{i:05d}.json", digest, width) for i in range(len(jobs))]
    missing = [i for i, record in enumerate(records) if record.read() is None]
    kept = {name for r in records if (found := r.read()) for name, _ in found["files"].values()}
    for path in shards.glob("*.bin"):  # of runs that were killed while they wrote
        if path.name not in kept:
            path.unlink(missing_ok=True)
    if len(missing) < len(jobs):
        print(f"{len(jobs) - len(missing)} of {len(jobs)} shards are there already")
    # shards and the result are both kept
    share = len(missing) / max(1, len(jobs))
    if max_tokens:
        size, share = max_tokens * width, 1.0
    needed, free = size * share + size, shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder} needs about {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} are free: make "
            "room, or use --out=FOLDER on another disk"
        )
    todo = [(write, records[i], tokenizer, job) for i, job in enumerate(jobs)]
    used = len(jobs)
    if max_tokens:
        used, tokens = 0, 0
        bar = progress(None, max_tokens, "tokens")
        while used < len(jobs) and tokens < max_tokens:
            wave = range(used, min(used + num_proc, len(jobs)))
            run_jobs(make_shard, [todo[i] for i in wave if i in set(missing)], num_proc)
            while used < wave.stop and tokens < max_tokens:
                count = records[used].read()["files"]["train"][1]["tokens"]
                tokens, used = tokens + count, used + 1
                if bar is not None:
                    bar.update(count)
        if bar is not None:
            bar.close()
    else:
        run_jobs(make_shard, [todo[i] for i in missing], num_proc, "tokenizing")

    def join(file: Any, split: str) -> dict[str, int]:
        total = {"tokens": 0, "bytes": 0}
        for record in waiting(records[:used], used, f"joining {split}.bin", unit="shard"):
            name, counts = record.read()["files"][split]
            with open(shards / name, "rb") as part:
                while block := part.read(2**24):
                    if max_tokens and split == "train":
                        block = block[: max_tokens * width - file.tell()]
                    file.write(block)
            for key in ("tokens", "bytes"):
                total[key] += counts[key]
        if file.tell() < total["tokens"] * width:  # cut short: how much text that is, is not known
            total["tokens"] = file.tell() // width
            del total["bytes"]
        return total

    rows = [row for record in records[:used] for row in record.read()["skipped"]]
    if rows:
        print(visible("\n".join(rows[:10] + (["..."] if len(rows) > 10 else []))))
        print(f"warning: {len(rows):,} rows without text were left out")
    try:
        complete(folder, tokenizer, join)
    except UserError:
        shutil.rmtree(shards)  # parts of nothing: they would stand in the way of more text
        raise
    if (shards / "tokenizer").exists():
        for path in (shards / "tokenizer").glob("tokenizer*.json"):
            os.replace(path, folder / path.name)
    shutil.rmtree(shards)


class Record:
    """The record of a shard: the names, lengths and checksums of its files, as JSON.

    digest: of what the shard depends on. width: bytes of a token.
    """

    def __init__(self, path: Path, digest: str, width: int):
        self.path, self.digest, self.width = path, digest, width

    def read(self) -> dict[str, Any] | None:
        """The record, if the shard is complete and made from the same."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = read_json(self.path)
            sizes = [(self.path.parent / name).stat().st_size == counts["tokens"] * self.width
                     for name, counts in found["files"].values()]  # fmt: skip
            if found["digest"] == self.digest and sizes == [True] * len(SPLITS):
                return found
        return None


class Shard:
    """What a job writes: a token file per split, and the rows that were left out."""

    def __init__(self, writers: dict[str, TokenWriter]):
        self.writers, self.skipped = writers, []

    def add(self, split: str, text: str) -> str | None:
        """Add a document to a split; returns why the tokenizer could not take it, or None."""
        try:
            self.writers[split].add(text)
        except (KeyboardInterrupt, SystemExit, MemoryError, OSError):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            reason = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            return f"the tokenizer failed ({shown(reason)})"


def make_shard(job: tuple) -> None:
    """Make the files of a shard, then its record."""
    write, record, tokenizer, work = job
    run = os.urandom(4).hex()  # the names belong to this run
    paths = {split: record.path.with_suffix(f".{run}.{split}.bin") for split in SPLITS}
    try:
        with contextlib.ExitStack() as stack:
            files = {s: stack.enter_context(open(path, "xb")) for s, path in paths.items()}
            shard = Shard({s: TokenWriter(file, tokenizer) for s, file in files.items()})
            write(shard, work)
            found = {s: (paths[s].name, w.counts()) for s, w in shard.writers.items()}
            for file in files.values():
                to_disk(file)
    except BaseException as error:
        for path in paths.values():
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(record.path.parent)  # a full disk's names no file
        raise
    with whole_file(record.path) as file:
        content = {"digest": record.digest, "files": found, "skipped": shard.skipped}
        file.write(json.dumps(content).encode())


def run_jobs(work: Callable, jobs: list[tuple], num_proc: int, description: str = "") -> None:
    """`work` on every job, in processes; an error of one is raised here, in one line."""
    if num_proc == 1 or len(jobs) <= 1:
        for _ in progress(map(work, jobs), len(jobs), description):
            pass
        return
    with ProcessPoolExecutor(num_proc, initializer=end_with_parent) as pool:
        try:
            for _ in progress(pool.map(work, jobs), len(jobs), description):
                pass
        except UserError as error:  # raised again here, it is printed without a trace
            pool.shutdown(cancel_futures=True)
            raise UserError(str(error)) from None
        except BrokenExecutor:
            raise UserError(
                "a process that tokenizes was killed, for want of memory perhaps: the same command "
                "goes on from what is done; use a smaller --num_proc"
            ) from None


def end_with_parent() -> None:
    """End this process when the one that started it is gone (F80): it would go on writing."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def progress(work: Any, total: int, description: str) -> Any:
    """`work` with a progress bar where tqdm is there; without description none."""
    if description:
        try:
            from tqdm import tqdm
        except ImportError:
            return work
        unit = "shard" if work is not None else "token"
        return tqdm(work, total=total, unit=unit, unit_scale=work is None, desc=description)
    return work


def load(path: str, name: str, split: str, revision: str, num_proc: int, streaming: bool) -> Any:
    """A split of a data set; what is wrong with it, or a missing network, is one line."""
    import datasets

    local = Path(path).is_dir()
    try:
        return datasets.load_dataset(
            path,
            name or None,
            split=split,
            revision=None if local else revision,
            streaming=streaming,
            num_proc=num_proc if num_proc > 1 and not streaming else None,
        )
    except Exception as error:  # the hub's libraries raise many kinds; the reason is what counts
        lines = str(error).strip().splitlines() or [type(error).__name__]
        remedy = (
            "connect to the Hugging Face hub, or pass --path=FOLDER with a copy of the repository"
        )
        if "config name is missing" in str(error).lower():
            with contextlib.suppress(Exception):
                lines = [", ".join(datasets.get_dataset_config_names(path))]
            remedy = "it has several configurations: pass --name=ONE_OF_THEM"
        elif "split" in lines[0].lower():
            remedy = "pass --split=NAME"
        raise UserError(f"cannot load {path} ({shown(lines[0])}): {remedy}") from None


def write_shard(shard: Shard, job: tuple) -> None:
    """Tokenize a shard of a data set of the hub."""
    dataset, n_shards, i, _, val_fraction = job
    part = dataset.shard(num_shards=n_shards, index=i).select_columns("text")
    limit, row = np.uint64(int(val_fraction * 2**64)), 0
    for batch in part.iter(1000):
        hashes = scramble(np.arange(row, row + len(batch["text"])) + (i << 32), key=0)
        for text, held_out in zip(batch["text"], hashes < limit, strict=True):
            row += 1
            text, problem = textfiles.checked(text, "text")
            problem = problem or shard.add("val" if held_out else "train", text)
            if problem is not None:
                shard.skipped.append(f"document {row} of part {i + 1} of {n_shards}: {problem}")


def write_text_shard(shard: Shard, job: tuple) -> None:
    """Tokenize some parts of files. Of rows `val_fraction` is spread evenly."""
    parts, _, tokenizer, column, val_fraction, skip_bad_rows = job
    for part in parts:
        if part.kind == "text":
            write_text(shard.writers[part.split], part, tokenizer)
            continue
        for row, where, text, problem in textfiles.rows(part, column):
            if problem is None:
                before, after = (n * val_fraction + part.phase for n in (row, row + 1))
                problem = shard.add("val" if int(after) > int(before) else "train", text)
            if problem is None:
                continue
            if not skip_bad_rows:
                raise bad_row(part, where, problem)
            shard.skipped.append(f"{part.path}, {where}: {problem}")


def write_text(writer: TokenWriter, part: textfiles.Part, tokenizer: Tokenizer) -> None:
    """Tokenize a part of a text file."""
    chunks, before, after = textfiles.text_chunks(part)

    def counted() -> Iterator[str]:
        for chunk in chunks:
            writer.bytes += len(chunk) if chunk.isascii() else len(chunk.encode())
            yield chunk

    begin, end = writer.begin * part.begins, writer.end * part.ends
    try:
        for ids in encode_pieces(tokenizer, counted(), before, after):
            if writer.chat and list(ids[:1]) == begin:  # the text spells it itself
                begin = []
            writer.append(begin, ids)
            begin, last = [], list(ids[-1:])
    except UserError as error:
        raise UserError(f"{part.path}: {error}") from None
    writer.append([] if writer.chat and last == end else end)
