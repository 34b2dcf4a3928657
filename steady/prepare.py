"""Documents to token files. train.py reads a data set of train.bin, val.bin and meta.json.

Token files are headerless little-endian uint16, or uint32 when the vocabulary needs it. meta.json
holds the tokenizer, the vocabulary size and the dtype, and for each file the number of tokens, the
number of bytes of their text, and the checksum (CRC-32).

One process reads the documents in order, several tokenize them in batches, and the first one
appends the tokens to files in `.shards/`, which is locked. Every few seconds `done.json` records
how far it got, and after an interruption the next run continues there. The choice of held-out
documents depends only on their position, not on processes or restarts.
"""

import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from configurator import CONFIGS, configs_for, configure, dataset_name
from steady import UserError, textfiles, visible
from steady.folder import (
    atomic_write,
    claim,
    crc_of_start,
    file_crc,
    remove_temporary,
    replace_file,
    sync_to_disk,
)
from steady.output import shown, waiting
from steady.shuffle import scramble
from steady.textfiles import Piece
from steady.tokenizer import (
    PIECE,
    ByteTokenizer,
    CharTokenizer,
    HFTokenizer,
    Tokenizer,
    check_meta,
    code_points,
    encode_pieces,
    from_meta,
    load_tokenizer,
    read_json,
    train_bpe,
)

SPLITS = ("train", "val")
FILES = (*(f"{split}.bin" for split in SPLITS), "meta.json")  # of a data set
BATCH = 2**22  # characters that a process tokenizes at a time
SAVE_SECONDS = 5  # between records of the progress
DOCUMENTS_PER_SHARD = 50_000
SHARDS = ".shards"  # folder of unfinished files, removed at the end: a name no user would choose
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


def write_dataset(
    folder: str | Path, tokenizer: Tokenizer, splits: dict[str, Iterable[str]]
) -> dict[str, int]:
    """Tokenize `splits` (`{"train": documents, "val": documents}`) into `folder`.

    Returns the token count of each split and prints them.
    """

    def read(i: int) -> Iterator[Piece]:
        for n, text in enumerate(splits[SPLITS[i]], 1):
            yield Piece(SPLITS[i], text, f"document {n} of {SPLITS[i]}")

    tokens = write_tokens(Path(folder), tokenizer, None, read, len(SPLITS), 0)
    say_how_to_train(Path(folder), tokenizer)
    return tokens


