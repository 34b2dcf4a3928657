"""Token files in, batches out: which sequences make up step N is a pure function of (seed, N).

Training data is read in epochs. Each epoch cuts the tokens into windows of `block_size`, starting
at a random phase, and visits every window once, in random order. Step N takes the next
`batch_size * gradient_accumulation_steps` windows of that endless list; a micro-batch of a process
is a slice of them. So the data does not depend on the micro-batch size, the number of processes or
how often a run was resumed.
"""

import contextlib
import json
import math
import shlex
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steady import UserError
from steady.distributed import ALONE, Process
from steady.folder import beginning_crc, file_crc, require_file
from steady.shuffle import permute, scramble
from steady.tokenizer import META_KEYS, check_meta

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, (batch_size, block_size) int64

GPT2_VOCAB_SIZE = 50304  # of nanoGPT's bare .bin files: 50257, padded
SCAN_TOKENS = 2**28  # ids checked when a file is opened; what lies beyond is checked as it is read


def dataset_folder(dataset: str) -> Path:
    """A folder with train.bin: of that name in data/, else at that path. A path that begins with a
    dot is looked at first."""
    places = [Path(__file__).parents[1] / "data" / dataset, Path(dataset)]
    if dataset.startswith("."):
        places.reverse()
    return next((place for place in places if (place / "train.bin").exists()), places[0])


