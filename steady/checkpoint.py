"""Checkpoints: written atomically, read without running any code they might hold.

`ckpt.pt` holds all that is needed to go on bit for bit; `best.pt` only weights, configuration and
tokenizer of the lowest validation loss.
"""

import math
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from steady import distributed
from steady.distributed import Place

import torch
from torch import Tensor

FORMAT = 1  # raised when a checkpoint's layout changes


def save(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`; a crash or a full disk at any point leaves the old file intact."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT} | content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError):  # torch reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # make the rename itself durable
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def try_save(path: Path, content: dict[str, Any], here: Place, say: Callable[[str], None]) -> bool:
    """`save` what all processes hold together; every one of them must call it.

    A save that fails is no reason to end a run: it is said, and False returned on every process.
    """
    failed, content = False, distributed.gather_full(content)
    try:
        if here.master:
            save(path, content)
    except (OSError, RuntimeError) as error:
        say(f"warning: {path} was not saved, the last good one is kept: {error}")
        failed = True
    return not distributed.any_process(failed)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Tensors and plain values only: nothing in it is executed.

    Raises ValueError when it is missing, damaged, or not one of ours.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is damaged or not a checkpoint: no complete zip archive")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"no checkpoint at {path}: train first, or check --out_dir") from None
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} holds more than tensors and plain values; it was not loaded, because loading "
            "it could run code"
        ) from None
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is damaged or not a checkpoint: {reason}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{path} is no steadyGPT checkpoint of format {FORMAT} (found {found}); "
            "nanoGPT's cannot be resumed, its architecture differs"
        )
    return content


def find(out_dir: Path, name: str = "") -> Path:
    """The checkpoint to use: `name` if given, else best.pt if there is one, else ckpt.pt."""
    best = out_dir / "best.pt"
    return out_dir / name if name else best if best.exists() else out_dir / "ckpt.pt"


def make_folder(out_dir: Path) -> None:
    """Create `out_dir`; raises ValueError if nothing can be written there."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / ".writable").touch()
        (out_dir / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"cannot write to out_dir={out_dir}: {error.strerror}") from None


def set_aside(out_dir: Path) -> None:
    """Move an earlier run's files to `out_dir/previous`, so that a new run cannot destroy them."""
    found = [out_dir / name for name in ("ckpt.pt", "best.pt", "metrics.jsonl")]
    found = [path for path in found if path.exists()]
    if found:
        (out_dir / "previous").mkdir(exist_ok=True)
        for path in found:
            os.replace(path, out_dir / "previous" / path.name)
        print(f"note: moved an earlier run's files to {out_dir / 'previous'}")


class Start(NamedTuple):
    """What a run begins with: an architecture, and unless it is new, all that goes with it."""

    model_config: dict[str, Any]  # GPTConfig's arguments
    weights: dict[str, Tensor] | None = None
    pretrained_dtype: str | None = None  # of the files that the weights once came from
    iter_num: int = 0
    best_val_loss: float = math.inf
    sequences: int = 0  # drawn from the training data so far
    optimizer: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None


def resume(path: Path, model_config: dict[str, Any], tokenizer: dict[str, Any]) -> Start:
    """Where the run that wrote `path` was.

    Args:
        model_config: what the settings ask for. It must be the checkpoint's, except for dropout;
            where the architecture once came with pretrained weights, it still does.
        tokenizer: the data set's.
    """
    saved = load(path)
    pretrained_dtype = saved.get("pretrained_dtype")
    if pretrained_dtype:
        own = {key: model_config[key] for key in ("block_size", "dropout")}
        model_config = saved["model_config"] | own
    check_same_model(
        saved["model_config"] | {"tokenizer": saved["tokenizer"]},
        model_config | {"tokenizer": tokenizer},
        path,
    )
    return Start(
        model_config,
        saved["model"],
        pretrained_dtype,
        saved["iter_num"],
        saved["best_val_loss"],
        saved["sequences"],
        saved["optimizer"],
        saved["scaler"],
    )


def check_same_model(saved: dict[str, Any], current: dict[str, Any], path: Path) -> None:
    """Raises ValueError that names all in which two models differ, but for dropout."""
    differing = [key for key in current if key != "dropout" and saved.get(key) != current[key]]
    if differing:
        listed = ", ".join(f"{key} (checkpoint {saved.get(key)}, now {current[key]})"
                           for key in differing)  # fmt: skip
        raise ValueError(
            f"cannot resume {path}: the model differs in {listed}; use the checkpoint's values, "
            "or another --out_dir"
        )