def write_tokens(
    folder: Path,
    tokenizer: Tokenizer,
    source: dict[str, Any] | None,
    read: Callable[[int], Iterator[Piece]],
    n_parts: int,
    size: int,
    num_proc: int = 1,
    skip_bad_rows: bool = False,
    max_tokens: int = 0,
    unit: str = "document",
    total: int | None = None,
) -> dict[str, int]:
    """Make a data set of the documents in the parts `read(0)` to `read(n_parts - 1)`.

    Args:
        source: everything the tokens depend on, to recognise those of an interrupted run; None
            starts from the beginning.
        size: estimated bytes of the tokens.
        max_tokens: stop after this many training tokens; 0: take all.
        unit, total: of the documents' positions, for the progress bar.
    """
    refuse_foreign_files(folder)
    shards, width = folder / SHARDS, token_dtype(tokenizer).itemsize
    claim(shards)
    if source is not None:
        source = source | {"tokenizer": tokenizer.meta()}
    paths = {split: shards / f"{split}.bin" for split in SPLITS}
    done = source and read_progress(shards, source, width)
    if not done or 0 < max_tokens < done["tokens"]["train"]:
        done = {"source": source, "position": [0, 0], "skipped": [], "n_skipped": 0,
                "tokens": dict.fromkeys(SPLITS, 0), "bytes": dict.fromkeys(SPLITS, 0)}  # fmt: skip
        for path in paths.values():
            path.unlink(missing_ok=True)
    elif done["tokens"]["train"]:
        print(f"continuing after {done['tokens']['train']:,} tokens of an interrupted run")
    tokens = done["tokens"]
    needed, free = max_tokens * width or size, shutil.disk_usage(folder).free
    if needed - sum(tokens.values()) * width > free:
        raise UserError(
            f"{folder} needs about {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} are free: make "
            "room, or use --out=FOLDER on another disk"
        )
    if max_tokens:
        unit, total = "token", max_tokens
    bar = waiting(None, total, "tokenizing", unit=unit, unit_scale=True)
    saved = time.monotonic()
    with contextlib.ExitStack() as stack, named_after(shards):
        files = {s: stack.enter_context(open(path, "ab")) for s, path in paths.items()}
        for split, file in files.items():
            file.truncate(tokens[split] * width)  # the progress may be older
        jobs = () if 0 < max_tokens <= tokens["train"] else batches(read, n_parts, done["position"])
        for ids, n_bytes, bad, position, at in run_jobs(encode_batch, jobs, num_proc, tokenizer):
            if bad and not skip_bad_rows:
                hint = " (--skip_bad_rows=True skips such rows)" if source is not None else ""
                raise UserError(bad[0] + hint)
            for split in SPLITS:
                files[split].write(ids[split].data)  # ndarray.tofile hides that a disk is full
                tokens[split] += len(ids[split])
                done["bytes"][split] += n_bytes[split]
            done["skipped"] = [*done["skipped"], *bad][:10]
            done["n_skipped"] += len(bad)
            done["position"] = position
            advance(bar, tokens["train"] if max_tokens else at)
            enough = 0 < max_tokens <= tokens["train"]
            if enough or time.monotonic() - saved >= SAVE_SECONDS:
                for file in files.values():
                    sync_to_disk(file)
                if source is not None:
                    with atomic_write(shards / "done.json") as record:
                        record.write(json.dumps(done).encode())
                saved = time.monotonic()
            if enough:
                break
        if 0 < max_tokens < tokens["train"]:
            files["train"].truncate(max_tokens * width)
            tokens["train"] = max_tokens
            del done["bytes"]["train"]  # the bytes of its text are unknown
        for file in files.values():
            sync_to_disk(file)
    if bar is not None:
        bar.close()
    if done["n_skipped"]:
        print(visible("\n".join(done["skipped"] + ["..."] * (done["n_skipped"] > 10))))
        print(f"warning: skipped {done['n_skipped']:,} bad rows")
    try:
        complete(folder, tokenizer, done)
    finally:
        shutil.rmtree(shards)  # after an error, they would block a second try with more text
    return tokens


def read_progress(shards: Path, source: Any, width: int) -> dict[str, Any] | None:
    """The progress of an interrupted run on the same source. None if there is none, if it is not
    valid, or if a file is shorter than it says."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged, or of another version
        done = read_json(shards / "done.json")
        if done["source"] != source:
            print("note: starting over: the settings differ from those of the interrupted run")
            return None
        counts = [done[name][split] for name in ("tokens", "bytes") for split in SPLITS]
        counts += [*done["position"], done["n_skipped"]]
        valid = all(type(n) is int and n >= 0 for n in counts) and len(done["position"]) == 2
        valid = valid and all(type(text) is str for text in done["skipped"])
        for split in SPLITS:
            path, size = shards / f"{split}.bin", done["tokens"][split] * width
            ours = path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1
            valid = valid and ours and path.stat().st_size >= size
        return done if valid else None
    return None


@contextlib.contextmanager
def named_after(path: Path) -> Iterator[None]:
    """Name `path` in errors about a full disk, which name no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def batches(
    read: Callable[[int], Iterator[Piece]], n_parts: int, position: Sequence[int] = (0, 0)
) -> Iterator[tuple[list[Piece], list[int]]]:
    """Batches of about BATCH characters of the documents after `position`, each with its own end.
    A position is a part's number and the number of its pieces that come before."""
    batch, size = [], 0
    for i in range(position[0], n_parts):
        for n, piece in enumerate(read(i), 1):
            if [i, n] <= list(position):
                continue
            batch.append(piece)
            size += len(piece.text) + 100  # an empty document takes memory too
            if size >= BATCH:
                yield batch, [i, n]
                batch, size = [], 0
    if batch:
        yield batch, [n_parts, 0]


