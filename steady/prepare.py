"""Documents to token files. train.py reads a data set of train.bin, val.bin and meta.json.

Token files are headerless little-endian uint16, or uint32 when the vocabulary needs it. meta.json
holds the tokenizer, the vocabulary size and the dtype, and for each file the number of tokens, the
number of bytes of their text, and the checksum (CRC-32) of its beginning.

One thread reads the documents in order and writes their tokens; others tokenize them in batches
(tokenizers release Python's lock). The files appear only when they are complete: an interrupted
preparation starts over. The choice of held-out documents depends only on their position.
"""

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from configurator import CONFIGS, configs_for, configure, dataset_name
from steady import UserError, textfiles, visible
from steady.folder import atomic_write, claim, crc_of_start, naming, sync_to_disk
from steady.output import shown, waiting
from steady.shuffle import scramble
from steady.textfiles import Piece
from steady.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    HFTokenizer,
    Tokenizer,
    cut_text,
    from_meta,
    load_tokenizer,
    read_json,
    train_bpe,
)

SPLITS = ("train", "val")
FILES = (*(f"{split}.bin" for split in SPLITS), "meta.json")  # of a data set
BATCH = 2**22  # characters that a thread tokenizes at a time
DOCUMENTS_PER_SHARD = 50_000
BPE_BYTES = 2**28  # most bytes of text to train a BPE on
# `datasets` would use its copy of a folder, and its number of rows, even if the files have changed
FRESH = {"download_mode": "force_redownload", "verification_mode": "no_checks"}

# settings of every hub data set's prepare.py, besides its own

# preparation
split = "train"  # split of the repository; val_fraction of it is held out
revision = "main"  # commit, tag or branch; a commit pins the data
tokenizer = "gpt2"  # gpt2, byte, hf:PATH_OR_HUB_ID, or run:FOLDER
special_tokens = False  # encode special tokens in the text as tokens: for chat data
num_proc = 1  # threads that tokenize
streaming = False  # read over the network without keeping a copy of the text
max_tokens = 0  # stop after this many training tokens; 0: take all
out = ""  # folder to write to; default: the data set's own


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def write_dataset(
    folder: str | Path, tokenizer: Tokenizer, splits: dict[str, Iterable[str]]
) -> None:
    """Tokenize `splits` (`{"train": documents, "val": documents}`) into `folder`."""
    pieces = (
        Piece(split, text, f"document {n} of {split}")
        for split in SPLITS
        for n, text in enumerate(splits[split], 1)
    )
    write_tokens(Path(folder), tokenizer, pieces)


def write_tokens(
    folder: Path,
    tokenizer: Tokenizer,
    pieces: Iterator[Piece],
    size: int = 0,
    num_proc: int = 1,
    skip_bad_rows: bool = False,
    max_tokens: int = 0,
) -> None:
    """Make a data set of the documents, and print the command that trains on it.

    Args:
        size: bytes of the text, as far as known.
        max_tokens: stop after this many training tokens; 0: take all.
    """
    refuse_foreign_files(folder)
    claim(folder, FILES)
    width, n_bytes, skipped = token_dtype(tokenizer).itemsize, dict.fromkeys(SPLITS, 0), []
    per_token = 1 if isinstance(tokenizer, CharTokenizer | ByteTokenizer) else 4  # bytes of text
    encoded = encode_batches(tokenizer, batches(pieces), num_proc)
    n_batches = math.ceil((max_tokens * per_token or size) / BATCH)
    with contextlib.ExitStack() as stack:
        stack.callback((folder / ".lock").unlink, missing_ok=True)
        files = {s: stack.enter_context(atomic_write(folder / f"{s}.bin")) for s in SPLITS}
        for ids, sizes, bad in waiting(encoded, n_batches, "tokenizing", unit="batch"):
            if bad and not skip_bad_rows:
                raise UserError(f"{bad[0]} (data/text/prepare.py has --skip_bad_rows=True)")
            skipped += bad
            for split, file in files.items():
                file.write(ids[split].data)  # ndarray.tofile hides that a disk is full
                n_bytes[split] += sizes[split]
            if 0 < max_tokens * width <= files["train"].tell():
                files["train"].truncate(max_tokens * width)
                del n_bytes["train"]  # the bytes of its text are unknown
                break
        if skipped:
            print(visible("\n".join(skipped[:10] + ["..."] * (len(skipped) > 10))))
            print(f"warning: skipped {len(skipped):,} bad rows")
        write_meta(folder, tokenizer, files, n_bytes)
    say_how_to_train(folder, tokenizer)


def batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Batches of about BATCH characters of the documents."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 100  # an empty document takes memory too
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_batches(
    tokenizer: Tokenizer, batches: Iterable[list[Piece]], num_proc: int
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, int], list[str]]]:
    """The results of `encode_batch` on every batch, in order. The threads work at the same
    time, with at most two batches per thread in memory."""
    num_proc = min(num_proc, 4 * (os.cpu_count() or 1))  # thousands would take all memory
    pool, pending = ThreadPoolExecutor(num_proc), deque()
    try:
        for batch in batches:
            pending.append(pool.submit(encode_batch, tokenizer, batch))
            if len(pending) == 2 * num_proc:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def encode_batch(
    tokenizer: Tokenizer, pieces: list[Piece]
) -> tuple[dict[str, np.ndarray], dict[str, int], list[str]]:
    """The ids and bytes of a batch's text by split, and messages about its bad documents."""
    dtype, bad = token_dtype(tokenizer), []
    ids: dict[str, list[Any]] = {split: [np.empty(0, dtype)] for split in SPLITS}
    n_bytes = dict.fromkeys(SPLITS, 0)
    for piece in pieces:
        problem = piece.problem
        if problem is None:
            try:
                found, length = encode_document(tokenizer, piece)
                ids[piece.split] += found
                n_bytes[piece.split] += length
            except (MemoryError, OSError):  # not the document's fault
                raise
            except BaseException as error:  # a Rust library's panic is not an Exception
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                problem = f"the tokenizer failed ({shown(kind + str(error))})"
        if problem is not None:
            bad.append(f"{piece.where}: {problem}")
            if piece.before or piece.after:  # no part of a text can be skipped
                raise UserError(bad[-1])
    joined = {s: np.concatenate(ids[s], dtype=np.uint32, casting="unsafe") for s in SPLITS}
    if any(len(found) and found.max() >= tokenizer.vocab_size for found in joined.values()):
        raise UserError(f"the tokenizer gives ids outside of its {tokenizer.vocab_size}")
    return {split: found.astype(dtype, copy=False) for split, found in joined.items()}, n_bytes, bad


def encode_document(tokenizer: Tokenizer, piece: Piece) -> tuple[list[Sequence[int]], int]:
    """The ids of a piece, with the begin-of-text and end-of-text tokens at the ends of its text,
    and the number of its bytes without these tokens."""
    n_bytes = len(piece.text.encode())
    if not (piece.before or piece.text or piece.after):  # an empty document
        return [], n_bytes
    pieces = cut_text(tokenizer, [piece.text], piece.before, piece.after)
    encode = getattr(tokenizer, "encode_between", lambda _, text, __: tokenizer.encode(text))
    ids = list(itertools.starmap(encode, pieces))
    if not (piece.before or piece.after or any(map(len, ids))):  # the tokenizer drops all of it
        return [], n_bytes
    begin = [] if tokenizer.begin_of_text is None or piece.before else [tokenizer.begin_of_text]
    end = [] if tokenizer.end_of_text is None or piece.after else [tokenizer.end_of_text]
    if getattr(tokenizer, "special_tokens", False):  # the text may contain them already
        if begin and list(ids[0][:1]) == begin:
            n_bytes -= len(tokenizer.decode(begin).encode())
            begin = []
        if end and list(ids[-1][-1:]) == end:
            n_bytes -= len(tokenizer.decode(end).encode())
            end = []
    return [begin, *ids, end], n_bytes


