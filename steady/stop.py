"""Reasons to end a run early: signals (Ctrl-C, SIGTERM, the loss of its terminal), a loss that is
not finite, errors; what is saved then, and the command that goes on from there."""

import math
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from steady import checkpoint, memory, output
from steady.distributed import any_process, gather_full, launcher, leave, peer_has_ended
from steady.memory import Split, StepShape

import torch

from configurator import is_computed, one_line_errors

# Steps in a row with gradients that are not finite: after how many to say so, and to end the run.
# float16 begins with a few of them, while GradScaler halves its factor.
SKIPPED_LONG, SKIPPED_TOO_LONG = 20, 100


def on_signals(names: Sequence[str], handler: Callable) -> None:
    """Have `handler` called at these signals, as far as the system has them (Windows knows few);
    SIGHUP stays ignored under nohup."""
    for name in names:
        signum = getattr(signal, name, None)
        if signum and (name != "SIGHUP" or signal.getsignal(signum) != signal.SIG_IGN):
            signal.signal(signum, handler)


class StopRequest:
    """`received` becomes true at the first signal; the run then finishes its step, or leaves its
    evaluation to the run that goes on, and saves.

    The same one again, if it is Ctrl-C or SIGTERM, ends it at once, but only with `alone`, since
    torchrun passes one on several times. A lost terminal (SIGHUP), a limit of CPU time and what
    batch systems send as a warning (SIGUSR1, SIGUSR2) may come several times, so these never end it
    at once. With `saves=False` signals do what they always do: they end the run.
    """

    def __init__(self, alone: bool, announce: bool, saves: bool = True):
        self.received, self.alone, self.announce = False, alone, announce
        if saves:
            names = "SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2"
            on_signals(names, self.request)

    def asked(self) -> bool:
        """Whether any process has received a signal. All must call it, for they exchange that."""
        return any_process(self.received)

    def request(self, signum: int, frame: object) -> None:
        self.received = True
        once_more_counts = self.alone and signum in (signal.SIGINT, signal.SIGTERM)
        # By the system: an exception in the midst of something can leave a lock taken, for which
        # the thread that reads data waits for ever, and Python at its end for that thread.
        signal.signal(signum, signal.SIG_DFL if once_more_counts else signal.SIG_IGN)
        if self.announce:  # not by print, which the signal may have interrupted
            again = b"; once more stops at once" if once_more_counts else b""
            output.write((1, 2), b"\nstopping and saving" + again + b"\n")


class Rescue:
    """From here on an error that ends the run saves its state, if that is whole, and a line says
    what happened, what was saved, and how to go on.

    The loop sets `whole` to False while weights, optimizer and iteration do not belong together.
    With ddp every process holds all of the state, so the one with the error saves it, and exchanges
    nothing; with fsdp none does.
    """

    def __init__(
        self,
        path: Path,
        state: Callable[[], dict[str, Any]],
        step: StepShape,
        split: Split,
        say: Callable[[str], None],
    ):
        self.path, self.state, self.step, self.split, self.say = path, state, step, split, say
        self.whole, self.diverged, self.skipped = True, False, 0.0
        sys.excepthook = self.end

    def require_finite(
        self, losses: dict[str, float], iter_num: int, skipped: float | None = None
    ) -> None:
        """Raises ValueError for a loss that is NaN or infinite, before the run is saved over a good
        checkpoint; and where the gradients have not been finite for so long that they never will.

        skipped: steps in a row that changed nothing for that reason, None if not known.
        """
        remedy = "nothing was saved yet: begin again with a lower learning_rate"
        if self.path.exists():
            remedy = f"{self.path} is kept: go on from there with a lower learning_rate"
        if iter_num == 0:  # no step has been taken
            remedy = "the weights that it begins with are damaged: begin again with others"
        if self.step.dtype == torch.float16:
            remedy += ", or with dtype=bfloat16"
        if not all(map(math.isfinite, losses.values())):
            self.diverged = True
            found = " and ".join(f"{name} {loss}" for name, loss in losses.items())
            raise ValueError(f"{found} at iteration {iter_num}: not finite; {remedy}")
        if skipped is None:
            return
        nothing = f"gradients of {skipped:.0f} steps in a row, up to iteration {iter_num}, were "
        nothing += "not finite: these steps changed nothing"
        if skipped >= SKIPPED_TOO_LONG:
            self.diverged = True
            raise ValueError(f"{nothing}; {remedy}")
        if skipped >= SKIPPED_LONG > self.skipped:
            self.say(f"warning: {nothing}; the run ends if {SKIPPED_TOO_LONG} do")
        self.skipped = skipped

    def end(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Called by Python for an exception that nobody has caught."""
        here, flags, happened = self.step.here, [], ""
        if memory.is_out_of_memory(error):
            flags, happened = memory.flags_for_less(self.step, self.split), "out of memory"
            traceback.clear_frames(trace)  # what they hold may be what saving lacks
        elif here.world_size > 1 and peer_has_ended(error):
            happened = "another process has ended"
        else:
            one_line_errors(kind, error, trace)
        rank = "" if here.rank == 0 else f"rank {here.rank}: "
        if self.step.eval_only:  # there is nothing to save
            if happened:
                advice = f": use {' '.join(flags)}" if flags else ""
                print(f"{rank}error: {happened}{advice}", file=sys.stderr, flush=True)
        elif not self.diverged and kind is not KeyboardInterrupt:
            happened = f"error: {happened}" if happened else "stopped by the error above"
            saved, go_on = self.save(), "nothing to go on from"
            if self.path.is_file():
                go_on = f"to go on: {how_to_go_on(self.path.parent, flags)}"
            print(f"{rank}{happened}; {saved}; {go_on}", file=sys.stderr, flush=True)
        if here.world_size > 1:
            leave(1)

    def save(self) -> str:
        """Save what can be saved; returns what became of it."""
        if not self.whole:
            return "the state in the middle of an optimizer step was not saved"
        if self.step.here.shards_model:
            return "the state, divided among the processes, was not saved"
        try:
            state = gather_full(self.state())  # nothing is exchanged: nothing is sharded
            checkpoint.save(self.path, state)
            return f"saved {self.path} at iteration {state['iter_num']}"
        except Exception as error:
            reason = f"{type(error).__name__}: {checkpoint.what_failed(error)}"
            return f"{self.path} was not saved ({reason})"


def stopped(iter_num: int, path: Path) -> str:
    """The last lines of a run that a signal has stopped: where it was saved, how to go on. Another
    signal has nothing to stop from here on."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    go_on = how_to_go_on(path.parent)
    return f"stopped at iteration {iter_num}, saved {path}; to go on:\n  {go_on}"


def how_to_go_on(out_dir: Path, flags: Sequence[str] = ()) -> str:
    """The command that resumes the run of this process, with other `flags`."""
    again = [*flags, "--init_from=resume"]
    if is_computed(str(out_dir)):  # a name with the time in it, perhaps
        again.insert(0, f"--out_dir={out_dir}")
    names = {flag.partition("=")[0] for flag in again}
    command = [argument for argument in sys.argv[1:] if argument.partition("=")[0] not in names]
    return shlex.join([*launcher(), sys.argv[0], *command, *again])
