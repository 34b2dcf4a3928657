"""How a run ends: on a signal (Ctrl-C, SIGTERM, a lost terminal), a loss that is not finite, or an
error. The code here saves the state and prints the command that resumes the run."""

import math
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configurator import one_line_errors
from steady import UserError, checkpoint, distributed, memory, output
from steady.distributed import Process
from steady.folder import still_held

# Warn, and end the run, after this many steps in a row with gradients that are not finite.
# float16 starts with a few such steps, while GradScaler halves its scale.
WARN_SKIPPED, MAX_SKIPPED = 20, 100
PARENT = os.getppid()  # torchrun, unless it started a shell


class Diverged(UserError):
    """A loss or gradients that are not finite: the state is not worth saving."""


def on_signals(names: Sequence[str], handler: Callable) -> None:
    """Install `handler` for those of these signals that the system has (Windows has few). Under
    nohup, SIGHUP stays ignored."""
    for name in names:
        signum = getattr(signal, name, None)
        if signum and (name != "SIGHUP" or signal.getsignal(signum) != signal.SIG_IGN):
            signal.signal(signum, handler)


class StopRequest:
    """Records the first signal. The run then finishes its step or leaves its evaluation, and saves.
    Before `training` is set there is nothing to save, and a signal ends the process at once.
    (Default handlers would not: Linux ignores such signals for a container's first process.)

    A second Ctrl-C ends a run with a single process at once. (torchrun forwards one Ctrl-C several
    times.) Other repeated signals are ignored: a wrapper may send SIGTERM twice, or with SIGINT.
    With `saves=False` signals keep their default effect and end the run.
    """

    def __init__(self, process: Process, saves: bool = True):
        self.received, self.training, self.process = False, False, process
        self.pid = os.getpid()
        if saves:
            names = "SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2"
            on_signals(names, self.receive)

    def stop_requested(self) -> bool:
        """Whether any process has received a signal, or its torchrun has died (of SIGUSR1, for
        example, which it does not forward). All processes must call it (an all-reduce)."""
        orphaned = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT
        return distributed.any_process(self.received or orphaned)

    def receive(self, signum: int, frame: object) -> None:
        if signum == signal.SIGINT and os.getpid() != self.pid:  # a worker of torch's DataLoader
            return
        first, self.received = not self.received, True
        if not self.training:
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
        typed = first and signum == signal.SIGINT and self.process.world_size == 1
        # the next Ctrl-C must not raise here: that could deadlock the reader thread
        signal.signal(signal.SIGINT, signal.SIG_DFL if typed else self.receive)
        if first and self.process.master:  # the signal may have interrupted a print
            again = b"; Ctrl-C again stops at once" if typed else b""
            output.SafeStream(1, 2).write(b"\nstopping and saving" + again + b"\n")


