"""Documents to token files: a data set that train.py reads is train.bin, val.bin and meta.json.

Token files are headerless little-endian uint16, or uint32 when the vocabulary needs it. meta.json
names the tokenizer (with its alphabet), the vocabulary size, the dtype and the token counts. Files
appear under their final names only when they are complete.

Data sets from the Hugging Face hub, and files of one's own, are tokenized in shards. Every shard
becomes a pair of files under `.shards/`, which is locked; an interrupted run goes on with those
that are missing. Which documents are held out depends on their position only, not on processes or
restarts.
"""

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from configurator import configure
from steady import UserError, textfiles
from steady.folder import claim, whole_file
from steady.shuffle import scramble
from steady.tokenizer import CharTokenizer, Tokenizer, code_points, load_tokenizer

SPLITS = ("train", "val")
FILES = (*(f"{split}.bin" for split in SPLITS), "meta.json")  # of a data set
BUFFER_TOKENS = 2**20  # tokens held before they are written
DOCUMENTS_PER_SHARD = 50_000
SHARDS = ".shards"  # folder of the finished parts, removed at the end: no name a user would choose

# what the prepare.py of every data set from the hub accepts, besides what it defines itself

# preparation
revision = "main"  # commit, tag or branch: name a commit for a data set that never changes
tokenizer = "gpt2"  # gpt2, byte, or hf:PATH_OR_HUB_ID
num_proc = 1  # processes that tokenize
streaming = False  # read over the network without keeping a copy of the text
max_tokens = 0  # of the training set: the first so many; 0: all
out = ""  # folder to write to; default: the data set's own


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


class TokenWriter:
    """A token file that grows by documents, each with the tokenizer's end-of-text token where it
    has one."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self.encode = getattr(tokenizer, "encode_array", tokenizer.encode)
        self.dtype = token_dtype(tokenizer)
        self.end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        self.file = open(path, "wb")
        self.pieces: list[np.ndarray | list[int]] = []
        self.held = 0  # tokens in them, and one for each, since empty ones take memory too

    def add(self, text: str, ends: bool = True) -> None:
        """Add a document, or with `ends=False` the beginning of one."""
        ids = self.encode(text)
        self.pieces += [ids, self.end] if ends else [ids]
        self.held += len(ids) + 1
        if self.held >= BUFFER_TOKENS:
            self.flush()

    def flush(self) -> None:
        if self.pieces:
            # not ndarray.tofile, whose error does not say that a disk is full
            self.file.write(np.concatenate(self.pieces, dtype=self.dtype, casting="unsafe").data)
        self.pieces, self.held = [], 0

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.flush()
        self.file.close()


def write_tokens(path: Path, tokenizer: Tokenizer, documents: Iterable[str]) -> None:
    """Write the ids of `documents` to `path`."""
    with TokenWriter(path, tokenizer) as writer:
        for document in documents:
            writer.add(document)


def write_dataset(
    folder: str | Path, tokenizer: Tokenizer, splits: dict[str, Iterable[str]]
) -> dict[str, int]:
    """Tokenize `splits` (`{"train": documents, "val": documents}`) into `folder`.

    Returns the token count of each split and prints them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        write_tokens(folder / f"{split}.bin.tmp", tokenizer, splits[split])
    return complete(folder, tokenizer)