def read_meta(folder: Path) -> dict[str, Any]:
    """The data set's meta.json, or an empty dict for nanoGPT's bare .bin files.

    Raises UserError, with the command to run, when the data set is not there, and one that names
    file and key when meta.json does not hold what it should.
    """
    if not (folder / "train.bin").exists():
        prepare = folder / "prepare.py"
        raise UserError(
            f"no data set at {folder} (train.bin is missing): "
            + (f"run python {shlex.quote(str(prepare))}" if prepare.exists() else
               "see data/ for the ones there are, or make one of your own text with "
               "python data/text/prepare.py --input=FILE")
        )  # fmt: skip
    path = folder / "meta.json"
    require_file(path)
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / "meta.pkl").exists():
            raise UserError(
                f"{folder} has nanoGPT's meta.pkl and no meta.json: prepare the data set again, "
                "with the prepare.py of the same name here, or data/text/prepare.py"
            ) from None
        return {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    check_meta(meta, str(path), whole=True)
    return meta


class DataSet:
    """A folder with train.bin and val.bin, and what its meta.json says of them.

    Args:
        dataset: a folder's name in data/, or a path.
        vocab_size: the model's vocabulary, 0 for the data set's own, rounded up to a multiple of 64
            (matrix kernels are faster so).

    Raises UserError, with the command to run, when it is not there.
    """

    def __init__(self, dataset: str, vocab_size: int = 0):
        folder = dataset_folder(dataset)
        self.folder, self.meta = folder, read_meta(folder)
        self.vocab_size = self.meta.get("vocab_size", vocab_size or GPT2_VOCAB_SIZE)
        self.padded_vocab_size = vocab_size or math.ceil(self.vocab_size / 64) * 64
        self.dtype = self.meta.get("dtype", "uint16")
        self.tokenizer = {key: self.meta[key] for key in META_KEYS if key in self.meta}
        self.ids = {}  # tell these files from others: the size, the beginning's checksum
        for name in ("train.bin", "val.bin"):
            require_file(folder / name)
            with contextlib.suppress(FileNotFoundError):
                beginning, size = beginning_crc(folder / name), (folder / name).stat().st_size
                self.ids[name] = f"{beginning:08x}, {size} bytes"
                if self.meta.get("begins", {}).get(name[:-4], beginning) != beginning:
                    raise UserError(
                        f"{folder / name} is not of the data set that meta.json describes (F80): "
                        "prepare the data set again"
                    )

    def open(self, block_size: int, vocab_size: int) -> tuple["TokenFile", "TokenFile"]:
        """The training and the validation tokens, for a model of that context and vocabulary."""
        described = self.meta.get("vocab_size", math.inf) <= vocab_size
        vocab_size = min(self.vocab_size, vocab_size)
        files = []
        for split in ("train", "val"):
            path = self.folder / f"{split}.bin"
            file = TokenFile(path, block_size, vocab_size, self.dtype, described)
            expected = self.meta.get("tokens", {}).get(split, file.n_tokens)
            if file.n_tokens != expected:  # a copy that broke off
                raise UserError(
                    f"{path} has {file.n_tokens} tokens, but its meta.json says {expected}: copy "
                    "or prepare the data set again (or correct meta.json)"
                )
            files.append(file)
        return tuple(files)

    def bits_per_byte(self, val_loss: float) -> dict[str, float]:
        """`val_bpb`: a validation loss (nats per token) as bits per byte of text (UTF-8), which
        does not depend on the tokenizer. Tokens that begin and end texts count as tokens, but have
        no bytes. Empty for data sets whose meta.json has no bytes."""
        n_tokens, n_bytes = (self.meta.get(key, {}).get("val", 0) for key in ("tokens", "bytes"))
        return {"val_bpb": val_loss / math.log(2) * n_tokens / n_bytes} if n_bytes else {}

    def verify(self) -> None:
        """Raises UserError if a file does not have the checksum that meta.json says."""
        for split, expected in self.meta.get("crc32", {}).items():
            path = self.folder / f"{split}.bin"
            if file_crc(path) != expected:
                raise UserError(
                    f"{path} does not have the checksum in its meta.json: prepare the data set "
                    "again, or copy it again"
                )

    def summary(self, tokens_per_iter: int) -> str:
        """For the beginning of a run's log."""
        n_tokens = (self.folder / "train.bin").stat().st_size // np.dtype(self.dtype).itemsize
        line = f"data {self.folder}, {n_tokens:,} tokens, {tokens_per_iter:,} per iteration"
        if not self.meta:
            line += " (no meta.json: taken for GPT-2's tokens)"
        if "unigram_entropy" in self.meta:
            entropy = self.meta["unigram_entropy"]
            line += f"\nknowing only token frequencies gives val loss {entropy:.4f}"
        return line


class TokenFile:
    """A file of token ids, checked on opening.

    It is read and not mapped: a mapped file's pages add up to resident memory, and where the file
    is cut short meanwhile, or its disk fails, the process dies of a signal and not of an error.

    Raises UserError when it is missing, empty, of odd size, too short for one window of
    `block_size` tokens and its targets, or holds an id outside the vocabulary.
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
        self.described = described  # whether vocab_size is meta.json's
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if not path.exists():
            raise UserError(f"{path} is missing: prepare the data set again")
        require_file(path)
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
        self.reading = threading.Lock()  # evaluation and the loader's thread move one position
        scanned = min(self.n_tokens, SCAN_TOKENS)
        for start in range(0, scanned, 2**24):
            self.check(self.read(np.array([start]), min(2**24, scanned - start)))

    def check(self, ids: np.ndarray) -> None:
        """Raises UserError if an id is outside the vocabulary (on a GPU it would be an assert)."""
        if ids.max() >= self.vocab_size:
            least = math.ceil((ids.max() + 1) / 64) * 64
            where = f"model's vocabulary has {self.vocab_size}: begin one with --vocab_size={least}"
            if self.described:
                where = f"vocabulary in its meta.json has {self.vocab_size}: prepare it again"
            raise UserError(f"{self.path} holds token id {ids.max()}, but the {where}")

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` tokens from each of the offsets `starts`, (len(starts), length).

        Raises UserError when the file has become shorter.
        """
        rows = np.empty((len(starts), length), self.dtype)
        with self.reading:
            for row, start in zip(rows, starts.tolist(), strict=True):
                self.file.seek(start * self.dtype.itemsize)
                if self.file.readinto(row) < row.nbytes:
                    raise UserError(
                        f"{self.path} had {self.n_tokens} tokens when this run began and is "
                        "shorter now: restore it, then go on with --init_from=resume"
                    )
        return rows

    def beginning(self, length: int) -> np.ndarray:
        """The first tokens, `length` at most."""
        return self.read(np.zeros(1, np.int64), min(length, self.n_tokens))[0]

    def windows(self, starts: np.ndarray) -> np.ndarray:
        """The windows at token offsets `starts`, (len(starts), block_size + 1) int64."""
        ids = self.read(starts, self.block_size + 1).astype(np.int64)
        self.check(ids)
        return ids


class DataLoader:
    """Micro-batches of one process, read one ahead by a thread and pinned for a GPU.

    Args:
        file: the training tokens.
        batch_size: sequences in a micro-batch of one process.
        accumulation: micro-batches in a step, all processes counted together.
        offset: windows drawn before step 0; non-zero after a resume with another global batch.
    """

    def __init__(
        self,
        file: TokenFile,
        batch_size: int,
        accumulation: int,
        seed: int,
        process: Process = ALONE,
        offset: int = 0,
    ):
        self.file, self.batch_size, self.seed = file, batch_size, seed
        self.accumulation, self.process, self.offset = accumulation, process, offset
        self.reader = ThreadPoolExecutor(max_workers=1)
        n_tokens = file.n_tokens
        # one fewer than there is room for, so that an epoch can begin at any phase
        self.windows_per_epoch = max(1, n_tokens // file.block_size - 1)
        self.phases = min(file.block_size, n_tokens - self.windows_per_epoch * file.block_size)

    def position(self, step: int) -> int:
        """Windows drawn from the endless list before `step`."""
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
        """Every micro-batch of this process from `step` on, without end."""
        micro_steps, device = self.accumulation // self.process.world_size, self.process.device

        def read(n: int) -> Batch:
            return to_batch(self.file.windows(self.starts(*divmod(n, micro_steps))), device)

        n = step * micro_steps
        pending = self.reader.submit(read, n)
        while True:
            n += 1
            pending, ready = self.reader.submit(read, n), pending
            yield moved(ready.result(), device)


def eval_batches(
    file: TokenFile,
    batch_size: int,
    n_sequences: int,
    process: Process = ALONE,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """The same `n_sequences` windows every time, spread evenly over the file: tokens, targets, and
    which share of all windows they are, so that means of batches add up to the mean of all.

    Each of N processes takes every N-th batch, and all get equally many, since they may exchange
    weights on the way. All batches are full, for the sake of compiled code: what is missing is
    filled up with windows of which no target counts (all -1).
    """
    starts = eval_starts(file, n_sequences)
    for first in range(0, n_sequences, process.world_size * batch_size):
        mine = starts[first + process.rank * batch_size :][:batch_size]
        windows = file.windows(np.resize(mine if len(mine) else starts, batch_size))
        tokens, targets = to_batch(windows, process.device)
        targets[len(mine) :] = -1
        yield *moved((tokens, targets), process.device), len(mine) / n_sequences


def eval_starts(file: TokenFile, n_sequences: int) -> np.ndarray:
    """Token offsets of the windows that `eval_batches` reads."""
    return np.linspace(0, file.n_tokens - file.block_size - 1, n_sequences).astype(np.int64)


def to_batch(windows: np.ndarray, device: torch.device) -> Batch:
    """Tokens and, one position later, targets; in page-locked memory if the device is a GPU."""
    # copies, or the slices of a single window share memory
    tokens, targets = map(torch.from_numpy, (windows[:, :-1].copy(), windows[:, 1:].copy()))
    if device.type == "cuda":
        tokens, targets = tokens.pin_memory(), targets.pin_memory()
    return tokens, targets


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`, without waiting for the copy."""
    tokens, targets = batch
    return tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
