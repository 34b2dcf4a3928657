"""`--profile=True` writes a trace that shows where a step's time goes."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def start_profiler(out_dir: Path, enabled: bool, say: Callable[[str], None]) -> Any:
    """Call `step()` of the result after every iteration. If `enabled`, this traces iterations 6 to
    8 of this run, after compilation and warm-up, to `trace.json` (for ui.perfetto.dev or
    chrome://tracing)."""
    if not enabled:
        return SimpleNamespace(step=lambda: None)
    path = out_dir / "trace.json"

    def write(profile: torch.profiler.profile) -> None:
        # in a new folder: torch makes up a temporary name, and would follow a link there (F82)
        with tempfile.TemporaryDirectory(dir=out_dir, prefix=".trace-") as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            os.replace(f"{folder}/trace.json", path)
        say(f"wrote {path} (open it at ui.perfetto.dev)")

    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=4, warmup=1, active=3, repeat=1),
        acc_events=True,  # else torch < 2.13 warns about a second cycle (pytorch#180348)
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
