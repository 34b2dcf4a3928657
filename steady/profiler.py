"""`--profile=True` and `--memory_snapshot=True`: files that show where time and memory go."""

from collections.abc import Callable
from pathlib import Path

import torch

FIRST_STEP, STEPS = 5, 3  # steps traced, after compilation and warm-up


class Profiler:
    """Writes `trace.json` (for ui.perfetto.dev or chrome://tracing) and `memory.pickle`
    (for pytorch.org/memory_viz) to `out_dir` after a few steps; does nothing if neither is asked.

    master: whether this process does so. iterations: how many this run has.
    """

    def __init__(
        self,
        out_dir: Path,
        master: bool,
        trace: bool,
        memory: bool,
        iterations: int,
        say: Callable[[str], None],
    ):
        trace, memory = trace and master, memory and master
        self.say = say
        self.out_dir, self.trace, self.memory, self.steps = out_dir, None, memory, 0
        if (trace or memory) and iterations < FIRST_STEP + STEPS:
            say(
                f"note: profile and memory_snapshot write after {FIRST_STEP + STEPS} iterations, "
                f"but this run has {iterations}"
            )
        if memory:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        if trace:
            self.trace = torch.profiler.profile(
                schedule=torch.profiler.schedule(
                    wait=FIRST_STEP - 1, warmup=1, active=STEPS, repeat=1
                ),
                acc_events=True,  # or torch before 2.13 warns of a second cycle (pytorch#180348)
                on_trace_ready=lambda p: p.export_chrome_trace(str(out_dir / "trace.json")),
            )
            self.trace.start()

    def step(self) -> None:
        """Call after every iteration; says what was written once it is."""
        self.steps += 1
        if self.trace is not None:
            self.trace.step()
        if self.steps == FIRST_STEP + STEPS:
            if self.trace is not None:
                self.trace.stop()
                self.trace = None
                self.say(f"wrote {self.out_dir / 'trace.json'} (open it at ui.perfetto.dev)")
            if self.memory:
                path = self.out_dir / "memory.pickle"
                torch.cuda.memory._dump_snapshot(str(path))
                torch.cuda.memory._record_memory_history(enabled=None)
                self.say(f"wrote {path} (open it at pytorch.org/memory_viz)")
