"""Checkpoints: written atomically, and loaded without running any code in them.

`ckpt.pt` holds everything needed to resume bit for bit. `before_decay.pt` holds the same from just
before the learning rate began to decay. `best.pt` holds only the weights, configuration and
tokenizer of the lowest validation loss.
"""

import contextlib
import inspect
import io
import json
import math
import os
import pickle
import re
import reprlib
import time
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_map_only

from model import GPTConfig
from steady import UserError, distributed
from steady.dataloader import DataSet
from steady.distributed import SINGLE_PROCESS, Process
from steady.folder import CANNOT, FILES, hold_lock, naming, replacement, require_file, sync_to_disk
from steady.optim import load_state, optimizer_name
from steady.output import shown, waiting
from steady.tokenizer import TEMPLATES, Tokenizer, check_meta, from_meta

MAX_ROPE_VALUES = 2**28  # 2 GiB of rotary tables
THREADS = min(8, os.cpu_count() or 1)  # for writing or reading a checkpoint
ZEROS = bytes(2**20)
FORMAT = 1  # increase it when the layout of a checkpoint changes
# checksum of model.py at the start: you may edit the file during the run
MODEL_CODE = zlib.crc32(Path(inspect.getfile(GPTConfig)).read_bytes())

WEIGHTS_ONLY = {  # the keys of best.pt and their types
    "model": dict, "model_config": dict, "tokenizer": dict, "iter_num": int, "best_val_loss": float,
}  # fmt: skip
EVERYTHING = WEIGHTS_ONLY | {  # the keys of ckpt.pt and their types
    "config": dict, "optimizer": dict, "scaler": dict, "sequences": int,
    "data_ids": dict, "average": dict,
}  # fmt: skip
OPTIONAL = {"pretrained": None, "data_ids": {}, "average": {}, "scaler": {}}  # with defaults
MODEL = "model.py and its model_config"


def as_saved(content: dict[str, Any]) -> dict[str, Any]:
    """Prepare `content` for saving: objects become their state dicts, NumPy's numbers become
    Python's, and best_val_loss becomes a float."""
    saved = {}
    for key, value in content.items():
        one = isinstance(value, Tensor) and value.numel() == 1
        if key == "best_val_loss" and (one or isinstance(value, int)):
            value = float(value)
        if hasattr(value, "state_dict"):
            kind = {"kind": optimizer_name(value)} if key == "optimizer" else {}
            value = kind | {**value.state_dict()}  # dict(...) would take a list of pairs
        saved[key] = value
    return tree_map_only(np.generic, lambda number: number.item(), saved)