def complete(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """Give `train.bin.tmp` and `val.bin.tmp` their final names and write meta.json beside them."""
    dtype = token_dtype(tokenizer)
    counts = {}
    for split in SPLITS:
        counts[split] = (folder / f"{split}.bin.tmp").stat().st_size // dtype.itemsize
        if counts[split] <= (tokenizer.end_of_text is not None):  # one text, and nothing in it
            for name in SPLITS:
                (folder / f"{name}.bin.tmp").unlink()
            raise UserError(
                f"the {split} split of {folder} would be empty: use more text, or another "
                "--val_fraction"
            )
    seen = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with open(folder / "val.bin.tmp", "rb") as file:
        while len(ids := np.fromfile(file, dtype=dtype, count=BUFFER_TOKENS)):
            seen += np.bincount(ids, minlength=len(seen))
    probabilities = seen[seen > 0] / seen.sum()
    meta = tokenizer.meta() | {
        "vocab_size": tokenizer.vocab_size,
        "dtype": {2: "uint16", 4: "uint32"}[dtype.itemsize],
        "tokens": counts,
        # the validation loss of the best model that knows nothing but how often each token occurs
        "unigram_entropy": float(-(probabilities * np.log(probabilities)).sum()),
    }
    (folder / "meta.json.tmp").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    replaced = ", replacing an earlier data set" if (folder / "train.bin").exists() else ""
    for name in FILES:
        os.replace(folder / f"{name}.tmp", folder / name)
    for split, count in counts.items():
        print(f"{folder / split}.bin: {count:,} tokens{replaced}")
    return counts


def split_text(text: str, val_fraction: float = 0.1) -> dict[str, list[str]]:
    """The last `val_fraction` of a text as validation set, as nanoGPT's prepare scripts do."""
    cut = int(len(text) * (1 - val_fraction))
    return {"train": [text[:cut]], "val": [text[cut:]]}


def prepare_hub_dataset(namespace: dict[str, Any]) -> None:
    """All that a data set's prepare.py does with its `globals()` and the command line."""
    config = configure(namespace, base=__file__, positional="")
    folder = config.pop("out") or Path(namespace["__file__"]).parent
    prepare_from_hub(folder, load_tokenizer(config.pop("tokenizer")), **config)


def prepare_from_hub(
    folder: str | Path,
    tokenizer: Tokenizer,
    path: str,
    name: str = "",
    revision: str = revision,
    val_fraction: float = 0.0005,
    num_proc: int = num_proc,
    streaming: bool = streaming,
    max_tokens: int = max_tokens,
) -> None:
    """Write train.bin, val.bin and meta.json of a data set's train split to `folder`.

    Args:
        path: a repository on the hub, or a local folder of the same form; name: its configuration.
        revision: commit, tag or branch of the repository.
        val_fraction: share of the documents held out for validation.
        streaming: read over the network without keeping a copy; else cached by `datasets`.
        max_tokens: of the training set, from its beginning; 0: all. With streaming nothing more
            than that (and the rest of a shard) is read.

    Raises UserError, one line, when the data cannot be had or the disk is too small.
    """
    folder = Path(folder)
    dataset = load(path, name, revision, num_proc, streaming)
    if "text" not in (dataset.column_names or ["text"]):
        raise UserError(f"{path} has no column text, only {', '.join(dataset.column_names)}")
    n_shards = dataset.num_shards if streaming else math.ceil(len(dataset) / DOCUMENTS_PER_SHARD)
    source = {
        "path": path, "name": name, "revision": revision, "val_fraction": val_fraction,
        "shards": n_shards, "documents": None if streaming else len(dataset),
    }  # fmt: skip
    size = dataset.info.dataset_size or (0 if streaming else dataset.data.nbytes)
    jobs = [(dataset, n_shards, i, folder / SHARDS, tokenizer, val_fraction)
            for i in range(n_shards)]  # fmt: skip
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
) -> None:
    """Write train.bin, val.bin and meta.json of the texts in files (see steady/textfiles.py).

    tokenizer: as `load_tokenizer` takes it, or char, for which all is read twice.

    Raises UserError, one line, for a file that cannot be read and, unless `skip_bad_rows`, for the
    first row without text.
    """
    folder, groups = Path(folder), textfiles.plan(paths)
    if tokenizer == "char":
        seen = np.zeros(sys.maxunicode + 1, dtype=bool)
        for parts in progress(groups, len(groups), "reading characters"):
            for part in parts:
                skipped = [] if skip_bad_rows else None
                for _, text, _ in textfiles.documents(part, column, val_fraction, skipped):
                    seen[code_points(text)] = True
        chosen: Tokenizer = CharTokenizer("".join(map(chr, np.flatnonzero(seen))))
    else:
        chosen = load_tokenizer(tokenizer)
    source = {
        "files": [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths],
        "column": column, "val_fraction": val_fraction, "shards": len(groups),
        "skip_bad_rows": skip_bad_rows,
    }  # fmt: skip
    jobs = [(parts, i, folder / SHARDS, chosen, column, val_fraction, skip_bad_rows)
            for i, parts in enumerate(groups)]  # fmt: skip
    size = sum(part.size for parts in groups for part in parts)
    size = size * 2 if tokenizer in ("char", "byte") else size // 2
    write_in_shards(folder, chosen, source, write_text_shard, jobs, size, num_proc)


