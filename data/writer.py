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


def write_dataset(
    folder: str | Path, tokenizer: Tokenizer, splits: dict[str, Iterable[str]]
) -> dict[str, int]:
    """Tokenize `splits` (`{"train": documents, "val": documents}`) into `folder`.

    Every document ends in the tokenizer's end-of-text token where it has one.
    Returns the token count of each split and prints them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    counts, frequencies = {}, {}
    for split, documents in splits.items():
        counts[split], frequencies[split] = 0, np.zeros(tokenizer.vocab_size, dtype=np.int64)
        with open(folder / f"{split}.bin.tmp", "wb") as file:
            for document in documents:
                ids = tokenizer.encode(document)
                if tokenizer.end_of_text is not None:
                    ids.append(tokenizer.end_of_text)
                np.asarray(ids, dtype=dtype).tofile(file)
                counts[split] += len(ids)
                frequencies[split] += np.bincount(ids, minlength=tokenizer.vocab_size)
        if counts[split] == 0:
            raise ValueError(f"the {split} split of {folder} would be empty: more text is needed")
    probabilities = frequencies["val"][frequencies["val"] > 0] / counts["val"]
    meta = tokenizer.meta() | {
        "vocab_size": tokenizer.vocab_size,
        "dtype": {2: "uint16", 4: "uint32"}[dtype.itemsize],
        "tokens": counts,
        # the validation loss of the best model that knows nothing but how often each token occurs
        "unigram_entropy": float(-(probabilities * np.log(probabilities)).sum()),
    }
    (folder / "meta.json.tmp").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    for name in [f"{split}.bin" for split in splits] + ["meta.json"]:
        os.replace(folder / f"{name}.tmp", folder / name)
    for split, count in counts.items():
        print(f"{folder / split}.bin: {count:,} tokens")
    return counts


def split_text(text: str, val_fraction: float = 0.1) -> dict[str, list[str]]:
    """The last `val_fraction` of a text as validation set, as nanoGPT's prepare scripts do."""
    cut = int(len(text) * (1 - val_fraction))
    return {"train": [text[:cut]], "val": [text[cut:]]}