def require_plain(content: dict[str, Any], path: Path) -> None:
    """Raises UserError, with the entry's name, if an entry of `as_saved`'s result can be saved but
    not loaded again: `load` accepts only tensors and plain values. Others could run code."""
    for key, value in content.items():
        file = io.BytesIO()
        try:
            if odd := [tensor for tensor in tensors_in(value) if not is_dense(tensor)]:
                raise ValueError(f"a tensor that is not dense: {odd[0].layout}")
            torch.save(tree_map_only(Tensor, lambda _: None, value), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            reason = found[1] if found else f"something else ({error})"
            reason = "a NumPy array" if "multiarray" in reason else reason
            raise UserError(
                f"{path} cannot hold {key!r}, because it has {reason}: save only dense tensors, "
                "numbers, strings, lists, tuples and dicts (of a module or optimizer: its "
                "state_dict())"
            ) from None


def save(
    path: Path, content: dict[str, Any], process: Process = SINGLE_PROCESS, read_back: bool = True
) -> None:
    """Write `content` to `path`. A crash, a full disk or a disk that returns wrong bytes leaves the
    old file intact.

    torch.save first writes the file without the tensors' data. Threads of all processes then write
    the data, read it back and compare checksums. With fsdp every process writes its own rows, so no
    process gathers them. If the machines do not share the folder, or if the file system loses
    some of their data, the first process gathers one tensor at a time and writes it.

    process: if there are several, all of them must call this.
    read_back: False takes half the time, for a process that may be killed in 30 s (torchrun's limit
    after SIGTERM). The checksums are then compared only when the file is loaded. Files that several
    machines write are always read back.

    Raises UserError for weights that are not finite, so that they never replace good ones.
    """
    # a model that you have compiled is saved under its own names
    content = {key: getattr(value, "_orig_mod", value) for key, value in content.items()}
    model = content.get("model")
    about = {"format": FORMAT, "launch": distributed.launch_id(), "model_code": MODEL_CODE}
    content = about | as_saved(content)
    for key, value in [*content.items()]:
        try:
            require_plain({key: value}, path)
        except UserError as error:
            if key in EVERYTHING:
                raise
            del content[key]  # your own, which may have changed since the check before training
            if process.master:
                print(f"warning: {error}; saving the rest")
    if not process.shards_model:
        if not process.master:
            return
        process = SINGLE_PROCESS
    several = process.world_size > 1 and not distributed.on_one_machine()  # machines
    weights = content.get("model") or {}
    distributed.all_or_none(process, lambda: check_finite(weights, path, model))
    records: dict[tuple, tuple[Tensor, Tensor]] = {}  # tensors, and stand-ins without data
    without_data = FakeTensorMode()

    def emptied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = distributed.local_shards([value])[0]
        # tied weights count once, also in a process that has none of their rows
        memory = local.untyped_storage().data_ptr() or id(value), local.storage_offset()
        key = *memory, value.shape, local.stride(), value.dtype, local.is_conj(), local.is_neg()
        with without_data:
            return records.setdefault(key, (value, torch.empty(value.shape, dtype=value.dtype)))[1]

    empty = tree_map(emptied, content)
    tensors = [tensor for tensor, _ in records.values()]

    def begin() -> tuple[Path, list[int]]:
        hold_lock(path.parent)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(empty, temporary)
        reader = torch._C.PyTorchFileReader(str(temporary))
        return temporary, [reader.get_record_offset(f"data/{i}") for i in range(len(tensors))]

    def on_first(action: Callable[[], Any]) -> Any:
        return distributed.all_or_none(process, lambda: process.master and action())[0]

    def write(gather: bool) -> None:
        parts = partial(write_tensors, temporary, tensors, offsets, process, gather)
        sums = distributed.all_or_none(process, parts)
        on_first(lambda: write_sums(temporary, sums))

    with replacement(path) if process.master else contextlib.nullcontext(path) as temporary:
        temporary, offsets = on_first(begin)
        shared = all(distributed.all_or_none(process, partial(os.path.exists, temporary)))
        try:
            write(gather=not shared)
            if shared and (read_back or several):
                check = partial(check_sums, temporary, process.rank, process.world_size)
                distributed.all_or_none(process, check)
        except Exception as error:
            errnos = distributed.gather_objects(process, getattr(error, "errno", None))
            if any(errno in CANNOT for errno in errnos):  # the disk only takes sequential writes
                whole = distributed.gather_full(content)
                on_first(lambda: write_whole(temporary, whole))
            elif several and shared:
                write(gather=True)
            else:
                raise
            shared = False  # so that it is read back below
        on_first(lambda: read_back and not shared and check_sums(temporary))


def write_whole(path: Path, content: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)
        sync_to_disk(file)


def write_tensors(
    path: Path, tensors: list[Tensor], offsets: list[int], process: Process, gather: bool
) -> list[int]:
    """Write this process's rows of sharded tensors to their offsets in the file `path`. The first
    process also writes all other tensors. Returns `write_data`'s checksums.

    gather: the first process gathers each tensor in turn and writes all of it.
    """
    if not all(tensor.device.type == "cpu" for tensor in tensors):
        torch.accelerator.synchronize()  # each thread has its own stream
    failures = []

    def write(tensor: Tensor, offset: int) -> int:
        if gather and distributed.is_sharded(tensor):
            tensor = tensor.full_tensor()
        part, sharded = distributed.local_shards([tensor])[0], distributed.is_sharded(tensor)
        if failures or not (sharded or process.master):
            return 0
        first_row = distributed.first_row(tensor) if sharded else 0
        before = first_row * math.prod(part.shape[1:]) * part.element_size()
        try:
            return write_data(path, part, offset, before, tensor.nbytes - before - part.nbytes)
        except Exception as error:
            # raised at the end: others may wait for this process (its traceback would keep tensors)
            failures.append(error.with_traceback(None))
            return 0

    assert len(tensors) == len(offsets), "the processes have different tensors"
    with ThreadPoolExecutor(THREADS) as pool:
        parts = (map if gather else pool.map)(write, tensors, offsets)
        name, quiet = path.name.rsplit(".", 2)[0], not process.master
        sums = list(waiting(parts, len(tensors), f"saving {name}", quiet, unit="part"))
    if failures:
        raise failures[0]
    if not (process.master or gather):  # it may be on another machine
        with open(path, "rb+") as file:
            sync_to_disk(file)
    return sums


def write_data(path: Path, part: Tensor, offset: int, before: int = 0, after: int = 0) -> int:
    """Write a part of a tensor to the file `path`, where the tensor is at `offset`. `before` and
    `after` are the bytes of its other parts. Returns the part's share of the tensor's CRC-32. The
    XOR of all shares is that CRC, because a CRC without its initial value is linear: zeros before
    the part do not change it, zeros after it do."""
    part = part.detach().cpu().resolve_conj().resolve_neg()
    data = part.contiguous().view(-1).view(torch.uint8).numpy()
    with open(path, "rb+") as file:
        file.seek(offset + before)
        file.write(data)
    start = 0xFFFFFFFF if before else 0  # inverted by zlib: only the first part has a start value
    crc = zlib.crc32(data, start)
    for left in range(after, 0, -len(ZEROS)):
        crc = zlib.crc32(ZEROS[:left], crc)
    return crc ^ start


def write_sums(path: Path, sums: list[list[int]]) -> None:
    """Write the checksums of the tensors' data into the directory of the zip archive `path`. `sums`
    has each process's shares of them."""
    with zipfile.ZipFile(path, "a") as archive:
        for part in archive.infolist():
            if number := re.search(r"/data/(\d+)$", part.filename):
                part.CRC = 0
                for shares in sums:
                    part.CRC ^= shares[int(number[1])]
        archive.comment = b""  # marks the directory as changed: closing writes it again
    with open(path, "rb+") as file:
        sync_to_disk(file)


def check_sums(path: Path, first: int = 0, step: int = 1) -> None:
    """Raises an error unless the bytes that torch.load would read for each part of the zip archive
    `path` match its checksum. torch.load itself does not check: a flipped bit becomes a wrong
    weight. It maps the file's raw bytes, so a compressed part would give wrong weights too (F81).
    With several processes, each checks every `step`-th part, starting at its `first`."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        for part in parts:
            archive.open(part).close()  # raises if its own header has another name
    if len({part.filename for part in parts}) < len(parts):
        raise zipfile.BadZipFile("two parts have the same name")
    reader = torch._C.PyTorchFileReader(str(path))

    def check(part: zipfile.ZipInfo) -> None:
        if part.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{part.filename} is compressed")
        found, left = 0, part.file_size
        with open(path, "rb", buffering=0) as file:  # some file systems cannot mmap
            file.seek(reader.get_record_offset(part.filename.partition("/")[2]))
            while left and (data := file.read(min(left, 2**24))):
                found, left = zlib.crc32(data, found), left - len(data)
        if left or found != part.CRC:
            raise zipfile.BadZipFile(f"{part.filename} does not match its checksum")

    parts = parts[first::step]
    with ThreadPoolExecutor(THREADS) as pool:
        list(waiting(pool.map(check, parts), len(parts), f"verifying {path.name}", unit="part"))


def try_save(
    path: Path,
    content: dict[str, Any],
    process: Process,
    say: Callable[[str], None],
    overwrite: bool = True,
    read_back: bool = True,
) -> bool:
    """`save` the state that all processes hold together; all of them must call this.

    A failed save does not end the run: it prints a warning and returns False on every process.
    """
    if not overwrite and distributed.any_process(path.exists()):
        return True
    began, failed = time.perf_counter(), False
    distributed.set_timeout(60)  # the others wait while one process writes
    try:
        save(path, content, process, read_back)
        if process.master:
            size, seconds = path.stat().st_size / 1e6, time.perf_counter() - began
            say(f"saved {path}: {size:,.1f} MB in {seconds:.1f} s")
    except Exception as error:
        kept = " (the last good one is kept)" if path.is_file() else ""
        reason = str(error).partition("\n")[0]
        say(f"warning: {path} was not saved{kept}: {reason}")
        failed = True
    failed = distributed.any_process(failed)
    distributed.set_timeout()
    return not failed


def load_plain(path: Path) -> Any:
    """Load tensors and plain values to the CPU; anything else raises pickle's error."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "unable to mmap" not in str(error):  # some file systems cannot mmap
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def resolve_init_from(init_from: str, path: Path, process: Process) -> str:
    """Returns "resume" if torchrun has restarted the processes of a launch that has already saved
    `path`, else `init_from`. The first process decides for all. (With several machines torchrun
    does not count all restarts.)"""
    one = process.world_size == 1 or distributed.on_one_machine()
    if one and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return init_from
    return distributed.on_rank0_first(
        process, lambda: "resume" if peek(path, "launch") == distributed.launch_id() else init_from
    )


def peek(path: Path, key: str, default: Any = None) -> Any:
    """An entry of the checkpoint `path`, which is not checked; `default` if it cannot be read."""
    with contextlib.suppress(Exception):
        require_file(path)
        return load_plain(path)[key]
    return default


def read(path: Path) -> dict[str, Any]:
    """Load a checkpoint from `path` to the CPU: only tensors and plain values, so no code runs.

    Raises UserError if it is missing, damaged or not a steadyGPT checkpoint.
    """
    require_file(path)
    if not path.is_file():
        raise UserError(
            f"no checkpoint at {path}: train first, or check the folder (and --ckpt, if you set it)"
        )
    try:
        check_sums(path)
        content = load_plain(path)
        check_tensors(content, path)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors and plain values; it was not loaded, because loading "
            "it could run code"
        ) from None
    except (UserError, PermissionError, MemoryError):
        raise
    except Exception as error:  # damage raises many kinds of errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is damaged or not a checkpoint: {reason}") from None
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int or version != FORMAT:
        raise UserError(
            f"{path} is not a steadyGPT checkpoint of format {FORMAT}; nanoGPT checkpoints cannot "
            "be resumed, because their architecture differs"
        )
    return content


