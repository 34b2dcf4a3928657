"""Token files in, batches out. The sequences of step N depend only on (seed, N).

Training data is read in epochs. Each epoch cuts the tokens into windows of `block_size`, starting
at a random phase, and visits every window once, in random order. Step N takes the next
`batch_size * gradient_accumulation_steps` windows of this endless sequence, and each process's
micro-batch is a slice of them. So the data does not depend on the micro-batch size, the number of
processes or how often a run was resumed.
"""

import math
import shlex
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configurator import configs_for, dataset_name
from steady import UserError, distributed
from steady.distributed import SINGLE_PROCESS, Process
from steady.folder import crc_of_start, require_file
from steady.shuffle import permute, scramble
from steady.tokenizer import TOKENIZER_VALUES, check_meta, read_json

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, (batch_size, block_size) int64

GPT2_VOCAB_SIZE = 50304  # for nanoGPT's bare .bin files: 50257, padded
LLM_C = "a shard of llm.c: remove its header of 1,024 bytes (tail -c +1025)"
FOREIGN = {  # the first bytes of other formats
    (20240520).to_bytes(4, "little"): LLM_C,  # with GPT-2's ids
    (20240801).to_bytes(4, "little"): LLM_C,  # with Llama 3's
    b"\x93NUM": "a .npy file: write its array with .astype('uint16').tofile(PATH) instead",
}
SCAN_TOKENS = 2**28  # ids checked when a file is opened; the rest are checked as they are read


def dataset_folder(dataset: str) -> Path:
    """The folder with train.bin: data/`dataset`, else the path `dataset`. If the name starts with a
    dot, the path comes first."""
    named, path = Path(__file__).parents[1] / "data" / dataset, Path(dataset)
    for place in (path, named) if dataset.startswith(".") else (named, path):
        if (place / "train.bin").exists():
            return place
    return path if "/" in dataset else named


def read_meta(folder: Path) -> dict[str, Any]:
    """The data set's meta.json, or an empty dict for nanoGPT's bare .bin files.

    Raises UserError with the command to run if the data set is missing, or with the file and the
    key if meta.json is invalid.
    """
    if not (folder / "train.bin").exists():
        remedy = f"run python data/text/prepare.py --input=FILE --out={shlex.quote(str(folder))}"
        if (prepare := folder / "prepare.py").exists():
            remedy = f"run python {shlex.quote(str(prepare))} (the config's header may add flags)"
        elif configs := configs_for(dataset_name(folder)):
            remedy = f"the first lines of config/{configs[0].name} show how to make it"
        raise UserError(f"no data set at {folder} (train.bin is missing): {remedy}")
    path = folder / "meta.json"
    meta = read_json(path)
    if "itos" in meta or not meta and (folder / "meta.pkl").exists():
        raise UserError(
            f"{folder} has nanoGPT's meta.pkl, not steadyGPT's meta.json: prepare the data set "
            "again with steadyGPT's prepare.py of the same name, or with data/text/prepare.py"
        )
    check_meta(meta, str(path), whole=True)
    return meta


