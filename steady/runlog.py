"""Logs a run's metrics to the terminal, to `metrics.jsonl` in its folder, and to wandb if asked."""

import contextlib
import json
import math
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from configurator import architecture_note, read_settings
from steady import UserError, hardware, output
from steady.distributed import Process
from steady.folder import atomic_write, hold_lock, require_file
from steady.optim import schedule_note


class RunLog:
    """Prints lines and a progress bar, and writes one JSON object per entry to metrics.jsonl.

    With eval_only, metrics.jsonl stays unchanged. With `quiet` (all processes but the first),
    nothing is printed or written. Once a RunLog exists, printing never fails (see output.py).
    On resume, entries from `start_iter` on (logged after the checkpoint was saved) are dropped, so
    that each iteration has one entry, however often a run is stopped.
    """

    def __init__(self, out_dir: Path, config: dict[str, Any], start_iter: int, quiet: bool = False):
        output.survive_closed_streams()
        self.path, self.quiet = out_dir / "metrics.jsonl", quiet
        self.keeps_metrics = not (quiet or config.get("eval_only"))
        self.lost = False  # whether the last entry could not be written, or only a part of it
        self.began = time.monotonic()
        if self.keeps_metrics:
            # a run evaluates at its end; extending it repeats that evaluation only if one is due
            interval = config.get("eval_interval", 0)
            due = interval and (start_iter % interval == 0 or start_iter >= config["max_iters"])
            kept = [
                entry for entry in read_metrics(self.path)
                if entry["iter"] < start_iter
                or not due and entry["iter"] == start_iter and "val_loss" in entry
            ]  # fmt: skip
            with atomic_write(self.path) as file:
                file.write("".join(json.dumps(e) + "\n" for e in kept).encode())
        self.bar = self.wandb = None
        if quiet:
            return
        if sys.stdout.isatty():
            with contextlib.suppress(ImportError):  # without tqdm, print plain lines
                from tqdm import tqdm

                self.bar = tqdm(
                    total=config["max_iters"], initial=start_iter, unit="it", dynamic_ncols=True
                )
        if config.get("wandb_log"):
            self.wandb = self.try_wandb("did not start", start_wandb, out_dir, config)

    def try_wandb(self, failed: str, function: Callable, *inputs: Any, **named: Any) -> Any:
        """Call a function of wandb's. If it fails, print a warning and do without wandb."""
        try:
            return function(*inputs, **named)
        except Exception as error:
            self.line(f"warning: wandb {failed} ({type(error).__name__}: {error})")
            self.wandb = None

    def line(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self.bar is not None:
            self.bar.write(text)
        elif not self.quiet:
            print(text, flush=True)

    def settings(self, config: dict[str, Any], asked: dict[str, Any], script: str | Path) -> None:
        """Print the settings that differ from the defaults of `script`; checkpoints store all.
        asked: the settings as given. A note names those that a loaded architecture overrides."""
        shown, defaults = [], read_settings(script)
        for name, value in asked.items():
            default = defaults[name].default if name in defaults else None  # computed by a function
            # 0 may mean "choose automatically"; other lines report the choice
            derived = type(default) is int and default == value == 0
            if config[name] != default and not derived:
                shown.append(f"{name}={config[name]}")
        text = "settings that differ from the defaults: " + (", ".join(shown) or "none")
        self.line(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False))
        from model import GPTConfig  # here: model.py may import this file

        for note in architecture_note(asked, config, GPTConfig), schedule_note(config):
            if note:
                self.line(note)

    def start_clock(
        self, iter_num: int, tokens_per_iter: int, flops_per_token: int, process: Process
    ) -> None:
        """Start timing the training loop, which runs on the devices of `process`."""
        self.tokens_per_iter, self.process, self.start_iter = tokens_per_iter, process, iter_num
        self.flops_per_iter = flops_per_token * tokens_per_iter
        self.peak_flops = hardware.peak_flops(process.device, process.dtype, process.world_size)
        self.first_iter = iter_num  # of the next log line
        self.timed_from = self.paused_at = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time of this `with` block is not training time. Such blocks may contain others."""
        self.paused_at, timed_from = time.perf_counter(), self.timed_from
        began = self.paused_at
        yield
        self.timed_from = timed_from + time.perf_counter() - began

    def step(self, iter_num: int, loss: float, lr: float, grad_norm: float) -> None:
        """Log a training step; times are means over the iterations since the last call."""
        memory_gib = hardware.peak_memory_gib(self.process.device)
        now = time.perf_counter()
        seconds = max(now - self.timed_from, 1e-9) / max(1, iter_num + 1 - self.first_iter)
        # the first steps after a resume may include compilation
        early = self.start_iter and self.first_iter < self.start_iter + 3
        self.timed_from, self.first_iter = now, iter_num + 1
        mfu = self.flops_per_iter / seconds / self.peak_flops if self.peak_flops else None
        ms, tokens_per_s = seconds * 1e3, self.tokens_per_iter / seconds
        line = f"iter {iter_num:6d} | loss {loss:7.4f} | lr {lr:.2e} | norm {grad_norm:6.2f} | "
        line += f"{ms:8.1f} ms | {tokens_per_s:9,.0f} tokens/s"
        if mfu is not None:
            line += f" | mfu {mfu:6.1%}"
        if memory_gib is not None:
            line += f" | {memory_gib:6.2f} GiB"
        self.line(line)
        if self.bar is not None:
            memory = f", {memory_gib:.1f} GiB" if memory_gib is not None else ""
            self.bar.set_postfix_str(f"loss {loss:.4f}{memory}", refresh=False)
            self.bar.update(iter_num + 1 - self.bar.n)
        resumed = {"resumed": True} if early else {}
        self.write({
            "iter": iter_num, "loss": loss, "lr": lr, "grad_norm": grad_norm, "ms": ms,
            "tokens_per_s": tokens_per_s, "mfu": mfu, "memory_gib": memory_gib,
        } | resumed)  # fmt: skip

    def waiting(self, batches: Iterable, n_batches: float, what: str) -> Iterable:
        """`batches`, with a progress bar if they take long."""
        return output.waiting(batches, math.ceil(n_batches), what, self.quiet, unit="batch")

    def evaluation(self, entry: dict[str, Any], best: bool) -> None:
        """Log an evaluation, which has taken the time since `paused` began. `entry` has
        `iter` and losses by name; `val_bpb` is bits per byte of validation text."""
        seconds = time.perf_counter() - self.paused_at
        losses = [
            f"{name.replace('_', ' ')} {value:7.4f}" for name, value in entry.items()
            if isinstance(value, float) or getattr(value, "ndim", None) == 0
        ]  # fmt: skip
        parts = [f"iter {entry['iter']:6d}", *losses, f"{seconds:5.1f} s"]
        self.line(" | ".join(parts + ["best so far"] * best))
        self.write(entry)

    def write(self, entry: dict[str, Any]) -> None:
        entry = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in entry.items()}
        for key, value in entry.items():
            if isinstance(value, float) and not math.isfinite(value):
                entry[key] = None  # JSON has no infinity
        if self.keeps_metrics:
            try:
                hold_lock(self.path.parent)
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write("\n" * self.lost + json.dumps(entry) + "\n")
                self.lost = False
            except (OSError, UserError) as error:  # such as a full disk: no reason to stop
                if not self.lost:
                    self.line(f"warning: {self.path} is incomplete: {error}")
                self.lost = True
        if self.wandb is not None:
            self.try_wandb("stopped logging", self.wandb.log, entry, step=entry.get("iter"))

    def summary(self, iter_num: int, tokens: int, best_val_loss: float, best_path: Path) -> str:
        """The results of a finished run, and the command that samples from it.

        tokens: the number seen since training began, including the runs that this one resumed.
        """
        taken = timedelta(seconds=round(time.monotonic() - self.began))
        line = f"finished at iteration {iter_num}: {tokens:,} tokens seen, this run took {taken}"
        if math.isfinite(best_val_loss):
            line += f", best val loss {best_val_loss:.4f}"
            if best_path.exists():
                line += f" in {best_path}"
        script = str(Path(sys.argv[0]).with_name("sample.py"))
        sample = shlex.join(["python", script, f"--out_dir={self.path.parent}"])
        return f"{line}\nto see samples:\n  {sample}"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            self.try_wandb("failed to finish", self.wandb.finish)


def start_wandb(out_dir: Path, config: dict[str, Any]) -> Any:
    """Start the wandb run, or continue it on resume."""
    import wandb

    id_file = out_dir / "wandb_id"
    resumed = config["init_from"] == "resume" and id_file.exists()
    if (out_dir / "wandb").is_symlink():
        raise UserError(f"{out_dir / 'wandb'} is a symbolic link (not followed)")
    run = wandb.init(
        project=config.get("wandb_project"),
        name=config.get("wandb_run_name"),
        config=config,
        dir=out_dir,
        id=id_file.read_text(encoding="utf-8") if resumed else None,
        resume="allow",
    )
    with atomic_write(id_file) as file:
        file.write(run.id.encode())
    return run


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl. Skips lines that are not entries."""
    return [
        entry for entry in read_json_lines(path)
        if type(entry.get("iter")) is int and 0 <= entry["iter"] < 2**24
    ]  # fmt: skip


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file. Skips lines that a crash or a full disk cut short."""
    entries = []
    require_file(path)
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    entries.append(entry)
    return entries


def training_clock(entries: list[dict[str, Any]]) -> tuple[list[float], list[int]]:
    """The training time (in seconds) and the tokens before each iteration of a metrics.jsonl.

    A step's time does not include evaluation. Some times are misleading and are replaced by the
    median: entries with one of the first three steps, also after a resume, may include compilation;
    a step after an evaluation seems too short, because the evaluation waited for the previous
    step's optimizer.
    """
    ms: list[float] = []
    tokens: list[int] = []
    unsure: set[int] = set()
    for entry in entries:
        if entry.keys() >= {"ms", "tokens_per_s"}:  # a step
            since = entry["iter"] + 1 - len(ms)  # an entry covers all steps since the one before
            if len(ms) < 3 or "resumed" in entry:
                unsure |= {*range(len(ms), len(ms) + since)}
            ms += [entry["ms"]] * since
            tokens += [round(entry["tokens_per_s"] * entry["ms"] / 1e3)] * since
    missing = max((entry["iter"] for entry in entries), default=0) - len(ms)  # not logged yet
    ms += (ms[-1:] or [0.0]) * missing
    tokens += (tokens[-1:] or [0]) * missing
    unsure |= {entry["iter"] for entry in entries if "val_loss" in entry}
    usual = statistics.median(ms or [0.0])
    ms = [usual if i in unsure else value for i, value in enumerate(ms)]
    seconds = accumulate((value / 1e3 for value in ms), initial=0.0)
    return list(seconds), list(accumulate(tokens, initial=0))