def load(path: Path, kinds: dict[str, type] = WEIGHTS_ONLY) -> dict[str, Any]:
    """`read` a checkpoint. Raises UserError unless it has all keys of `kinds`, of these types."""
    content = OPTIONAL | read(path)
    for key in lacking(content, kinds):
        found = f"is {reprlib.repr(content[key])}" if key in content else "is missing"
        expected = f"(expected a valid {kinds[key].__name__})"
        raise UserError(f"{path} is incomplete or damaged: {key} {found} {expected}")
    if content["pretrained"] is not None:
        check_metadata(content["pretrained"], f"{path}, pretrained")
    check_meta(content["tokenizer"], f"{path}, tokenizer")
    return content


def lacking(content: dict[str, Any], kinds: dict[str, type]) -> list[str]:
    """The keys of `kinds` for which `content` has no valid value of that type."""

    def is_valid(value: Any, kind: type) -> bool:
        if type(value) is not kind or value != value:  # NaN
            return False
        return kind is not int or 0 <= value < 2**62

    return [key for key, kind in kinds.items() if not is_valid(content.get(key), kind)]


def check_metadata(metadata: Any, source: str) -> None:
    """Raises UserError unless `metadata` has the form of `Pretrained.metadata` (convert.py)."""
    dicts = ("config", "generation_config", "tokenizer_config", "special_tokens_map", TEMPLATES)
    try:
        # it must be JSON; the text of lists that contain each other would never end
        n_parts = sum(1 for _ in islice(json.JSONEncoder().iterencode(metadata), 10**6))
        longest = metadata.get("config", {}).get("max_position_embeddings", 0)
        good = (
            n_parts < 10**6 and type(longest) is int and 0 <= longest < 2**31
            and all(isinstance(v, dict if k in dicts else str) for k, v in metadata.items())
            and all(re.fullmatch(r"[\w-]+", name) for name in metadata.get(TEMPLATES, {}))
            and all(isinstance(text, str) for text in metadata.get(TEMPLATES, {}).values())
            and getattr(torch, metadata["dtype"]).is_floating_point is True
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise UserError(
            f"{source} is not valid metadata of a pretrained model: {reprlib.repr(metadata)}"
        )


def architecture(saved: dict[str, Any], kind: type[GPTConfig], path: Path) -> GPTConfig:
    """A checkpoint's model_config as a `kind`; raises UserError that names `path` and the key."""
    settings = saved["model_config"]  # settings newer than the checkpoint get their defaults
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:  # a name is unknown or missing
        raise UserError(
            f"{path}, model_config: {shown(str(error))}: give GPTConfig the fields that it had "
            "in that run, or use another --out_dir"
        ) from None
    with naming(f"{path}, model_config"):
        config = kind(**settings)
        layers = getattr(config, "n_layer", 0)  # you may have renamed it
        if layers > len(saved["model"]) + 1000:
            raise UserError(f"n_layer={layers}, but the file has {len(saved['model'])} weights")
        rope_values = config.block_size * getattr(config, "head_dim", 0)
        if rope_values > max(MAX_ROPE_VALUES, path.stat().st_size):
            raise UserError(f"block_size={config.block_size} is too large for the size of the file")
        return config


def build(
    model: type[nn.Module], kind: type[GPTConfig], saved: dict[str, Any], path: Path
) -> nn.Module:
    """Build the `model` that a checkpoint describes and load its weights. Checks that the weights
    fit the description before it allocates anything, if the model's code runs without values.

    Raises UserError that names `path` and the mismatch.
    """
    config = architecture(saved, kind, path)
    note_other_code(saved, path)
    with contextlib.suppress(RuntimeError, NotImplementedError), torch.device("meta"):
        expected = model(config)  # fails if an edited model calls .item()
        fill_empty_buffers(expected, saved["model"])
        check_weights(saved["model"], expected.state_dict(), f"{path} does not fit {MODEL} in")
    built = model(config)
    load_weights(built, saved["model"], path)
    return built


def note_other_code(saved: dict[str, Any], path: Path) -> None:
    """Print a note if model.py has changed since the run that saved `path` began: another forward
    pass may fit the same weights."""
    if saved.get("model_code", MODEL_CODE) != MODEL_CODE:
        print(f"note: {path} was saved with another version of model.py, which may compute "
              "something else from the same weights")  # fmt: skip


def tokenizer_of(saved: dict[str, Any], path: Path) -> Tokenizer:
    """A checkpoint's tokenizer; raises UserError that names `path`."""
    with naming(f"{path}, tokenizer"):
        return from_meta(saved["tokenizer"])


def check_tensors(content: Any, path: Path) -> None:
    """Raises UserError unless all tensors have their data in the file. A sparse tensor, one without
    storage, or one whose strides repeat a few values can claim any size. A storage must be as long
    as its part, which check_sums has verified: torch itself trusts the pickle's length (F81)."""
    held = {}
    for tensor in tensors_in(content):
        if not is_dense(tensor) or tensor.device.type != "cpu":
            found = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
            raise UserError(f"{path} holds something other than dense numeric tensors ({found})")
        storage = tensor.untyped_storage()
        if tensor.nbytes > storage.nbytes():
            raise UserError(f"{path} holds a tensor that is larger than its data in the file")
        held[storage.data_ptr()] = storage.nbytes()
    with zipfile.ZipFile(path) as archive:
        parts = [p.file_size for p in archive.infolist() if re.search(r"/data/\d+$", p.filename)]
    if sorted(filter(None, held.values())) != sorted(filter(None, parts)):
        raise UserError(f"{path} is damaged: a tensor and its part differ in length")


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def tensors_in(content: Any) -> list[Tensor]:
    """All tensors in nested plain containers. Visits each container once, even if several others
    contain it."""
    found, seen, left = [], set(), [content]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return found


def check_weights(weights: dict[str, Tensor], expected: dict[str, Tensor], complaint: str) -> None:
    """Raises UserError if `weights` do not match the state dict `expected`. The message begins with
    `complaint` and lists the tensors that differ, in load_state_dict's words."""
    differing = sorted(
        f"{name} ({'missing' if name in expected else 'unexpected'})"
        for name in weights.keys() ^ expected.keys()
    ) or [
        f"{name} ({' is not '.join(map(kind_of, (tensor, expected[name])))})"
        for name, tensor in weights.items()
        if kind_of(tensor) != kind_of(expected[name])
    ]
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise UserError(f"{complaint} {', '.join(differing[:5])}{more}")


def kind_of(value: Any) -> str:
    """The properties that a saved tensor shares with the model's, in words; "" for other state."""
    if not isinstance(value, Tensor):
        return ""
    kind = "float" if value.is_floating_point() else "complex" if value.is_complex() else "integer"
    return f"{kind} {[*value.shape]}"


def check_finite(
    weights: dict[str, Tensor],
    path: Path,
    model: Any = None,
    problem: str = "values that are not finite",
) -> None:
    """Raises UserError that names a tensor with NaN or infinite values. Checks the sum of each
    tensor, with one device sync.

    model: if it is a module, checks only its parameters: its buffers may hold anything. Frozen
    parameters may be infinite, as masks are.
    """
    parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    # your state_dict() may leave out parameters, or rename all
    names = [name for name in parameters if name in weights] or weights
    names = [n for n in names if isinstance(weights[n], Tensor) and weights[n].is_floating_point()]
    frozen = [name for name in names if name in parameters and not parameters[name].requires_grad]
    shards = distributed.local_shards([weights[name] for name in names])
    sums = [shard.sum(dtype=torch.float32) for shard in shards]
    for name, value in zip(names, torch.stack(sums).tolist() if sums else [], strict=True):
        if not math.isfinite(value) and (math.isnan(value) or name not in frozen):
            raise UserError(f"{path}: {name} has {problem}")


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: dict[str, Tensor], path: Path, strict: bool = True
) -> None:
    """Load the weights from `path` into `model`, with fsdp only this process's part. Raises
    UserError if they are another model's or not finite. strict: False keeps the initial values of
    tensors that the file lacks."""
    model = getattr(model, "_orig_mod", model)  # as in `save`
    distributed.own_memory(model.parameters())  # as `distributed.shard` does
    fill_empty_buffers(model, weights)
    state = model.state_dict()
    if not strict:
        state = {name: value for name, value in state.items() if name in weights}
    check_weights(weights, state, f"{path} does not fit {MODEL} in")
    extra = "_extra_state"  # torch's key for the result of a module's get_extra_state
    tensors = {name: value for name, value in state.items() if not name.endswith(extra)}
    first_name: dict[tuple, str] = {}  # of the tensors that share memory
    for name, tensor in tensors.items():
        local, whole = distributed.local_shards([tensor])[0], weights[name]
        local.copy_(distributed.local_rows(whole, tensor))
        tied = first_name.setdefault((local.data_ptr(), local.shape, local.stride()), name)
        same = tied == name or not local.numel() or torch.equal(weights[tied], whole)
        if not same and weights[tied].isfinite().all():
            raise UserError(f"{path} has two values for {tied} and {name}, which model.py ties")
    check_finite(tensors, path, model)
    # last, because it calls hooks, which see all weights
    extras = {name: weights[name] for name in state.keys() - tensors.keys()}
    model.load_state_dict(tensors | extras, strict=False)