def write_in_shards(
    folder: Path,
    tokenizer: Tokenizer,
    source: dict[str, Any],
    write: Callable[[tuple], None],
    jobs: list[tuple],
    size: int,
    num_proc: int,
    max_tokens: int = 0,
) -> None:
    """Run `write` on every job (shard) whose files are missing, then join the shards.

    Args:
        source: what the shards depend on, to know those of an interrupted run again.
        size: bytes that the tokens will take, about.
        max_tokens: end with the shard that completes so many in the training set; 0: all shards.
    """
    shards, width = folder / SHARDS, token_dtype(tokenizer).itemsize
    claim(shards)
    paths = [shard_path(shards, i, "train") for i in range(len(jobs))]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    note, source = shards / "source.json", source | {"tokenizer": tokenizer.meta()}
    before = None
    with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: a full disk cut it short
        before = json.loads(note.read_text(encoding="utf-8"))
    if before != source:
        was = before if isinstance(before, dict) else {}
        other = sorted(k for k in source.keys() | was.keys() if was.get(k) != source.get(k))
        if other == ["skip_bad_rows"] and source.get("skip_bad_rows"):
            other = []  # the shards that are there had no bad row
        if other and before is not None and any(shards.glob("*.train.bin")):
            raise UserError(
                f"{shards} holds parts made with other {', '.join(other)} (what an interrupted run "
                "has left): delete it to begin anew"
            )
        with whole_file(note) as file:
            file.write(json.dumps(source).encode())
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
    used = len(jobs)
    if max_tokens:
        used, tokens = 0, 0
        bar = progress(None, max_tokens, "tokens")
        while used < len(jobs) and tokens < max_tokens:
            wave = range(used, min(used + num_proc, len(jobs)))
            run_jobs(write, [jobs[i] for i in wave if not paths[i].exists()], num_proc)
            while used < wave.stop and tokens < max_tokens:
                count = paths[used].stat().st_size // width
                tokens, used = tokens + count, used + 1
                if bar is not None:
                    bar.update(count)
        if bar is not None:
            bar.close()
    else:
        run_jobs(write, [jobs[i] for i in missing], num_proc, "tokenizing")
    for split in SPLITS:
        left = max_tokens * width if max_tokens and split == "train" else None
        with open(folder / f"{split}.bin.tmp", "wb") as whole:
            for i in range(used):
                with open(shard_path(shards, i, split), "rb") as part:
                    shutil.copyfileobj(part, whole, 2**24)
            if left is not None and whole.tell() > left:
                whole.truncate(left)
    try:
        complete(folder, tokenizer)
    except UserError:
        shutil.rmtree(shards)  # parts of nothing: they would stand in the way of more text
        raise
    skipped = [path.read_text(encoding="utf-8") for path in sorted(shards.glob("*.skipped"))]
    if skipped:
        rows = "".join(skipped).splitlines()
        print("\n".join(rows[:10] + (["..."] if len(rows) > 10 else [])))
        print(f"warning: {len(rows):,} rows without text were left out")
    shutil.rmtree(shards)


