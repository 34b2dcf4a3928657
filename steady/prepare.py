"""Documents to token files: a data set that train.py reads is train.bin, val.bin and meta.json.

Token files are headerless little-endian uint16, or uint32 when the vocabulary needs it. meta.json
names the tokenizer (with its alphabet), the vocabulary size, the dtype and the token counts. Files
appear under their final names only when they are complete.

Data sets from the Hugging Face hub are tokenized in shards. Every shard becomes a pair of files
under `shards/`; an interrupted run goes on with those that are missing. Which documents are held
out depends on their position only, not on processes or restarts.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from steady.dataloader import scramble
from steady.tokenizer import Tokenizer, named

import numpy as np

from configurator import configure

SPLITS = ("train", "val")
BUFFER_TOKENS = 2**20  # tokens held before they are written
DOCUMENTS_PER_SHARD = 50_000

# what the prepare.py of every data set from the hub accepts, besides what it defines itself

# preparation
revision = "main"  # commit, tag or branch: name a commit for a data set that never changes
tokenizer = "gpt2"  # gpt2, byte, or hf:PATH_OR_HUB_ID
num_proc = 1  # processes that tokenize
streaming = False  # read over the network without keeping a copy of the text
out = ""  # folder to write to; default: the data set's own


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def write_tokens(path: Path, tokenizer: Tokenizer, documents: Iterable[str]) -> None:
    """Write the ids of `documents` to `path`, each with the tokenizer's end-of-text token where it
    has one."""
    buffer: list[int] = []
    with open(path, "wb") as file:
        for document in documents:
            buffer += tokenizer.encode(document)
            if tokenizer.end_of_text is not None:
                buffer.append(tokenizer.end_of_text)
            if len(buffer) >= BUFFER_TOKENS:
                np.array(buffer, dtype=token_dtype(tokenizer)).tofile(file)
                buffer = []
        np.array(buffer, dtype=token_dtype(tokenizer)).tofile(file)


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
        if counts[split] == 0:
            raise ValueError(f"the {split} split of {folder} would be empty: more text is needed")
    ids = np.fromfile(folder / "val.bin.tmp", dtype=dtype, count=2**27)
    probabilities = np.bincount(ids) / len(ids)
    probabilities = probabilities[probabilities > 0]
    meta = tokenizer.meta() | {
        "vocab_size": tokenizer.vocab_size,
        "dtype": {2: "uint16", 4: "uint32"}[dtype.itemsize],
        "tokens": counts,
        # the validation loss of the best model that knows nothing but how often each token occurs
        "unigram_entropy": float(-(probabilities * np.log(probabilities)).sum()),
    }
    (folder / "meta.json.tmp").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    for name in [f"{split}.bin" for split in SPLITS] + ["meta.json"]:
        os.replace(folder / f"{name}.tmp", folder / name)
    for split, count in counts.items():
        print(f"{folder / split}.bin: {count:,} tokens")
    return counts


def split_text(text: str, val_fraction: float = 0.1) -> dict[str, list[str]]:
    """The last `val_fraction` of a text as validation set, as nanoGPT's prepare scripts do."""
    cut = int(len(text) * (1 - val_fraction))
    return {"train": [text[:cut]], "val": [text[cut:]]}


def prepare_hub_dataset(namespace: dict[str, Any]) -> None:
    """All that a data set's prepare.py does with its `globals()` and the command line."""
    config = configure(namespace, base=__file__)
    folder = config.pop("out") or Path(namespace["__file__"]).parent
    prepare_from_hub(folder, named(config.pop("tokenizer")), **config)


