"""Reasons to end a run early: signals (Ctrl-C, SIGTERM, the loss of its terminal), a loss that is
not finite; and the command that goes on from there."""

import math
import shlex
import signal
import sys

from steady import output
from steady.distributed import launcher


class StopRequest:
    """`requested` becomes true at the first signal; the run then finishes its step and saves.

    A second Ctrl-C or SIGTERM ends it at once, but only with `alone`, since torchrun passes one on
    several times. A lost terminal sends SIGHUP several times, so that never ends it at once.
    """

    def __init__(self, alone: bool, announce: bool):
        self.requested, self.alone, self.announce = False, alone, announce
        self.hang_up = getattr(signal, "SIGHUP", None)  # not known on Windows
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.request)
        if self.hang_up and signal.getsignal(self.hang_up) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(self.hang_up, self.request)

    def request(self, signum: int, frame: object) -> None:
        self.requested = True
        once_more_counts = self.alone and signum != self.hang_up
        signal.signal(signum, signal.default_int_handler if once_more_counts else signal.SIG_IGN)
        if self.announce:  # not by print, which the signal may have interrupted
            again = b"; once more stops at once" if once_more_counts else b""
            output.write((1, 2), b"\nstopping after this step and saving" + again + b"\n")


def require_finite(losses: dict[str, float], iter_num: int, out_dir: str) -> None:
    """Raises ValueError for a loss that is NaN or infinite, before the run is saved over a good
    checkpoint."""
    if not all(map(math.isfinite, losses.values())):
        found = " and ".join(f"{name} {loss}" for name, loss in losses.items())
        raise ValueError(
            f"{found} at iteration {iter_num}: not finite; checkpoints in {out_dir} were not "
            "overwritten: go on from there with a lower learning_rate, or with dtype=bfloat16"
        )


def how_to_go_on() -> str:
    """The command that resumes the run of this process."""
    command = [argument for argument in sys.argv[1:] if not argument.startswith("--init_from=")]
    return shlex.join([*launcher(), sys.argv[0], *command, "--init_from=resume"])
