"""Where a run's numbers go: the terminal, `metrics.jsonl` in its folder, and wandb if asked."""

import contextlib
import json
import math
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from steady import output


class RunLog:
    """Lines and a progress bar on the terminal, one JSON object per entry in metrics.jsonl.

    With eval_only, metrics.jsonl stays as it is. With `quiet` (all processes of a run but the
    first) nothing is shown or written.
    From its creation on, printing never fails (see output.py).
    On resume, entries from `start_iter` on (made after the checkpoint was saved) are dropped, so
    that there is one entry per iteration however often a run is stopped.
    """

    def __init__(self, out_dir: Path, config: dict[str, Any], start_iter: int, quiet: bool = False):
        output.outlive_readers()
        self.path, self.quiet = out_dir / "metrics.jsonl", quiet
        self.keeps_metrics = not (quiet or config["eval_only"])
        self.missed_metrics = False
        if self.keeps_metrics:
            kept = [entry for entry in read_metrics(self.path) if entry["iter"] < start_iter]
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(e) + "\n" for e in kept), encoding="utf-8")
            os.replace(temporary, self.path)
        self.bar = self.wandb = None
        if quiet:
            return
        if sys.stdout.isatty():
            try:
                from tqdm import tqdm

                self.bar = tqdm(
                    total=config["max_iters"], initial=start_iter, unit="it", dynamic_ncols=True
                )
            except ImportError:
                pass  # plain lines do
        if config["wandb_log"]:
            self.wandb = self.start_wandb(out_dir, config)

    def start_wandb(self, out_dir: Path, config: dict[str, Any]) -> Any:
        """The wandb run, the same one after a resume; None if wandb fails, which stops nothing."""
        id_file = out_dir / "wandb_id"
        resumed = config["init_from"] == "resume" and id_file.exists()
        try:
            import wandb

            run = wandb.init(
                project=config["wandb_project"],
                name=config["wandb_run_name"],
                config=config,
                dir=out_dir,
                id=id_file.read_text(encoding="utf-8") if resumed else None,
                resume="allow",
            )
            id_file.write_text(run.id, encoding="utf-8")
            return run
        except Exception as error:
            self.line(f"warning: no wandb for this run ({type(error).__name__}: {error})")
            return None

    def line(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self.bar is not None:
            self.bar.write(text)
        elif not self.quiet:
            print(text, flush=True)

    def settings(self, config: dict[str, Any]) -> None:
        """Print all settings."""
        text = "settings " + ", ".join(f"{key}={value}" for key, value in config.items())
        self.line(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False))

    def start_clock(
        self,
        iter_num: int,
        tokens_per_iter: int,
        flops_per_token: int,
        peak_flops: float | None,
    ) -> None:
        """The loop begins. peak_flops: of all devices together in FLOP/s, None if not known."""
        self.tokens_per_iter = tokens_per_iter
        self.flops_per_iter, self.peak_flops = flops_per_token * tokens_per_iter, peak_flops
        self.restart_clock(iter_num)

    def restart_clock(self, iter_num: int) -> None:
        """What came before is not training time."""
        self.timed_from, self.timed_iter = time.perf_counter(), iter_num

    def step(
        self, iter_num: int, loss: float, lr: float, grad_norm: float, memory_gib: float | None
    ) -> None:
        """Log a training step; times are means over the iterations since the last call.

        memory_gib: the most GPU memory so far, None if not known.
        """
        seconds = (time.perf_counter() - self.timed_from) / (iter_num + 1 - self.timed_iter)
        self.restart_clock(iter_num + 1)
        mfu = self.flops_per_iter / seconds / self.peak_flops if self.peak_flops else None
        entry = {
            "iter": iter_num,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "ms": seconds * 1e3,
            "tokens_per_s": self.tokens_per_iter / seconds,
            "mfu": mfu,
            "memory_gib": memory_gib,
        }
        parts = [
            f"iter {iter_num:6d}",
            f"loss {loss:7.4f}",
            f"lr {lr:.2e}",
            f"norm {grad_norm:6.2f}",
            f"{entry['ms']:8.1f} ms",
            f"{entry['tokens_per_s']:9,.0f} tokens/s",
        ]
        if mfu is not None:
            parts.append(f"mfu {mfu:6.1%}")
        if memory_gib is not None:
            parts.append(f"{memory_gib:6.2f} GiB")
        self.line(" | ".join(parts))
        self.write(entry)

    def evaluation(self, entry: dict[str, Any], seconds: float, best: bool) -> None:
        """Log an evaluation: iter, train_loss and val_loss; how long it took, whether it is the
        best so far."""
        self.line(
            f"iter {entry['iter']:6d} | train loss {entry['train_loss']:7.4f} | "
            f"val loss {entry['val_loss']:7.4f} | {seconds:5.1f} s"
            + (" | best so far" if best else "")
        )
        self.write(entry)

    def write(self, entry: dict[str, Any]) -> None:
        entry = {  # JSON has no infinity
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in entry.items()
        }
        if self.keeps_metrics:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:  # a full disk, perhaps: no reason to stop training
                if not self.missed_metrics:
                    self.line(f"warning: {self.path} is not complete: {error}")
                self.missed_metrics = True
        if self.wandb is not None:
            try:
                self.wandb.log(entry, step=entry["iter"])
            except Exception as error:
                self.line(f"warning: wandb stopped logging ({type(error).__name__}: {error})")
                self.wandb = None

    def progress(self, iter_num: int) -> None:
        if self.bar is not None:
            self.bar.update(iter_num - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.wandb is not None:
            try:
                self.wandb.finish()
            except Exception as error:
                self.line(f"warning: wandb failed at its end ({type(error).__name__}: {error})")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl, without lines that a crash or a full disk cut short."""
    entries = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                entries.append(json.loads(line))
    return entries
