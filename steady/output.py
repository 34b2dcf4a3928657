"""What is printed: text from files without terminal commands, and output that cannot be written (a
pipe whose reader is gone, a full disk under the log, a closed stdout), which ends no run."""

import io
import os
import sys
from collections.abc import Iterable
from typing import Any

from steady import visible


def shown(text: str, limit: int = 200) -> str:
    """A text from a file, fit for a line on a terminal: short, and with control characters as
    escapes."""
    return visible(text if len(text) <= limit else f"{text[:limit]}...").replace("\n", "\\n")


def waiting(
    items: Iterable[Any], total: float, what: str, quiet: bool = False, **options: Any
) -> Any:
    """`items`, with a progress bar and the time that remains once they take more than five seconds.
    Without tqdm, or with `quiet`, nothing is shown."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    every = 0.5 if sys.stderr.isatty() else 10  # a log file gets a line each time
    return tqdm(items, desc=what, total=total, disable=quiet, delay=5, mininterval=every,
                leave=False, dynamic_ncols=True, **options)  # fmt: skip


def outlive_readers() -> None:
    """From here on printing never raises: what stdout does not take goes to stderr, and what that
    does not take is lost."""
    for name, numbers in (("stdout", (1, 2)), ("stderr", (2,))):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # somebody else has it: pytest, a notebook
        try:
            stream.flush()
        except OSError:
            pass
        raw = io.BufferedWriter(Unfailing(numbers))
        kept = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
        setattr(sys, name, kept)


class Unfailing(io.RawIOBase):
    """The raw end of a stream, see `write`."""

    def __init__(self, numbers: tuple[int, ...]):
        self.numbers = numbers

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.numbers[0]

    def isatty(self) -> bool:
        return os.isatty(self.numbers[0])

    def write(self, data: bytes) -> int:
        return write(self.numbers, data)


def write(numbers: tuple[int, ...], data: bytes) -> int:
    """Write to the first of some file descriptors that takes `data`, of which it may be a part;
    returns how many bytes it took. What none takes is lost."""
    for number in numbers:
        try:
            return os.write(number, data)
        except OSError:
            continue
    return len(data)
