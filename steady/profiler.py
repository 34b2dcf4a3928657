"""`--profile=True` writes a trace that shows where a step's time goes."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

FIRST_STEP, STEPS = 5, 3  # steps traced, after compilation and warm-up


class Profiler:
    """Writes `trace.json` (for ui.perfetto.dev or chrome://tracing) to `out_dir` after a few steps;
    does nothing unless `enabled`.

    iterations: the number of iterations in this run.
    """

    def __init__(self, out_dir: Path, enabled: bool, iterations: int, say: Callable[[str], None]):
        self.path, self.say, self.steps, self.trace = out_dir / "trace.json", say, 0, None
        if not enabled:
            return
        if iterations < FIRST_STEP + STEPS:
            say(f"note: --profile writes its trace after {FIRST_STEP + STEPS} iterations, but this "
                f"run has {iterations}")  # fmt: skip
        self.trace = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=FIRST_STEP - 1, warmup=1, active=STEPS, repeat=1),
            acc_events=True,  # else torch < 2.13 warns about a second cycle (pytorch#180348)
            on_trace_ready=self.write,
        )
        self.trace.start()

    def write(self, profile: torch.profiler.profile) -> None:
        """Write to a new folder first: torch makes up a temporary name and would follow a link of
        that name (F82)."""
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=".trace-") as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            os.replace(f"{folder}/trace.json", self.path)

    def step(self) -> None:
        """Call after every iteration; prints a line when the file is written."""
        if self.trace is None:
            return
        self.steps += 1
        self.trace.step()
        if self.steps == FIRST_STEP + STEPS:
            self.trace.stop()
            self.trace = None
            self.say(f"wrote {self.path} (open it at ui.perfetto.dev)")