def write_meta(
    folder: Path, tokenizer: Tokenizer, files: dict[str, BinaryIO], n_bytes: dict[str, int]
) -> None:
    """Write meta.json for token files that are complete, but still have temporary names. It comes
    first: without it the token files would count as nanoGPT's."""
    dtype, tokens = token_dtype(tokenizer), {}
    replaced = ", replacing an earlier data set" if (folder / "train.bin").exists() else ""
    for split, file in files.items():
        sync_to_disk(file)  # while an earlier data set is still complete
        tokens[split] = os.stat(file.name).st_size // dtype.itemsize
        if not tokens[split]:
            raise UserError(
                f"the {split} split of {folder} would be empty: use more text, or another "
                "--val_fraction"
            )
    some = np.fromfile(files["val"].name, dtype, 2**24)  # at most
    shares = np.bincount(some, minlength=tokenizer.vocab_size) / len(some)
    probabilities = shares[shares > 0]
    meta = tokenizer.meta() | {
        "vocab_size": tokenizer.vocab_size,
        "dtype": {2: "uint16", 4: "uint32"}[dtype.itemsize],
        "tokens": tokens,
        "bytes": n_bytes,
        "begins": {split: crc_of_start(file.name) for split, file in files.items()},
        # the loss in nats of the best model that only knows token frequencies
        "unigram_entropy": float(-(probabilities * np.log(probabilities)).sum()),
    }
    with atomic_write(folder / "meta.json") as file:
        file.write(json.dumps(meta, indent=1).encode() + b"\n")
    for split in SPLITS:
        print(f"{folder / split}.bin: {tokens[split]:,} tokens{replaced}")
    unknown = tokenizer.unknown() if isinstance(tokenizer, HFTokenizer) else None
    share = 0 if unknown is None else shares[unknown]
    if share > 0.01:
        print(
            f"warning: {share:.0%} of val.bin's tokens are the unknown token: use a tokenizer that "
            "was made for such text, or gpt2 or byte, which know every character"
        )


def say_how_to_train(folder: Path, tokenizer: Tokenizer) -> None:
    """Print the command that trains on a data set: with its own config, or with one for its kind of
    tokens and this machine."""
    dataset, gpu = dataset_name(folder), shutil.which("nvidia-smi")
    own = [path.name for path in configs_for(dataset) if not path.name.startswith("eval")]
    own.sort(key=lambda config: config.endswith("_cpu.py") is bool(gpu))  # this machine's first
    small = "train_shakespeare_char.py" if gpu else "train_shakespeare_char_cpu.py"
    config = "train_gpt2_muon.py" if gpu and tokenizer.vocab_size >= 1024 else small
    flags = [f"--dataset={dataset}", f"--out_dir=out-{Path(dataset).name}"]
    here = Path(os.path.relpath(CONFIGS.parent))
    command = ["python", str(here / "train.py"), str(here / "config" / (own or [config])[0])]
    command = shlex.join(command + ([] if own else flags))
    print(f"vocabulary size {tokenizer.vocab_size:,}; train on it with: {command}")


def refuse_foreign_files(folder: Path) -> None:
    """Raises UserError instead of replacing files that no prepare.py has written, such as nanoGPT's
    token files without a meta.json. (With a meta.pkl they cannot be used.)"""
    if {"tokenizer", "vocab_size", "dtype"} <= read_json(folder / "meta.json").keys():
        return
    for path in (folder / name for name in FILES):
        usable = not path.is_symlink() and not (folder / "meta.pkl").exists()
        if os.path.lexists(path) and (usable or path.suffix == ".json"):
            raise UserError(f"{path} belongs to no data set of ours: move it, or use another --out")


def split_text(text: str, val_fraction: float = 0.1) -> dict[str, list[str]]:
    """Hold out the last `val_fraction` of a text, as nanoGPT's prepare scripts do."""
    cut = int(len(text) * (1 - val_fraction))
    return {"train": [text[:cut]], "val": [text[cut:]]}