def prepare_from_hub(
    folder: str | Path,
    tokenizer: Tokenizer,
    path: str,
    name: str = "",
    revision: str = revision,
    val_fraction: float = 0.0005,
    num_proc: int = num_proc,
    streaming: bool = streaming,
) -> None:
    """Write train.bin, val.bin and meta.json of a data set's train split to `folder`.

    Args:
        path: a repository on the hub, or a local folder of the same form; name: its configuration.
        revision: commit, tag or branch of the repository.
        val_fraction: share of the documents held out for validation.
        streaming: read over the network without keeping a copy; else cached by `datasets`.

    Raises ValueError, one line, when the data cannot be had or the disk is too small.
    """
    folder = Path(folder)
    shards = folder / "shards"
    dataset = load(path, name, revision, num_proc, streaming)
    if "text" not in (dataset.column_names or ["text"]):
        raise ValueError(f"{path} has no column text, only {', '.join(dataset.column_names)}")
    n_shards = dataset.num_shards if streaming else math.ceil(len(dataset) / DOCUMENTS_PER_SHARD)
    source = {
        "path": path, "name": name, "revision": revision, "val_fraction": val_fraction,
        "shards": n_shards, "documents": None if streaming else len(dataset),
        "tokenizer": tokenizer.meta(),
    }  # fmt: skip
    shards.mkdir(parents=True, exist_ok=True)
    note = shards / "source.json"
    if note.exists() and json.loads(note.read_text(encoding="utf-8")) != source:
        raise ValueError(f"{shards} holds parts of another data set or tokenizer: delete it")
    note.write_text(json.dumps(source), encoding="utf-8")
    missing = [i for i in range(n_shards) if not shard_path(shards, i, "train").exists()]
    if len(missing) < n_shards:
        print(f"{n_shards - len(missing)} of {n_shards} shards are there already")
    size = dataset.info.dataset_size or (0 if streaming else dataset.data.nbytes)
    # a token takes two bytes and stands for about four of text; shards and the result are both kept
    needed, free = size * len(missing) / n_shards / 2 + size / 2, shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder} needs about {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} are free"
        )
    jobs = [(dataset, n_shards, i, shards, tokenizer, val_fraction) for i in missing]
    if num_proc == 1:
        show_progress(map(write_shard, jobs), len(jobs))
    else:
        with ProcessPoolExecutor(num_proc) as pool:
            show_progress(pool.map(write_shard, jobs), len(jobs))
    for split in SPLITS:
        with open(folder / f"{split}.bin.tmp", "wb") as whole:
            for i in range(n_shards):
                with open(shard_path(shards, i, split), "rb") as part:
                    shutil.copyfileobj(part, whole, 2**24)
    complete(folder, tokenizer)
    shutil.rmtree(shards)


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
        raise ValueError(
            f"cannot load {path} ({reason[0]}): connect to the Hugging Face hub, or pass "
            "--path=FOLDER with a copy of the repository"
        ) from None


def show_progress(work: Any, total: int) -> None:
    """Run through `work` with a progress bar where tqdm is there."""
    try:
        from tqdm import tqdm

        work = tqdm(work, total=total, unit="shard", desc="tokenizing")
    except ImportError:
        pass
    for _ in work:
        pass


def shard_path(shards: Path, i: int, split: str) -> Path:
    return shards / f"{i:05d}.{split}.bin"


def write_shard(job: tuple) -> None:
    """Tokenize one shard into a file per split; the train file comes last."""
    dataset, n_shards, i, shards, tokenizer, val_fraction = job
    part = dataset.shard(num_shards=n_shards, index=i).select_columns("text")
    in_val: list[str] = []  # few enough to be held

    def train_documents() -> Iterator[str]:
        position = i << 32
        for batch in part.iter(1000):
            hashes = scramble(np.arange(position, position + len(batch["text"])), key=0)
            for text, held_out in zip(batch["text"], hashes < limit, strict=True):
                if held_out:
                    in_val.append(text)
                else:
                    yield text
            position += len(batch["text"])

    limit = np.uint64(int(val_fraction * 2**64))
    train, val = (shard_path(shards, i, split) for split in SPLITS)
    write_tokens(train.with_suffix(".tmp"), tokenizer, train_documents())
    write_tokens(val.with_suffix(".tmp"), tokenizer, in_val)
    os.replace(val.with_suffix(".tmp"), val)
    os.replace(train.with_suffix(".tmp"), train)
