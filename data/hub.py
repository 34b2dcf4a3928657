"""Data sets from the Hugging Face hub, through `datasets`: documents to token files, in shards.

Every shard becomes a pair of files under `shards/`; an interrupted run goes on with those that are
missing. Which documents are held out depends on their position only, not on processes or restarts.
"""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from configurator import configure
from dataloader import scramble
from tokenizer import Tokenizer, named
from writer import SPLITS, complete, write_tokens

DOCUMENTS_PER_SHARD = 50_000

# what the prepare.py of every data set from the hub accepts, besides what it defines itself

# preparation
revision = "main"  # commit, tag or branch: name a commit for a data set that never changes
tokenizer = "gpt2"  # gpt2, byte, or hf:PATH_OR_HUB_ID
num_proc = 1  # processes that tokenize
streaming = False  # read over the network without keeping a copy of the text
out = ""  # folder to write to; default: the data set's own


def prepare(namespace: dict[str, Any]) -> None:
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
    n_shards = dataset.num_shards if streaming else -(-len(dataset) // DOCUMENTS_PER_SHARD)
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