def prepare_hub_dataset(namespace: dict[str, Any]) -> None:
    """The main function of a hub data set's prepare.py, called with its `globals()`. Writes
    train.bin, val.bin and meta.json.

    Raises UserError if the data cannot be loaded.
    """
    config = configure(namespace, base=__file__, positional="")
    tokenizer = tokenizer_named(config["tokenizer"], config["special_tokens"])
    path, split, streaming = config["path"], config["split"], config["streaming"]
    num_proc, val_fraction = config["num_proc"], config["val_fraction"]
    import datasets

    try:
        dataset = datasets.load_dataset(
            path,
            config["name"] or None,
            split=split,
            streaming=streaming,  # False: `datasets` keeps a copy
            **(FRESH if Path(path).is_dir() else {"revision": config["revision"]}),
            num_proc=num_proc if num_proc > 1 and not streaming else None,
        ).select_columns("text")
    except Exception as error:  # the hub's libraries raise many types
        error = error.__cause__ or error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot load {path} ({shown(reason)}): connect to the Hugging Face hub, choose a "
            "configuration and a split with --name=NAME and --split=NAME, or pass --path=FOLDER "
            "with a copy of it; data/text/prepare.py reads other columns than text"
        ) from None
    n_shards = dataset.num_shards if streaming else math.ceil(len(dataset) / DOCUMENTS_PER_SHARD)
    limit = np.uint64(int(val_fraction * 2**64))

    def pieces() -> Iterator[Piece]:
        for i in range(n_shards):
            row, part = 0, dataset.shard(num_shards=n_shards, index=i)
            # the hub's libraries raise many types
            with naming(f"cannot read part {i + 1} of {n_shards} of {path}", Exception):
                for batch in part.iter(1000):
                    hashes = scramble(np.arange(row, row + len(batch["text"])) + (i << 32), key=0)
                    for text, held_out in zip(batch["text"], hashes < limit, strict=True):
                        row += 1
                        text, problem = textfiles.checked(text, "text")
                        where = f"document {row} of part {i + 1} of {n_shards}"
                        yield Piece("val" if held_out else "train", text, where, problem)

    size = dataset.data.nbytes if not streaming else 0
    if streaming and dataset.info.splits and split in dataset.info.splits:
        size = dataset.info.splits[split].num_bytes or 0
    folder = Path(config["out"] or Path(namespace["__file__"]).parent)
    write_tokens(folder, tokenizer, pieces(), size, num_proc, True, config["max_tokens"])


def prepare_from_files(
    folder: Path,
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
    refuse_foreign_files(folder)
    for path in paths:
        textfiles.check_start(path)
    size = sum(path.stat().st_size for path in paths)

    def pieces(tokenizer: Tokenizer) -> Iterator[Piece]:
        for number, path in enumerate(paths):
            yield from textfiles.pieces_of(path, number, column, val_fraction, tokenizer)

    def texts(description: str) -> Iterator[str]:
        """All texts, for the tokenizers that are made from them."""
        found = batches(pieces(ByteTokenizer()))
        for batch in waiting(found, math.ceil(size / BATCH), description, unit="batch"):
            yield from (piece.text for piece in batch if piece.problem is None)

    bpe = re.fullmatch(r"bpe:(\d+)", tokenizer)
    if special_tokens or not (bpe or tokenizer == "char"):
        chosen = tokenizer_named(tokenizer, special_tokens)
    elif bpe:
        every = 1 + size // BPE_BYTES
        some = itertools.islice(texts("reading text for the tokenizer"), 0, None, every)
        chosen = train_bpe(some, int(bpe[1]))
    else:
        alphabet = set(itertools.chain.from_iterable(texts("reading characters")))
        # a single text file is one long document, as nanoGPT's data sets are
        several = len(paths) > 1 or textfiles.unpacked_suffix(paths[0]) in textfiles.ROWS
        chosen = CharTokenizer("".join(sorted(alphabet)), ends=several)
    write_tokens(folder, chosen, pieces(chosen), size, num_proc, skip_bad_rows)


def tokenizer_named(name: str, special_tokens: bool) -> Tokenizer:
    """Like `load_tokenizer`, but also takes run:FOLDER: the tokenizer of a training run."""
    kind, meta = name.partition(":")[0], None
    if kind == "run":
        from steady import checkpoint  # which needs torch

        path = Path(name.removeprefix("run:")).expanduser()
        meta = checkpoint.load(path if path.is_file() else checkpoint.find(path))["tokenizer"]
        kind = meta.get("tokenizer", "gpt2")
    if special_tokens and kind not in ("gpt2", "hf"):
        raise UserError(
            f"special_tokens=True needs a gpt2 or hf: tokenizer, not {kind} (of a data set made "
            "with bpe: --tokenizer=hf:FOLDER)"
        )
    if meta is None:
        return load_tokenizer(name, special_tokens)
    return from_meta(meta | ({"special_tokens": True} if special_tokens else {}))