def run_jobs(
    work: Callable, jobs: Iterable[Any], num_proc: int, tokenizer: Tokenizer | None = None
) -> Iterator[Any]:
    """The results of `work` on every job, in order. Several processes take turns, with at most two
    jobs for each of them in memory."""
    stopping = multiprocessing.RawValue("b", False)
    if num_proc == 1:
        start_process(tokenizer, stopping)
        yield from map(work, jobs)
        return
    num_proc = min(num_proc, 4 * (os.cpu_count() or 1))  # thousands would take all memory
    pool = ProcessPoolExecutor(num_proc, initializer=start_process, initargs=(tokenizer, stopping))
    pending: deque[Any] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(work, job))
            if len(pending) == 2 * num_proc:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenExecutor:
        raise UserError(
            "a tokenizing process was killed, maybe because memory ran out: use a smaller "
            "--num_proc; the same command continues where this one stopped"
        ) from None
    finally:
        stopping.value = True
        pool.shutdown(cancel_futures=True)


def start_process(tokenizer: Tokenizer | None, stopping: Any) -> None:
    """Set the tokenizer of `encode_batch`, and a flag that ends it early. A worker ends when its
    parent is gone (F80), and leaves Ctrl-C to it: an exception while it sends a result would leave
    the parent waiting for the rest."""
    global process_tokenizer, process_stopping
    process_tokenizer, process_stopping = tokenizer, stopping
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=watch, daemon=True).start()


def encode_batch(
    job: tuple[list[Piece], list[int]],
) -> tuple[dict[str, np.ndarray], dict[str, int], list[str], list[int], int]:
    """The ids and bytes of a batch's text by split, messages about its bad documents, and the two
    positions at which it ends."""
    pieces, position = job
    dtype, bad = token_dtype(process_tokenizer), []
    ids: dict[str, list[Any]] = {split: [np.empty(0, dtype)] for split in SPLITS}
    n_bytes = dict.fromkeys(SPLITS, 0)
    for piece in pieces:
        if process_stopping.value:
            break
        problem = piece.problem
        if problem is None:
            try:
                ids[piece.split] += encode_document(process_tokenizer, piece)
                n_bytes[piece.split] += len(piece.text.encode())
            except (KeyboardInterrupt, SystemExit, MemoryError, OSError):
                raise
            except BaseException as error:  # a Rust library's panic is not an Exception
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                problem = f"the tokenizer failed ({shown(kind + str(error))})"
        if problem is not None:
            bad.append(f"{piece.where}: {problem}")
            if piece.before or piece.after:  # no part of a text can be skipped
                raise UserError(bad[-1])
    joined = {s: np.concatenate(ids[s], dtype=dtype, casting="unsafe") for s in SPLITS}
    return joined, n_bytes, bad, position, pieces[-1].at


def encode_document(tokenizer: Tokenizer, piece: Piece) -> list[Sequence[int]]:
    """The ids of a piece, with the begin-of-text and end-of-text tokens at the ends of its text."""
    if not (piece.before or piece.text or piece.after):  # an empty document
        return []
    ids = list(encode_pieces(tokenizer, [piece.text], piece.before, piece.after))
    begin = [] if tokenizer.begin_of_text is None or piece.before else [tokenizer.begin_of_text]
    end = [] if tokenizer.end_of_text is None or piece.after else [tokenizer.end_of_text]
    if getattr(tokenizer, "special_tokens", False):  # the text may contain them already
        begin = begin if list(ids[0][:1]) != begin else []
        end = end if list(ids[-1][-1:]) != end else []
    return [begin, *ids, end]


def advance(bar: Any, at: int) -> None:
    """Move a progress bar, if there is one, to a position."""
    if bar is not None:
        bar.update(at - bar.n)


