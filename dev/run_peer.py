"""Run the training script of an unmodified checkout of nanoGPT or nanochat for dev/peers.py.

    python dev/run_peer.py nanogpt CHECKOUT DATA OUT_DIR SEED [flags of its train.py]

It trains and evaluates on train.py's windows, in the same order. The steps and evaluations that it
prints go to OUT_DIR/metrics.jsonl. The checkout itself is not changed: this script replaces the
functions for reading data, saving and sampling before it starts the other one.
"""

import builtins
import itertools
import json
import math
import os
import pickle
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from steady.dataloader import DataLoader, DataSet, eval_batches, even_starts
from steady.distributed import Process

STEP = {
    "nanogpt": r"iter (?P<iter>\d+): loss (?P<loss>\S+), time (?P<ms>[\d.]+)ms",
    "nanochat": r"step (?P<iter>\d+)/.*\| loss: (?P<loss>\S+) .*\| dt: (?P<ms>[\d.]+)ms",
}
EVALUATION = {
    "nanogpt": r"step (?P<iter>\d+): .*val loss (?P<val_loss>\S+)",
    "nanochat": r"Step (?P<iter>\d+) \| Validation bpb: (?P<val_loss>\S+)",
}


def main() -> None:
    if len(sys.argv) < 6:
        raise SystemExit(__doc__)
    kind, checkout, data, out_dir, seed, *flags = sys.argv[1:]
    sys.path[:] = [checkout, *sys.path[2:], sys.path[0]]  # its model.py takes precedence over ours
    options = dict(flag.removeprefix("--").split("=", 1) for flag in flags if "=" in flag)
    log_what_is_printed(kind, Path(out_dir) / "metrics.jsonl", options)
    use_seed(int(seed))
    prepare = {"nanogpt": prepare_nanogpt, "nanochat": prepare_nanochat}[kind]
    script = prepare(DataSet(data), int(seed), options, out_dir)
    os.chdir(checkout)
    sys.argv = [script, *(f"--{name}={value}" for name, value in options.items())]
    runpy.run_path(script, run_name="__main__")


def log_what_is_printed(kind: str, path: Path, options: dict[str, str]) -> None:
    """Write the printed steps and evaluations to `path` in the format of train.py's metrics."""
    real, file = builtins.print, open(path, "a", encoding="utf-8")
    tokens = int(options.get("total-batch-size", 0))
    if kind == "nanogpt":
        sizes = ("batch_size", "gradient_accumulation_steps", "block_size")
        tokens = math.prod(int(options[name]) for name in sizes)

    def show(*values: Any, **how: Any) -> None:
        real(*values, **how)
        text = " ".join(map(str, values))
        found = re.match(STEP[kind], text) or re.match(EVALUATION[kind], text)
        if not found:
            return
        entry: dict[str, Any] = {name: float(value) for name, value in found.groupdict().items()}
        entry["iter"] = int(entry["iter"])
        if "ms" in entry:
            entry["tokens_per_s"] = tokens / entry["ms"] * 1e3
            if torch.cuda.is_available():
                entry["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        file.write(json.dumps(entry) + "\n")
        file.flush()

    builtins.print = show


def use_seed(seed: int) -> None:
    """Override the seed: both scripts hard-code it."""
    for module in (torch, torch.cuda):
        real = module.manual_seed
        module.manual_seed = lambda _, real=real: real(seed)


def prepare_nanogpt(data: DataSet, seed: int, options: dict[str, str], out_dir: str) -> str:
    """Replace torch.randint, which its get_batch calls for the window offsets. The vocabulary size
    comes from meta.pkl, so make a folder with that file and links to the token files."""
    if data.dtype != "uint16":
        raise SystemExit(f"nanoGPT reads only uint16 tokens, but {data.folder} has {data.dtype}")
    folder = Path(out_dir, "data")
    folder.mkdir()
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.padded_vocab_size}))
    for name in ("train.bin", "val.bin"):
        (folder / name).symlink_to((data.folder / name).resolve())
    options["dataset"] = str(folder)
    batch_size, windows = int(options["batch_size"]), int(options["eval_iters"])
    block_size = int(options["block_size"])
    train, val = data.open(block_size, data.padded_vocab_size)
    accumulation = int(options["gradient_accumulation_steps"])
    loader = DataLoader(train, batch_size, accumulation, seed)
    evaluated = torch.from_numpy(even_starts(val, windows * batch_size)).view(windows, batch_size)
    real, drawn, of_evaluation = torch.randint, itertools.count(), itertools.cycle(evaluated)

    def randint(*size: Any, **how: Any) -> torch.Tensor:
        frame = sys._getframe(1)
        if frame.f_code.co_name != "get_batch":
            return real(*size, **how)
        if frame.f_back.f_code.co_name != "estimate_loss":
            return torch.from_numpy(loader.starts(*divmod(next(drawn), accumulation)))
        if frame.f_locals["split"] == "train":  # not used here
            return torch.zeros(batch_size, dtype=torch.int64)
        return next(of_evaluation)

    torch.randint = randint
    torch.save = lambda *_: None
    return "train.py"


def prepare_nanochat(data: DataSet, seed: int, options: dict[str, str], out_dir: str) -> str:
    """Replace its data loader, which packs text into rows, by one that returns our tokens."""
    batch_size, block_size = int(options["device-batch-size"]), int(options["max-seq-len"])
    windows = int(options["eval-tokens"]) // block_size
    train, val = data.open(block_size, data.padded_vocab_size)
    accumulation = int(options["total-batch-size"]) // (batch_size * block_size)

    def batches(_: Any, B: int, T: int, split: str, device: Any, **__: Any) -> Iterator[Any]:
        process = Process(device=torch.device(device))
        if split == "train":
            loader = DataLoader(train, batch_size, accumulation, seed, process)
            for tokens, targets in loader.micro_batches(0):
                yield tokens, targets, {"epoch": 0, "pq_idx": 0, "rg_idx": 0}
        for tokens, targets, _ in eval_batches(val, batch_size, windows, process):
            yield tokens, targets

    @torch.no_grad()
    def evaluate(model: Any, batches: Iterator[Any], steps: int, _: Any) -> float:
        """The mean loss in nats per token (printed as bits per byte)."""
        return sum(model(*next(batches)).item() for _ in range(steps)) / steps

    class Tokenizer:
        def get_vocab_size(self) -> int:
            return data.vocab_size

    nothing = lambda *_, **__: None  # noqa: E731
    replaced = {
        "wandb": {},
        "nanochat.dataloader": {
            "tokenizing_distributed_data_loader_bos_bestfit": batches,
            "tokenizing_distributed_data_loader_with_state_bos_bestfit": batches,
        },
        "nanochat.tokenizer": {"get_tokenizer": Tokenizer, "get_token_bytes": nothing},
        "nanochat.checkpoint_manager": {"save_checkpoint": nothing, "load_checkpoint": nothing},
        "nanochat.loss_eval": {"evaluate_bpb": evaluate},
        "nanochat.engine": {"Engine": nothing},
        "scripts.base_eval": {"evaluate_core": nothing},
    }
    for name, contents in replaced.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    os.environ["NANOCHAT_BASE_DIR"] = out_dir
    return "scripts/base_train.py"


main()