@dataclass
class Saving:
    """Wraps the training loop. However the loop ends, this saves the state, unless the loss or the
    gradients are not finite, and prints how to resume. When a run ends without an error, all
    processes but the first exit here.

    With ddp every process holds the full state, so the one with the error saves it without any
    communication. With fsdp no process holds it, and an error saves nothing.
    """

    path: Path  # the checkpoint file
    state: Callable[[], dict[str, Any]]  # returns the content of the checkpoint
    process: Process
    enabled: bool  # False for a run that saves nothing
    less_memory: str  # the flags for a step that needs less memory, "" if there are none
    say: Callable[[str], None]  # prints a line
    stop_request: StopRequest
    steps: int = 0  # taken since the start
    first_iter: Any = None  # the state's iteration at the start
    skipped: float | torch.Tensor = 0.0  # steps in a row without finite gradients
    checked: float = 0.0  # `skipped` at the last check

    def __enter__(self) -> "Saving":
        self.stop_request.training = True  # before, a signal ends the run at once
        distributed.set_timeout()
        if self.enabled:  # now, and not when the first save fails
            content = checkpoint.as_saved(self.state())
            if own := {"format", "launch", "model_code"} & content.keys():
                raise UserError(f"checkpoints have their own {min(own)!r}: rename yours")
            checkpoint.require_plain(content, self.path)
            self.first_iter = content.get("iter_num")
            keys = checkpoint.lacking(checkpoint.OPTIONAL | content, checkpoint.EVERYTHING)
            if keys:
                self.say(f"note: {self.path} cannot be resumed: it lacks a valid {', '.join(keys)}")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        ends = error is None or isinstance(error, SystemExit)  # your own exit()
        if not ends:
            self.rescue(error, trace)
        elif self.enabled:
            state = self.state()
            iter_num = state.get("iter_num", math.inf)  # your state may lack it
            if self.steps and iter_num == self.first_iter and type(iter_num) is int:
                count = f"the state has iteration {iter_num} after {self.steps} steps"
                self.say(
                    f"warning: {count}: if your loop is in a function, it needs global iter_num"
                )
            # False if a signal stopped the run
            finished = iter_num >= state.get("config", {}).get("max_iters", 0)
            # only the first process looks: another machine may not have the file
            other = self.process.master and (
                not still_held(self.path.parent)  # the file is another run's
                or checkpoint.peek(self.path, "iter_num") != iter_num
            )
            if distributed.any_process(other) and not checkpoint.try_save(
                self.path, state, self.process, self.say, read_back=finished
            ):
                distributed.stop(self.process)
                raise SystemExit(f"error: could not save the checkpoint of iteration {iter_num}")
        if ends:
            distributed.stop(self.process)

    def count_skipped(self, grad_norm: torch.Tensor | float) -> torch.Tensor:
        """The number of steps in a row whose gradients were not finite, this one included (scalar,
        on the device). Call it once per step."""
        self.steps += 1
        self.skipped = (self.skipped + 1) * ~torch.as_tensor(grad_norm).isfinite()
        return self.skipped

    def require_finite(
        self, losses: dict[str, float], iter_num: int, skipped: float | None = None
    ) -> None:
        """Raises Diverged if a loss is NaN or infinite, or if the gradients of too many steps in a
        row were not finite.

        losses: by name. Metrics of your own, whose names do not end in "loss", may be infinite.
        skipped: the number of steps in a row skipped for that reason; None if unknown.
        """
        kept = f"{self.path} is kept: resume from it" if self.path.exists() else "start over"
        remedy = f"{kept} with a lower learning_rate"
        if not iter_num and not self.path.exists():  # before any step
            remedy = "look for the cause in model.py's forward pass or initial weights"
        if self.process.dtype == torch.float16:
            remedy += ", or use dtype=bfloat16"
        if not all(math.isfinite(x) for name, x in losses.items() if name.endswith("loss")):
            found = " and ".join(f"{name} {loss}" for name, loss in losses.items())
            raise Diverged(f"{found} at iteration {iter_num}: not finite; {remedy}")
        if skipped is None:
            return
        nothing = f"gradients of {skipped:.0f} steps in a row, up to iteration {iter_num}, were "
        nothing += "not finite: these steps were skipped"
        if skipped >= MAX_SKIPPED:
            raise Diverged(f"{nothing}; {remedy}")
        if skipped >= WARN_SKIPPED > self.checked:
            self.say(f"warning: {nothing}; the run ends after {MAX_SKIPPED} in a row")
        self.checked = skipped

    def rescue(self, error: BaseException, trace: Any) -> None:
        """Save after an error. The line about the save appears below Python's own report of the
        error."""
        process, flags, happened = self.process, "", ""
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        in_step = any(isinstance(f.f_locals.get("self"), torch.optim.Optimizer) for f in frames)
        if memory.is_out_of_memory(error):
            flags, happened = self.less_memory, "error: out of memory"
            traceback.clear_frames(trace)  # they may hold the memory that saving needs
        elif process.world_size > 1 and distributed.is_peer_failure(error):
            happened = "error: another process has ended or hangs"
        lines = [happened or "stopped by the error above"]
        if self.enabled and not isinstance(error, Diverged | KeyboardInterrupt):
            lines.append(self.save(in_step))
            if self.path.is_file():
                command = resume_command(self.path.parent, flags.split())
                lines.append(f"to resume: {command}")
        elif flags:
            lines.append(f"use {flags}")
        rank = "" if process.master else f"rank {process.rank}: "

        def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if not happened:
                one_line_errors(kind, error, trace)
            if happened or len(lines) > 1:
                print(rank + "; ".join(lines), file=sys.stderr, flush=True)
            if process.world_size > 1:
                distributed.exit_now(1)

        sys.excepthook = report

    def save(self, in_step: bool) -> str:
        """Save the state if possible; returns a description of the result."""
        if in_step:  # the weights do not match the iteration
            return "the state was not saved: the error came in the middle of an optimizer step"
        if self.process.shards_model:
            return "the state was not saved: it is sharded across the processes"
        try:
            state = self.state()
            checkpoint.save(self.path, state)
            return f"saved {self.path} at iteration {state.get('iter_num')}"
        except Exception as error:
            reason = str(error).partition("\n")[0]
            return f"{self.path} was not saved ({type(error).__name__}: {reason})"


def stop_message(iter_num: int, path: Path) -> str:
    """The last lines of a run that a signal has stopped: the checkpoint and the command that
    resumes. Ignores further signals: there is nothing left to stop."""
    on_signals(("SIGINT", "SIGTERM"), signal.SIG_IGN)  # Python resets functions when it ends
    command = resume_command(path.parent)
    return f"stopped at iteration {iter_num}, saved {path}; to resume:\n  {command}"


def resume_command(out_dir: Path, flags: Sequence[str] = ()) -> str:
    """The command that resumes this run, with `flags` added or replaced."""
    again = [f"--out_dir={out_dir}", *flags, "--init_from=resume"]  # a config may compute out_dir
    names = {flag.partition("=")[0] for flag in again}
    command = [argument for argument in sys.argv[1:] if argument.partition("=")[0] not in names]
    return shlex.join([*distributed.launcher(), sys.argv[0], *command, *again])