def complete(folder: Path, tokenizer: Tokenizer, done: dict[str, Any]) -> None:
    """Make a data set of token files that are on disk. Only now do its files appear."""
    remove_temporary(folder, FILES)
    paths, tokens = {split: folder / SHARDS / f"{split}.bin" for split in SPLITS}, done["tokens"]
    dtype = token_dtype(tokenizer)
    replaced = ", replacing an earlier data set" if (folder / "train.bin").exists() else ""
    ends = (tokenizer.begin_of_text is not None) + (tokenizer.end_of_text is not None)
    for split, path in paths.items():
        assert path.stat().st_size == tokens[split] * dtype.itemsize, (split, tokens)
        if tokens[split] <= ends:  # a single, empty text
            raise UserError(
                f"the {split} split of {folder} would be empty: use more text, or another "
                "--val_fraction"
            )
    seen = count_tokens(paths["val"], tokenizer)
    probabilities = seen[seen > 0] / seen.sum()
    meta = tokenizer.meta() | {
        "vocab_size": tokenizer.vocab_size,
        "dtype": {2: "uint16", 4: "uint32"}[dtype.itemsize],
        "tokens": tokens,
        "bytes": done["bytes"],
        "crc32": {split: file_crc(path) for split, path in paths.items()},
        "begins": {split: crc_of_start(path) for split, path in paths.items()},
        # the loss in nats of the best model that only knows token frequencies
        "unigram_entropy": float(-(probabilities * np.log(probabilities)).sum()),
    }
    with atomic_write(folder / "meta.json") as file:
        file.write(json.dumps(meta, indent=1).encode() + b"\n")
    for path in paths.values():
        replace_file(path, folder / path.name)
    for split in SPLITS:
        print(f"{folder / split}.bin: {tokens[split]:,} tokens{replaced}")
    unknown = tokenizer.unknown() if isinstance(tokenizer, HFTokenizer) else None
    share = 0 if unknown is None else seen[unknown] / seen.sum()
    if share > 0.01:
        print(
            f"warning: {share:.0%} of val.bin's tokens are the unknown token: use a tokenizer that "
            "was made for such text, or gpt2 or byte, which know every character"
        )


def say_how_to_train(folder: Path, tokenizer: Tokenizer, name: str = "") -> None:
    """Print the command that trains on a data set: with its own config, or with one for its kind of
    tokens and this machine. With a run's tokenizer (`name` is run:FOLDER) it finetunes that run."""
    dataset, gpu = dataset_name(folder), shutil.which("nvidia-smi")
    own = [path.name for path in configs_for(dataset) if not path.name.startswith("eval")]
    own.sort(key=lambda config: config.endswith("_cpu.py") is bool(gpu))  # this machine's first
    if name.startswith("run:"):
        file, _, longest = run_named(name)
        tokens = read_json(folder / "meta.json")["tokens"].values()
        block_size = min(longest, *(n - 1 for n in tokens))
        out_dir = os.path.relpath(os.path.abspath(file.parent) + "-finetuned")
        config = "finetune_shakespeare.py"
        flags = [f"--init_from={file}", f"--dataset={dataset}", f"--out_dir={out_dir}",
                 f"--block_size={block_size}"]  # fmt: skip
    elif own:
        config, flags = own[0], []
    else:
        config = "train_shakespeare_char.py" if gpu else "train_shakespeare_char_cpu.py"
        if gpu and tokenizer.vocab_size >= 1024:
            config = "train_gpt2_muon.py"
        flags = [f"--dataset={dataset}", f"--out_dir=out-{Path(dataset).name}"]
    here = Path(os.path.relpath(CONFIGS.parent))
    command = shlex.join(["python", str(here / "train.py"), str(here / "config" / config), *flags])
    print(f"vocabulary size {tokenizer.vocab_size:,}; train on it with: {command}")