class DataSet:
    """A folder with train.bin and val.bin, and the contents of its meta.json.

    Args:
        dataset: the name of a folder in data/, or a path.
        vocab_size: the model's vocabulary size. 0 takes the data set's, rounded up to a multiple of
            64 for faster matmuls.

    Raises UserError with the command to run if the data set is missing.
    """

    def __init__(self, dataset: str, vocab_size: int = 0):
        folder = dataset_folder(dataset)
        self.folder, self.meta = folder, read_meta(folder)
        self.vocab_size = self.meta.get("vocab_size", vocab_size or GPT2_VOCAB_SIZE)
        self.padded_vocab_size = vocab_size or math.ceil(self.vocab_size / 64) * 64
        self.dtype = self.meta.get("dtype", "uint16")
        self.tokenizer = {key: self.meta[key] for key in TOKENIZER_VALUES if key in self.meta}
        self.ids = {}  # identify the files: size, and checksum of the beginning
        for split in ("train", "val"):
            path = folder / f"{split}.bin"
            require_file(path)
            if not path.exists():
                raise UserError(f"there is no {path}: copy or prepare the data set again")
            beginning, size = crc_of_start(path), path.stat().st_size
            self.ids[path.name] = f"{beginning:08x}, {size} bytes"
            found = {"begins": beginning, "tokens": size // np.dtype(self.dtype).itemsize}
            if any(self.meta.get(key, {}).get(split, found[key]) != found[key] for key in found):
                raise UserError(
                    f"{path} does not belong to its meta.json, or is an incomplete copy: copy or "
                    "prepare the data set again"
                )

    def require_same(self, process: Process) -> None:
        """Raises UserError if other processes (on other machines) have another data set here."""
        own = self.ids, self.tokenizer, self.dtype
        distributed.require_same(process, own, str(self.folder))

    def open(self, block_size: int, vocab_size: int) -> tuple["TokenFile", "TokenFile"]:
        """The training and validation tokens, for a model with this context and vocabulary."""
        described = self.meta.get("vocab_size", math.inf) <= vocab_size
        vocab_size = min(self.vocab_size, vocab_size)
        val, train = (  # the shorter first: its error names a block_size for both
            TokenFile(self.folder / name, block_size, vocab_size, self.dtype, described)
            for name in ("val.bin", "train.bin")
        )
        return train, val

    def bits_per_byte(self, val_loss: float) -> dict[str, float]:
        """`val_bpb`: a validation loss (nats per token) as bits per byte of UTF-8 text, which does
        not depend on the tokenizer. Begin- and end-of-text tokens count as tokens but have no
        bytes. Empty if meta.json has no byte counts."""
        n_tokens, n_bytes = (self.meta.get(key, {}).get("val", 0) for key in ("tokens", "bytes"))
        return {"val_bpb": val_loss / math.log(2) * n_tokens / n_bytes} if n_bytes else {}

    def summary(self, tokens_per_iter: int) -> str:
        """The description of the data at the start of a run's log."""
        n_tokens = (self.folder / "train.bin").stat().st_size // np.dtype(self.dtype).itemsize
        line = f"data {self.folder}, {n_tokens:,} tokens, {tokens_per_iter:,} per iteration"
        if not self.meta:
            line += " (no meta.json: assuming GPT-2 tokens)"
        if "unigram_entropy" in self.meta:
            entropy = self.meta["unigram_entropy"]
            line += f"\nknowing only token frequencies gives val loss {entropy:.4f} at best"
        return line


class TokenFile:
    """A file of token ids, checked on opening.

    It is read, not memory-mapped. The pages of a map count as resident memory, and if the file is
    truncated or its disk fails, a map kills the process with a signal instead of an error.

    Raises UserError if the file is missing, empty, not a whole number of tokens, too short for one
    window of `block_size` tokens and its targets, or holds an id outside the vocabulary.
    """

    def __init__(
        self,
        path: Path,
        block_size: int,
        vocab_size: int,
        dtype: str = "uint16",
        described: bool = False,
    ):
        self.path, self.block_size, self.vocab_size = path, block_size, vocab_size
        self.described = described  # whether vocab_size comes from meta.json
        self.dtype = np.dtype(dtype).newbyteorder("<")
        size, width = path.stat().st_size, self.dtype.itemsize
        if size == 0 or size % width:
            raise UserError(
                f"{path} has {size} bytes, not a positive multiple of {width} ({dtype} tokens): "
                "prepare the data set again"
            )
        self.n_tokens = size // width
        if self.n_tokens <= block_size:
            smaller = f" or --block_size={self.n_tokens - 1}" if self.n_tokens > 1 else ""
            raise UserError(
                f"{path} has {self.n_tokens} tokens, but block_size={block_size} needs at "
                f"least {block_size + 1}: use more data{smaller}"
            )
        self.file = open(path, "rb", buffering=0)
        self.reading = threading.Lock()  # evaluation and the loader's thread share a position
        if not described:
            self.check_format()
        scanned = min(self.n_tokens, SCAN_TOKENS)
        for start in range(0, scanned, 2**24):
            self.check(self.read(np.array([start]), min(2**24, scanned - start)))

    def check_format(self) -> None:
        """Raises UserError for formats of other trainers, which would train as noise."""
        ids = self.read(np.zeros(1, int), min(self.n_tokens, 2**20))[0]
        if foreign := FOREIGN.get(ids[: 4 // ids.itemsize].tobytes()):
            raise UserError(f"{self.path} is {foreign}")
        if ids.itemsize == 2 and ids[1::2].max() <= 1 < ids[::2].max():
            raise UserError(
                f"{self.path} seems to hold 32- or 64-bit ids, as every second 16-bit value is 0 "
                "or 1: read them with their own dtype and write them as uint16, or as uint32 if "
                'one is above 65,535, with "dtype", "tokenizer" and "vocab_size" in a meta.json '
                "(if the ids really have 16 bits, that meta.json alone is enough)"
            )

    def check(self, ids: np.ndarray) -> None:
        """Raises UserError if an id is outside the vocabulary, before a GPU fails an assert."""
        if ids.max() >= self.vocab_size:
            where = f"vocabulary in its meta.json has {self.vocab_size}: prepare the data again"
            if not self.described:
                files = [self.path.with_name(f"{split}.bin") for split in ("train", "val")]
                largest = max(np.memmap(p, self.dtype, "r").max() for p in files if p.exists())
                least = math.ceil((int(largest) + 1) / 64) * 64
                where = (
                    f"model's vocabulary has {self.vocab_size} (resize_token_embeddings of "
                    f"transformers enlarges a pretrained one): retrain with --vocab_size={least}"
                )
            raise UserError(f"{self.path} holds token id {ids.max()}, but the {where}")

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of the offsets `starts`, (len(starts), length).

        Raises UserError if the file has been truncated.
        """
        rows = np.empty((len(starts), length), self.dtype)
        with self.reading:
            for row, start in zip(rows, starts.tolist(), strict=True):
                self.file.seek(start * self.dtype.itemsize)
                if self.file.readinto(row) < row.nbytes:
                    raise UserError(
                        f"{self.path} had {self.n_tokens} tokens when this run started and is "
                        "shorter now: restore it, then continue with --init_from=resume"
                    )
        return rows

    def windows(self, starts: np.ndarray) -> np.ndarray:
        """The windows at token offsets `starts`, (len(starts), block_size + 1) int64."""
        ids = self.read(starts, self.block_size + 1).astype(np.int64)
        self.check(ids)
        return ids


class DataLoader:
    """The micro-batches of one process. A thread reads one ahead, and pins it for a GPU.

    Args:
        file: the training tokens.
        batch_size: sequences per micro-batch.
        accumulation: micro-batches per step, over all processes.
        offset: added to the position in the data, so that a resume with another global batch goes
            on where the run stopped.
    """

    def __init__(
        self,
        file: TokenFile,
        batch_size: int,
        accumulation: int,
        seed: int,
        process: Process = SINGLE_PROCESS,
        offset: int = 0,
    ):
        assert accumulation >= process.world_size, "an iteration without a micro-batch"
        self.file, self.batch_size, self.seed = file, batch_size, seed
        self.accumulation, self.process, self.offset = accumulation, process, offset
        self.reader = ThreadPoolExecutor(max_workers=1)
        n_tokens = file.n_tokens
        # one fewer than would fit, so that an epoch can start at any phase
        self.windows_per_epoch = max(1, n_tokens // file.block_size - 1)
        self.phases = n_tokens - self.windows_per_epoch * file.block_size

    def position(self, step: int) -> int:
        """Windows drawn from the endless sequence before `step`."""
        return self.offset + step * self.batch_size * self.accumulation

    def starts(self, step: int, micro_step: int) -> np.ndarray:
        """Token offsets of this process's windows in micro-step `micro_step` of `step`."""
        first = (micro_step * self.process.world_size + self.process.rank) * self.batch_size
        indices = self.position(step) + first + np.arange(self.batch_size)
        starts = np.empty_like(indices)
        epochs, nths = np.divmod(indices, self.windows_per_epoch)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            key = int(scramble(epoch, key=self.seed)[0])
            phase = key % self.phases
            windows = permute(nths[inside], self.windows_per_epoch, key)
            starts[inside] = phase + windows * self.file.block_size
        return starts

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """The endless micro-batches of this process, from `step` on."""
        micro_steps, device = self.accumulation // self.process.world_size, self.process.device

        def read(n: int) -> Batch:
            return to_batch(self.file.windows(self.starts(*divmod(n, micro_steps))), device)

        n = step * micro_steps
        pending = self.reader.submit(read, n)
        while True:
            n += 1
            pending, ready = self.reader.submit(read, n), pending
            yield tuple(x.to(device, non_blocking=True) for x in ready.result())


class Replayable:
    """The next `n` items of an endless iterator, for one loop over them or several."""

    def __init__(self, items: Iterator, n: int):
        self.items, self.n, self.seen = items, n, []

    def __iter__(self) -> Iterator:
        for i in range(self.n):
            if i == len(self.seen):
                self.seen.append(next(self.items))
            yield self.seen[i]


def eval_batches(
    file: TokenFile, batch_size: int, n_sequences: int, process: Process = SINGLE_PROCESS
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """The same `n_sequences` windows every time, spread evenly over the file. Yields tokens,
    targets, and the batch's share of all windows, which is its weight in the mean loss.

    Each of N processes takes every N-th batch. All get the same number of batches, because they may
    exchange weights in each. Compiled code needs full batches, so missing windows are filled with
    ones whose targets do not count (all -1).
    """
    starts = even_starts(file, n_sequences)
    for first in range(0, n_sequences, process.world_size * batch_size):
        mine = starts[first + process.rank * batch_size :][:batch_size]
        windows = file.windows(np.resize(mine if len(mine) else starts, batch_size))
        tokens, targets = to_batch(windows, process.device)
        if len(mine):  # without windows the weight is 0, so targets do not matter
            targets[len(mine) :] = -1
        batch = (x.to(process.device, non_blocking=True) for x in (tokens, targets))
        yield *batch, len(mine) / n_sequences


def even_starts(file: TokenFile, n_sequences: int) -> np.ndarray:
    """Token offsets of windows that are spread evenly over the file."""
    return np.linspace(0, file.n_tokens - file.block_size - 1, n_sequences).astype(np.int64)


def to_batch(windows: np.ndarray, device: torch.device) -> Batch:
    """Tokens, and targets one position later; in pinned memory if the device is a GPU."""
    # copies: otherwise the two slices of a single window would share memory
    tokens, targets = map(torch.from_numpy, (windows[:, :-1].copy(), windows[:, 1:].copy()))
    if device.type == "cuda":
        tokens, targets = tokens.pin_memory(), targets.pin_memory()
    return tokens, targets
