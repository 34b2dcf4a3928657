"""Writes a data set that train.py reads: train.bin, val.bin and meta.json in one folder.

Token files are headerless little-endian uint16, or uint32 when the vocabulary needs it.
meta.json names the tokenizer (with its alphabet), the vocabulary size, the dtype and the token
counts. Files appear under their final names only when they are complete.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tokenizer import Tokenizer

SPLITS = ("train", "val")
BUFFER_TOKENS = 2**20  # tokens held before they are written


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