def count_tokens(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """How often each id (vocab_size,) is in a token file."""
    seen = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with open(path, "rb") as file:
        while len(ids := np.fromfile(file, dtype=token_dtype(tokenizer), count=2**20)):
            seen += np.bincount(ids, minlength=len(seen))
    return seen


def refuse_foreign_files(folder: Path) -> None:
    """Raises UserError instead of replacing a meta.json that describes no data set, or token files
    without a meta.json, which may be nanoGPT's. (With a meta.pkl they cannot be used.)"""
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


def split_text(text: str, val_fraction: float = 0.1) -> dict[str, list[str]]:
    """Hold out the last `val_fraction` of a text, as nanoGPT's prepare scripts do."""
    cut = int(len(text) * (1 - val_fraction))
    return {"train": [text[:cut]], "val": [text[cut:]]}


def prepare_hub_dataset(namespace: dict[str, Any]) -> None:
    """The main function of a hub data set's prepare.py, called with its `globals()`."""
    config = configure(namespace, base=__file__, positional="")
    folder = config.pop("out") or Path(namespace["__file__"]).parent
    name = config.pop("tokenizer")
    chosen = tokenizer_named(name, config.pop("special_tokens"))
    prepare_from_hub(folder, chosen, **config)
    say_how_to_train(Path(folder), chosen, name)


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
    import datasets

    folder = Path(folder)
    try:
        dataset = datasets.load_dataset(
            path,
            name or None,
            split=split,
            revision=None if Path(path).is_dir() else revision,
            streaming=streaming,
            num_proc=num_proc if num_proc > 1 and not streaming else None,
        )
    except Exception as error:  # the hub's libraries raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot load {path} ({shown(reason)}): connect to the Hugging Face hub, choose a "
            "configuration and a split with --name=NAME and --split=NAME, or pass --path=FOLDER "
            "with a copy of it"
        ) from None
    if "text" not in (dataset.column_names or ["text"]):
        raise UserError(
            f"{path} has no column text, only {shown(', '.join(dataset.column_names))}: save it as "
            "Parquet files, and pass them to data/text/prepare.py with --column=NAME"
        )
    files = sorted(Path(path).rglob("*")) if Path(path).is_dir() else ()
    own = folder.resolve()
    local = [p for p in files if p.is_file() and own not in p.resolve().parents]
    n_shards = dataset.num_shards if streaming else math.ceil(len(dataset) / DOCUMENTS_PER_SHARD)
    source = {
        "path": path, "name": name, "split": split, "revision": revision,
        "val_fraction": val_fraction,
        "shards": n_shards, "documents": None if streaming else len(dataset),
        "files": [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in local],
    }  # fmt: skip
    limit = np.uint64(int(val_fraction * 2**64))

    def read(i: int) -> Iterator[Piece]:
        row, part = 0, dataset.shard(num_shards=n_shards, index=i).select_columns("text")
        for batch in part.iter(1000):
            hashes = scramble(np.arange(row, row + len(batch["text"])) + (i << 32), key=0)
            for text, held_out in zip(batch["text"], hashes < limit, strict=True):
                row += 1
                text, problem = textfiles.checked(text, "text")
                where = f"document {row} of part {i + 1} of {n_shards}"
                yield Piece("val" if held_out else "train", text, where, problem, i)

    size = dataset.info.dataset_size or (0 if streaming else dataset.data.nbytes)
    # a token takes two bytes and covers about four bytes of text
    write_tokens(folder, tokenizer, source, read, n_shards, size // 2, num_proc,
                 True, max_tokens, unit="shard", total=n_shards)  # fmt: skip


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

    tokenizer: a name for `tokenizer_named`, or char or bpe:SIZE, which read all files twice.

    Raises UserError for a file that cannot be read and, unless `skip_bad_rows`, for the first row
    without text.
    """
    folder = Path(folder)
    refuse_foreign_files(folder)
    for path in paths:
        textfiles.check_start(path)
    sizes = [path.stat().st_size for path in paths]
    begins = [0, *itertools.accumulate(sizes)]

    def read(i: int, tokenizer: Tokenizer) -> Iterator[Piece]:
        return textfiles.pieces_of(paths[i], i, column, val_fraction, tokenizer, begins[i])

    def texts(description: str) -> Iterator[str]:
        """All texts, for the tokenizers that are made from them."""
        bar = waiting(None, sum(sizes), description, unit="B", unit_scale=True)
        for batch, _ in batches(lambda i: read(i, ByteTokenizer()), len(paths)):
            for piece in batch:
                if piece.problem is None:
                    yield piece.text
            advance(bar, batch[-1].at)

    own = tokenizer == "char" or tokenizer.startswith("bpe:")
    if not own or special_tokens:
        chosen = tokenizer_named(tokenizer, special_tokens)
    elif tokenizer.startswith("bpe:"):
        every = math.ceil(sum(sizes) / BPE_BYTES)
        chosen = train_own_bpe(tokenizer, itertools.islice(
            texts("reading text for the tokenizer"), 0, None, max(1, every)))  # fmt: skip
    else:
        seen = np.zeros(sys.maxunicode + 1, dtype=bool)
        for text in texts("reading characters"):
            seen[code_points(text)] = True
        # a single text file is one long document, as nanoGPT's data sets are
        several = len(paths) > 1 or textfiles.kind_of(paths[0]) != "text"
        chosen = CharTokenizer("".join(map(chr, np.flatnonzero(seen))), ends=several)
    source = {
        "files": [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths],
        "column": column, "val_fraction": val_fraction,
    }  # fmt: skip
    size = sum(sizes) * 2 if tokenizer in ("char", "byte") else sum(sizes) // 2
    write_tokens(folder, chosen, source, lambda i: read(i, chosen), len(paths), size, num_proc,
                 skip_bad_rows, unit="B", total=sum(sizes))  # fmt: skip
    say_how_to_train(folder, chosen, tokenizer)


def tokenizer_named(name: str, special_tokens: bool) -> Tokenizer:
    """Like `load_tokenizer`, but also takes run:FOLDER: the tokenizer of a training run."""
    if special_tokens and not name.startswith(("gpt2", "hf:", "run:")):
        raise UserError(f"special_tokens=True needs a gpt2, hf: or run: tokenizer, not {name}")
    if not name.startswith("run:"):
        return load_tokenizer(name, special_tokens)
    meta = run_named(name)[1]
    if special_tokens and meta.get("tokenizer") in ("byte", "char"):
        raise UserError(f"special_tokens=True: {name} has a {meta['tokenizer']} tokenizer")
    return from_meta(meta | ({"special_tokens": True} if special_tokens else {}))


@functools.cache  # reading and checking the file takes seconds
def run_named(name: str) -> tuple[Path, dict[str, Any], int]:
    """The checkpoint of run:FOLDER (or run:FILE): its file, its tokenizer and its block_size."""
    from steady import checkpoint  # which needs torch

    path = Path(name.removeprefix("run:")).expanduser()
    file = path if path.is_file() else checkpoint.find(path)
    if not file.exists():
        raise UserError(f"--tokenizer={name}: there is no checkpoint of a run at {file}")
    content = checkpoint.load(file)
    return file, content["tokenizer"], content["model_config"]["block_size"]


def train_own_bpe(name: str, texts: Iterable[str]) -> Tokenizer:
    """Train a BPE of the size in `bpe:SIZE`. The same texts give the same BPE, so an interrupted
    run can train it again."""
    size = name.partition(":")[2]
    if not size.isdecimal():
        raise UserError(f"unknown tokenizer={name!r}: give the vocabulary size, as in bpe:8192")
    trained = train_bpe((text[i : i + PIECE] for text in texts for i in range(0, len(text), PIECE)),
                        int(size))  # fmt: skip
    if trained.vocab_size < int(size):
        print(f"note: the texts yield only {trained.vocab_size} tokens, not {size}")
    return trained