def fill_empty_buffers(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Replace buffers that are None (before the first batch) by tensors like the saved ones."""
    device = next((p.device for p in model.parameters()), None)
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            saved = weights.get(f"{prefix}.{name}" if prefix else name)
            if buffer is None and isinstance(saved, Tensor):
                module._buffers[name] = torch.empty_like(saved, device=device)


def find(out_dir: Path, name: str = "") -> Path:
    """The checkpoint to use: `name` if given, else best.pt if there is one, else ckpt.pt."""
    best = out_dir / "best.pt"
    return out_dir / name if name else best if best.exists() else out_dir / "ckpt.pt"


class Start(NamedTuple):
    """The starting point of a run: an architecture and, if it is not new, its saved state."""

    model_config: dict[str, Any]  # GPTConfig's arguments
    weights: dict[str, Tensor] | None = None
    pretrained: dict[str, Any] | None = None  # metadata of pretrained weights, for exports
    iter_num: int = 0
    best_val_loss: float = math.inf
    sequences: int = 0  # number drawn from the training data so far
    optimizer: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    stale_files: tuple[str, ...] = FILES  # files in the folder from another run
    source: Path = Path()  # where all this comes from, for messages
    average: dict[str, Tensor] | None = None  # averaged weights

    def load_weights(self, model: nn.Module, strict: bool = True) -> None:
        """Load the weights into `model`, if there are any; raises UserError if they do not fit.
        strict: False keeps the initial values of tensors that the weights lack."""
        if self.weights is not None:
            load_weights(model, self.weights, self.source, strict)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        """Load the states of the optimizer and of the float16 scaler, if there are any; raises
        UserError if either is invalid."""
        if self.optimizer is None:
            return
        with naming(f"{self.source} cannot be resumed"):
            load_state(optimizer, self.optimizer)
            if scaler and scaler.is_enabled() and self.scaler:  # empty after float32: keep the new
                expected = {name: type(value) for name, value in scaler.state_dict().items()}
                if {name: type(value) for name, value in self.scaler.items()} != expected:
                    raise UserError(f"scaler must contain numbers: {', '.join(expected)}")
                scaler.load_state_dict(self.scaler)


def resume(
    path: Path, asked: GPTConfig, data: DataSet, config: dict[str, Any], process: Process
) -> Start:
    """The state of the run that wrote `path`.

    Args:
        asked: the architecture from the settings. It must match the checkpoint's, except for
            dropout. A run from pretrained weights keeps their architecture.
        data: it must have the checkpoint's tokenizer. A best loss measured on other windows is
            discarded.
        config: train.py's settings.
    """
    saved, model_config = load(path, EVERYTHING), asked.settings()
    distributed.require_same_files(path)
    was = architecture(saved, type(asked), path).settings()
    if saved["pretrained"]:
        model_config = was | {key: model_config[key] for key in ("block_size", "dropout")}
    # the tokenizer comes from the data set, not from a setting
    if {"tokenizer": "gpt2"} | saved["tokenizer"] != {"tokenizer": "gpt2"} | data.tokenizer:
        raise UserError(
            f"cannot resume {path}: the data set has a different tokenizer; use the --dataset that "
            "it was trained on, or another --out_dir"
        )
    differing = [
        f"{key} (checkpoint {was.get(key)!r}, now {now!r})" for key, now in model_config.items()
        if key != "dropout" and was.get(key) != now
    ]  # fmt: skip
    if differing:
        raise UserError(
            f"cannot resume {path}: the model differs in {', '.join(differing)}; use the "
            "checkpoint's values, or another --out_dir"
        )

    def decide() -> tuple[float, list[str]]:
        """The best loss so far, and the files in the folder that belong to another run."""
        print(f"resuming from {path} at iteration {saved['iter_num']}")
        note_other_code(saved, path)
        stale_files = []
        best = peek(path.with_name("best.pt"), "iter_num", -1)
        loss = peek(path.with_name("best.pt"), "best_val_loss")
        if best < 0 and saved["best_val_loss"] < math.inf:
            print("note: best.pt is missing: the best loss so far is discarded")
        other_windows = print_changes(saved, data, config, process.dtype)
        # best.pt may be from a later iteration or another run
        if other_windows or not 0 <= best <= saved["iter_num"] or loss != saved["best_val_loss"]:
            stale_files.append("best.pt")
        if peek(path.with_name("before_decay.pt"), "iter_num", -1) >= saved["iter_num"]:
            stale_files.append("before_decay.pt")
        return math.inf if "best.pt" in stale_files else saved["best_val_loss"], stale_files

    best_val_loss, stale_files = distributed.on_rank0_first(process, decide)
    same = ("pretrained", "iter_num", "sequences", "optimizer", "scaler", "average")
    kept = {name: saved[name] for name in same} | {"best_val_loss": best_val_loss}
    return Start(model_config, saved["model"], stale_files=tuple(stale_files), source=path, **kept)


def print_changes(
    saved: dict[str, Any], data: DataSet, config: dict[str, Any], dtype: torch.dtype
) -> bool:
    """Print notes about changes since the checkpoint that the user may not have intended. Returns
    whether evaluations use other windows, so that the best loss so far does not count."""
    now = config | {"dtype": str(dtype)}  # that of the computation, which may be "auto" in config
    found = saved["config"] | {"dtype": saved.get("dtype")}
    before = now | {name: x for name, x in found.items() if type(x) is type(now.get(name))}
    others = [name for name, was in saved["data_ids"].items() if data.ids.get(name) != was]
    if "train.bin" in others:
        print("note: train.bin has changed since the checkpoint: the run trains on different text")
    evaluated, was_evaluated = (c["eval_iters"] * c["batch_size"] for c in (config, before))
    other_windows = "val.bin" in others or evaluated != was_evaluated
    if other_windows:
        print("note: val.bin, or eval_iters x batch_size, has changed since the checkpoint: the "
              "best loss so far is discarded")  # fmt: skip
    for name in ("dtype", "seed"):
        was, new = (shown(str(c[name])).removeprefix("torch.") for c in (before, now))
        if was != new:
            print(f"note: {name} has changed from {was} to {new}: --{name}={was} keeps the old one")
    if config["max_iters"] <= saved["iter_num"] and not config.get("eval_only"):
        print(f"note: the checkpoint is at iteration {saved['iter_num']}: nothing is left to "
              "train; continue with a larger --max_iters")  # fmt: skip
    return other_windows
