"""Requests to stop a run, by signals: Ctrl-C, SIGTERM, or the loss of its terminal."""

import os
import signal


class StopRequest:
    """`requested` becomes true at the first signal; the run then finishes its step and saves.

    A second Ctrl-C or SIGTERM ends it at once, but only with `alone`, since torchrun passes one on
    several times. A lost terminal sends SIGHUP several times, so that never ends it at once.
    """

    def __init__(self, alone: bool, announce: bool):
        self.requested, self.alone, self.announce = False, alone, announce
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self.hang_up = getattr(signal, "SIGHUP", None)  # not known on Windows
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.request)
        if self.hang_up and signal.getsignal(self.hang_up) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(self.hang_up, self.request)

    def request(self, signum: int, frame: object) -> None:
        self.requested = True
        once_more_counts = self.alone and signum != self.hang_up
        signal.signal(signum, signal.default_int_handler if once_more_counts else signal.SIG_IGN)
        if signum == self.hang_up:  # what is printed from here on would fail
            for stream in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if self.announce:
            again = b"; once more stops at once" if once_more_counts else b""
            os.write(1, b"\nstopping after this step and saving" + again + b"\n")
