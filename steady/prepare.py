"""Documents to token files. train.py reads a data set of train.bin, val.bin and meta.json.

Token files are headerless little-endian uint16, or uint32 when the vocabulary needs it. meta.json
holds the tokenizer, the vocabulary size and the dtype, and for each file the number of tokens, the
number of bytes of their text, and the checksum (CRC-32).

Data sets from the Hugging Face hub and your own files are tokenized in shards. Each shard becomes
files under `.shards/`, which is locked; after an interruption, the next run makes the missing
shards. File names are unique to a run. A shard is complete once it has a record, which is written
last and holds the lengths of the files. The choice of held-out documents depends only on their
position, not on processes or restarts.
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
from steady.folder import (
    atomic_write,
    claim,
    crc_of_start,
    file_crc,
    remove_temporary,
    sync_to_disk,
)
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
SHARDS = ".shards"  # folder of finished shards, removed at the end: a name no user would choose
BPE_BYTES = 2**28  # of text to train a BPE on

# settings of every hub data set's prepare.py, besides its own

# preparation
split = "train"  # split of the repository; val_fraction of it is held out
revision = "main"  # commit, tag or branch; a commit pins the data
tokenizer = "gpt2"  # gpt2, byte, hf:PATH_OR_HUB_ID, or run:FOLDER
special_tokens = False  # encode special tokens in the text as tokens: for chat data
num_proc = 1  # processes that tokenize
streaming = False  # read over the network without keeping a copy of the text
max_tokens = 0  # stop after this many training tokens; 0: take all
out = ""  # folder to write to; default: the data set's own


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


class TokenWriter:
    """Appends documents to an open token file, each between the tokenizer's begin-of-text and
    end-of-text tokens if it has them. Counts tokens and the bytes of their text (UTF-8)."""

    def __init__(self, file: Any, tokenizer: Tokenizer):
        self.file, self.tokenizer, self.dtype = file, tokenizer, token_dtype(tokenizer)
        self.encode = getattr(tokenizer, "encode_array", tokenizer.encode)
        self.begin = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
        self.end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        self.chat = getattr(tokenizer, "special_tokens", False)
        self.pieces: list[Sequence[int]] = []
        self.held = 0  # tokens in pieces, plus one per piece, since empty ones take memory too
        self.tokens = self.bytes = 0

    def add(self, text: str) -> None:
        """Add a document, or nothing if the tokenizer fails."""
        n_bytes = len(text) if text.isascii() else len(text.encode())
        long = len(text) > 2 * PIECE
        pieces = list(encode_pieces(self.tokenizer, [text])) if long else [self.encode(text)]
        begin, end = self.begin, self.end
        if self.chat:  # the text may contain them already
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
            self.file.write(ids.data)  # ndarray.tofile does not report a full disk as such
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

    claim(Path(folder) / SHARDS)  # lock out other preparations
    try:
        return complete(Path(folder), tokenizer, write)
    finally:
        shutil.rmtree(Path(folder) / SHARDS)


def complete(
    folder: Path, tokenizer: Tokenizer, write: Callable[[Any, str], dict[str, int]]
) -> dict[str, int]:
    """Make the three files of a data set. `write(file, split)` writes tokens to an open file and
    returns their counts. The files appear together, once all of them are on disk."""
    refuse_foreign_files(folder)
    remove_temporary(folder, FILES)
    kept = folder_tokenizer(folder)
    stale = kept is not None and kept != tokenizer.meta().get("json")
    dtype, counts = token_dtype(tokenizer), {}
    replaced = ", replacing an earlier data set" if (folder / "train.bin").exists() else ""
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(atomic_write(folder / name)) for name in FILES}
        for split in SPLITS:
            file = files[f"{split}.bin"]
            counts[split] = write(file, split)
            file.flush()
            if counts[split]["tokens"] * dtype.itemsize != file.tell():
                raise AssertionError(f"{split}: {counts[split]}, but {file.tell()} bytes")
            ends = (tokenizer.begin_of_text is not None) + (tokenizer.end_of_text is not None)
            if counts[split]["tokens"] <= ends:  # a single, empty text
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
            "begins": {split: crc_of_start(files[f"{split}.bin"].name) for split in SPLITS},
            "unigram_entropy": unigram_entropy(files["val.bin"].name, tokenizer),
        }  # fmt: skip
        files["meta.json"].write(json.dumps(meta, indent=1).encode() + b"\n")
        for file in files.values():
            sync_to_disk(file)
    for name in ("tokenizer.json", "tokenizer_config.json") if stale else ():
        (folder / name).unlink(missing_ok=True)
    for split in SPLITS:
        print(f"{folder / split}.bin: {counts[split]['tokens']:,} tokens{replaced}")
    name = folder.name if folder.resolve().parent.name == "data" else folder
    print(
        f"vocabulary size {tokenizer.vocab_size:,}; train on it with: "
        f"python train.py --dataset={shlex.quote(str(name))} --out_dir=out-{folder.name}"
    )
    return {split: counts[split]["tokens"] for split in SPLITS}


def unigram_entropy(path: str, tokenizer: Tokenizer) -> float:
    """The loss in nats of the best model that only knows token frequencies."""
    seen = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with open(path, "rb") as file:
        while len(ids := np.fromfile(file, dtype=token_dtype(tokenizer), count=BUFFER_TOKENS)):
            seen += np.bincount(ids, minlength=len(seen))
    probabilities = seen[seen > 0] / seen.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def refuse_foreign_files(folder: Path) -> None:
    """Raises UserError instead of replacing a meta.json that describes no data set, or token files
    without a meta.json (nanoGPT's, unless there is a meta.pkl, which cannot be used)."""
    path = folder / "meta.json"
    if not os.path.lexists(path):
        for bare in (folder / f"{split}.bin" for split in SPLITS):
            there = os.path.lexists(bare) and not bare.is_symlink()
            if there and not (folder / "meta.pkl").exists():
                raise UserError(
                    f"{bare} exists without a meta.json, like nanoGPT's files: move it, or use "
                    "another --out"
                )
        return
    with contextlib.suppress(OSError, ValueError):
        meta = read_json(path)
        if "tokenizer" in meta and "dtype" in meta:
            check_meta(meta, str(path))
            return
    raise UserError(f"{path} exists and belongs to no data set: move it, or use another --out")


def folder_tokenizer(folder: Path) -> str | None:
    """meta.json's copy of the tokenizer.json in `folder`; None if the data set uses another."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        text = read_json(folder / "meta.json").get("json")
        if text and json.loads(text) == read_json(folder / "tokenizer.json"):
            return text
    return None


def split_text(text: str, val_fraction: float = 0.1) -> dict[str, list[str]]:
    """Hold out the last `val_fraction` of a text, as nanoGPT's prepare scripts do."""
    cut = int(len(text) * (1 - val_fraction))
    return {"train": [text[:cut]], "val": [text[cut:]]}


def prepare_hub_dataset(namespace: dict[str, Any]) -> None:
    """The main function of a hub data set's prepare.py, called with its `globals()`."""
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
    """Write train.bin, val.bin and meta.json for one split of a data set to `folder`.

    Args:
        path: a repository on the hub, or a local folder with the same layout.
        name: the data set's configuration.
        split: the split of the repository.
        revision: commit, tag or branch of the repository.
        val_fraction: share of the documents held out for validation.
        streaming: read over the network without keeping a copy; else `datasets` caches one.
        max_tokens: stop after this many training tokens; 0: take all. Streaming then downloads only
            as many shards as that takes.

    Raises UserError if the data cannot be loaded or the disk is too small.
    """
    folder = Path(folder)
    dataset = load(path, name, split, revision, num_proc, streaming)
    if "text" not in (dataset.column_names or ["text"]):
        raise UserError(
            f"{path} has no column text, only {shown(', '.join(dataset.column_names))}: save it as "
            "Parquet files, and pass them to data/text/prepare.py with --column=NAME"
        )
    n_shards = dataset.num_shards if streaming else math.ceil(len(dataset) / DOCUMENTS_PER_SHARD)
    source = {
        "path": path, "name": name, "split": split, "revision": revision,
        "val_fraction": val_fraction,
        "shards": n_shards, "documents": None if streaming else len(dataset),
    }  # fmt: skip
    size = dataset.info.dataset_size or (0 if streaming else dataset.data.nbytes)
    jobs = [(dataset, n_shards, i, tokenizer, val_fraction) for i in range(n_shards)]
    # a token takes two bytes and covers about four bytes of text
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
    """Write train.bin, val.bin and meta.json for the texts in files (see steady/textfiles.py).

    tokenizer: a name for `load_tokenizer`, or char or bpe:SIZE, which read all files twice.

    Raises UserError for a file that cannot be read and, unless `skip_bad_rows`, for the first row
    without text.
    """
    folder = Path(folder)
    refuse_foreign_files(folder)
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
        chosen = train_own_bpe(folder, tokenizer, groups, column, skip_bad_rows)
    elif special_tokens and tokenizer.startswith("bpe:"):
        raise UserError(
            "special_tokens=True needs a gpt2 or hf: tokenizer, a new BPE has no special tokens"
        )
    else:
        chosen = tokenizer_named(tokenizer, special_tokens)
    if special_tokens and not getattr(chosen, "special_tokens", False):
        raise UserError(f"special_tokens=True needs a gpt2 or hf: tokenizer, not {tokenizer}")
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
    """Like `load_tokenizer`, but also takes run:FOLDER: the tokenizer of a training run."""
    if not name.startswith("run:"):
        return load_tokenizer(name, special_tokens)
    from steady import checkpoint  # which needs torch

    path = Path(name.removeprefix("run:"))
    meta = checkpoint.load(path if path.is_file() else checkpoint.find(path))["tokenizer"]
    return from_meta(meta | ({"special_tokens": True} if special_tokens else {}))


def texts_of(
    groups: list[list[textfiles.Part]], column: str, skip_bad_rows: bool, description: str
) -> Iterator[str]:
    """All texts in parts of files, text files in chunks."""
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


def train_own_bpe(
    folder: Path, name: str, groups: list[list[textfiles.Part]], column: str, skip_bad_rows: bool
) -> Tokenizer:
    """Train a BPE of the size in `bpe:SIZE` on the texts (on evenly spread parts if they exceed
    BPE_BYTES) and save it in `folder`. An interrupted run's BPE is reused."""
    size = name.partition(":")[2]
    if not size.isdigit():
        raise UserError(f"unknown tokenizer={name!r}: give the vocabulary size, as in bpe:8192")
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        if os.path.lexists(path) and not folder_tokenizer(folder):
            raise UserError(f"{path} is not part of a data set: move it, or use another --out")
    claim(folder / SHARDS)
    meta = {"size": int(size), "parts": hashlib.sha256(repr(groups).encode()).hexdigest()}
    kept = folder / SHARDS / "tokenizer"
    if kept.is_symlink():
        raise UserError(f"{kept} is a symbolic link, which is not followed: delete it")
    with contextlib.suppress(OSError, ValueError):
        if read_json(kept / "of.json") == meta:
            return load_tokenizer(f"hf:{kept}")
    held = sum(part.size for parts in groups for part in parts)
    every = max(1, math.ceil(held / BPE_BYTES))
    texts = texts_of(groups[::every], column, skip_bad_rows, "reading text for the tokenizer")
    trained = train_bpe((text[i : i + PIECE] for text in texts for i in range(0, len(text), PIECE)),
                        int(size))  # fmt: skip
    if trained.vocab_size < int(size):
        print(f"note: the texts are enough for {trained.vocab_size} tokens only, not {size}")
    kept.mkdir(exist_ok=True)
    write_hf_tokenizer(trained.meta(), kept)
    with atomic_write(kept / "of.json") as file:
        file.write(json.dumps(meta).encode())
    return load_tokenizer(f"hf:{kept}")  # the same as after an interruption


def bad_row(part: textfiles.Part, where: str, problem: str) -> UserError:
    return UserError(f"{part.path}, {where}: {problem} (--skip_bad_rows=True skips such rows)")


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
        source: everything the shards depend on, to recognise those of an interrupted run.
        size: estimated bytes of the tokens.
        max_tokens: stop with the shard that reaches this many training tokens; 0: all shards.
    """
    shards, width = folder / SHARDS, token_dtype(tokenizer).itemsize
    refuse_foreign_files(folder)
    claim(shards)
    note, source = shards / "source.json", source | {"tokenizer": tokenizer.meta()}
    before = None
    with contextlib.suppress(ValueError):  # a full disk truncated it
        before = read_json(note) or None
    if before != source:
        was = before if isinstance(before, dict) else {}
        other = sorted(k for k in source.keys() | was.keys() if was.get(k) != source.get(k))
        if other == ["skip_bad_rows"] and source.get("skip_bad_rows"):
            other = []  # the finished shards had no bad row
        if other and before is not None and any(shards.glob("[0-9]*.json")):
            raise UserError(
                f"{shards} holds shards of an interrupted run with different {', '.join(other)}: "
                "delete it to start over"
            )
        with atomic_write(note) as file:
            file.write(json.dumps(source).encode())
    key = {k: v for k, v in source.items() if k != "skip_bad_rows"}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    records = [Record(shards / f"{i:05d}.json", digest, width) for i in range(len(jobs))]
    missing = [i for i, record in enumerate(records) if record.read() is None]
    kept = {name for r in records if (found := r.read()) for name, _ in found["files"].values()}
    for path in shards.glob("*.bin"):  # left by runs that were killed
        if path.name not in kept:
            path.unlink(missing_ok=True)
    if len(missing) < len(jobs):
        print(f"{len(jobs) - len(missing)} of {len(jobs)} shards are already done")
    # the disk must hold the shards and the result at the same time
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
        if file.tell() < total["tokens"] * width:  # truncated: the bytes of its text are unknown
            total["tokens"] = file.tell() // width
            del total["bytes"]
        return total

    rows = [row for record in records[:used] for row in record.read()["skipped"]]
    if rows:
        print(visible("\n".join(rows[:10] + (["..."] if len(rows) > 10 else []))))
        print(f"warning: skipped {len(rows):,} rows without text")
    try:
        complete(folder, tokenizer, join)
    except UserError:
        shutil.rmtree(shards)  # useless, and they would block a second try with more text
        raise
    if (shards / "tokenizer").exists():
        for path in (shards / "tokenizer").glob("tokenizer*.json"):
            os.replace(path, folder / path.name)
    shutil.rmtree(shards)


class Record:
    """The record of a shard: the names, lengths and checksums of its files, as JSON.

    digest: hash of everything the shard depends on. width: bytes per token.
    """

    def __init__(self, path: Path, digest: str, width: int):
        self.path, self.digest, self.width = path, digest, width

    def read(self) -> dict[str, Any] | None:
        """The record, or None if the shard is incomplete or made from something else."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = read_json(self.path)
            sizes = [(self.path.parent / name).stat().st_size == counts["tokens"] * self.width
                     for name, counts in found["files"].values()]  # fmt: skip
            if found["digest"] == self.digest and sizes == [True] * len(SPLITS):
                return found
        return None


class Shard:
    """The output of a job: a token file per split, and the skipped rows."""

    def __init__(self, writers: dict[str, TokenWriter]):
        self.writers, self.skipped = writers, []

    def add(self, split: str, text: str) -> str | None:
        """Add a document to a split. Returns the tokenizer's error, or None."""
        try:
            self.writers[split].add(text)
        except (KeyboardInterrupt, SystemExit, MemoryError, OSError):
            raise
        except BaseException as error:  # a Rust library's panic is not an Exception
            reason = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            return f"the tokenizer failed ({shown(reason)})"


def make_shard(job: tuple) -> None:
    """Make the files of a shard, then its record."""
    write, record, tokenizer, work = job
    run = os.urandom(4).hex()  # makes file names unique to this run
    paths = {split: record.path.with_suffix(f".{run}.{split}.bin") for split in SPLITS}
    try:
        with contextlib.ExitStack() as stack:
            files = {s: stack.enter_context(open(path, "xb")) for s, path in paths.items()}
            shard = Shard({s: TokenWriter(file, tokenizer) for s, file in files.items()})
            write(shard, work)
            found = {s: (paths[s].name, w.counts()) for s, w in shard.writers.items()}
            for file in files.values():
                sync_to_disk(file)
    except BaseException as error:
        for path in paths.values():
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(record.path.parent)  # an error about a full disk has none
        raise
    with atomic_write(record.path) as file:
        content = {"digest": record.digest, "files": found, "skipped": shard.skipped}
        file.write(json.dumps(content).encode())


def run_jobs(work: Callable, jobs: list[tuple], num_proc: int, description: str = "") -> None:
    """Run `work` on every job in several processes. Their errors are raised here."""
    if num_proc == 1 or len(jobs) <= 1:
        for _ in progress(map(work, jobs), len(jobs), description):
            pass
        return
    with ProcessPoolExecutor(num_proc, initializer=die_with_parent) as pool:
        try:
            for _ in progress(pool.map(work, jobs), len(jobs), description):
                pass
        except UserError as error:  # drop the worker's traceback
            pool.shutdown(cancel_futures=True)
            raise UserError(str(error)) from None
        except BrokenExecutor:
            raise UserError(
                "a tokenizing process was killed, maybe because memory ran out: use a smaller "
                "--num_proc; the same command continues after the finished shards"
            ) from None


def die_with_parent() -> None:
    """End this process when its parent is gone (F80), so that it does not keep writing."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def progress(work: Any, total: int, description: str) -> Any:
    """`work` with a progress bar, if tqdm is installed and there is a description."""
    if description:
        try:
            from tqdm import tqdm
        except ImportError:
            return work
        unit = "shard" if work is not None else "token"
        return tqdm(work, total=total, unit=unit, unit_scale=work is None, desc=description)
    return work


def load(path: str, name: str, split: str, revision: str, num_proc: int, streaming: bool) -> Any:
    """Load a split of a data set. Raises UserError if that fails, for example offline."""
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
    except Exception as error:  # the hub's libraries raise many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        remedy = (
            "connect to the Hugging Face hub, or pass --path=FOLDER with a copy of the repository"
        )
        if "config name is missing" in str(error).lower():
            with contextlib.suppress(Exception):
                lines = [", ".join(datasets.get_dataset_config_names(path))]
            remedy = "it has several configurations, pass one as --name=NAME"
        elif "split" in lines[0].lower():
            remedy = "pass --split=NAME"
        raise UserError(f"cannot load {path} ({shown(lines[0])}): {remedy}") from None


def write_shard(shard: Shard, job: tuple) -> None:
    """Tokenize a shard of a hub data set."""
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
    """Tokenize parts of files. The held-out rows, `val_fraction` of all, are evenly spread."""
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
            if writer.chat and list(ids[:1]) == begin:  # the text contains it already
                begin = []
            writer.append(begin, ids)
            begin, last = [], list(ids[-1:])
    except UserError as error:
        raise UserError(f"{part.path}: {error}") from None
    writer.append([] if writer.chat and last == end else end)
