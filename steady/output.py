"""What is printed: text from files without terminal commands, and output that cannot be written (a
pipe whose reader is gone, a full disk under the log, a closed stdout), which ends no run."""

import io
import os
import sys


def shown(text: str, limit: int = 200) -> str:
    """A text from a file, fit for a line on a terminal: short, and with control characters as
    escapes."""
    return visible(text if len(text) <= limit else f"{text[:limit]}...").replace("\n", "\\n")


def visible(text: str) -> str:
    """`text` with its control characters, line feeds and tabs excepted, as escapes: a terminal
    would obey them."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


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