def run_jobs(write: Callable, jobs: list[tuple], num_proc: int, description: str = "") -> None:
    """`write` every job, in processes; an error of one is raised here, in one line."""
    if num_proc == 1 or len(jobs) <= 1:
        for _ in progress(map(write, jobs), len(jobs), description):
            pass
        return
    with ProcessPoolExecutor(num_proc) as pool:
        try:
            for _ in progress(pool.map(write, jobs), len(jobs), description):
                pass
        except UserError as error:  # raised again here, it is printed without a trace
            pool.shutdown(cancel_futures=True)
            raise UserError(str(error)) from None
        except BrokenExecutor:
            raise UserError(
                "a process that tokenizes was killed, for want of memory perhaps: the same command "
                "goes on from what is done; use a smaller --num_proc"
            ) from None


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


def load(path: str, name: str, revision: str, num_proc: int, streaming: bool) -> Any:
    """The train split of a data set; a missing network is one line."""
    import datasets

    local = Path(path).is_dir()
    try:
        return datasets.load_dataset(
            path,
            name or None,
            split="train",
            revision=None if local else revision,
            streaming=streaming,
            num_proc=num_proc if num_proc > 1 and not streaming else None,
        )
    except Exception as error:  # the hub's libraries raise many kinds; the reason is what counts
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"cannot load {path} ({reason[0]}): connect to the Hugging Face hub, or pass "
            "--path=FOLDER with a copy of the repository"
        ) from None


def shard_path(shards: Path, i: int, split: str) -> Path:
    return shards / f"{i:05d}.{split}.bin"


def note_skipped(train: Path, rows: list[str]) -> None:
    """Write what was left out of a shard beside it, to be shown at the end."""
    if rows:
        lines = "".join(f"{row}\n" for row in rows)
        train.with_suffix(".skipped").write_text(lines, encoding="utf-8")


def write_shard(job: tuple) -> None:
    """Tokenize one shard into a file per split; the train file comes last."""
    dataset, n_shards, i, shards, tokenizer, val_fraction = job
    part = dataset.shard(num_shards=n_shards, index=i).select_columns("text")
    in_val: list[str] = []  # few enough to be held
    skipped: list[str] = []

    def train_documents() -> Iterator[str]:
        position = i << 32
        for batch in part.iter(1000):
            hashes = scramble(np.arange(position, position + len(batch["text"])), key=0)
            documents = zip(batch["text"], hashes < limit, strict=True)
            for row, (text, held_out) in enumerate(documents, position - (i << 32) + 1):
                _, problem = textfiles.check_text(text, "text")
                if problem is not None:
                    skipped.append(f"document {row} of part {i + 1} of {n_shards}: {problem}")
                elif held_out:
                    in_val.append(text)
                else:
                    yield text
            position += len(batch["text"])

    limit = np.uint64(int(val_fraction * 2**64))
    train, val = (shard_path(shards, i, split) for split in SPLITS)
    write_tokens(train.with_suffix(".tmp"), tokenizer, train_documents())
    write_tokens(val.with_suffix(".tmp"), tokenizer, in_val)
    note_skipped(train, skipped)
    os.replace(val.with_suffix(".tmp"), val)
    os.replace(train.with_suffix(".tmp"), train)


def write_text_shard(job: tuple) -> None:
    """Tokenize some parts of files into a file per split; the train file comes last."""
    parts, i, shards, tokenizer, column, val_fraction, skip_bad_rows = job
    skipped: list[str] = []
    train, val = (shard_path(shards, i, split) for split in SPLITS)
    with (
        TokenWriter(train.with_suffix(".tmp"), tokenizer) as in_train,
        TokenWriter(val.with_suffix(".tmp"), tokenizer) as in_val,
    ):
        writers = {"train": in_train, "val": in_val}
        for part in parts:
            where = skipped if skip_bad_rows else None
            for split, text, ends in textfiles.documents(part, column, val_fraction, where):
                writers[split].add(text, ends)
    note_skipped(train, skipped)
    os.replace(val.with_suffix(".tmp"), val)
    os.replace(train.with_suffix(".tmp"), train)
