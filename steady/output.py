"""Printing. Text from files cannot send commands to the terminal. Output that cannot be written (a
pipe without a reader, a full disk under the log, a closed stdout) never ends a run."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable
from typing import Any

from steady import visible


def shown(text: str, limit: int = 200) -> str:
    """Make text from a file fit on one terminal line: shorten it and escape control characters."""
    return visible(text if len(text) <= limit else f"{text[:limit]}...").replace("\n", "\\n")


def open_closed_streams() -> None:
    """Point closed standard streams (`>&-`) at the null device. Otherwise the next file that is
    opened, such as a checkpoint, becomes descriptor 1 and receives all that libraries print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python found it closed
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            setattr(sys, name, open(number, "r+", encoding="utf-8", closefd=False))


def waiting(
    items: Iterable[Any] | None, total: float | None, what: str, quiet: bool = False, **options: Any
) -> Any:
    """`items`, with a progress bar and the remaining time if they take more than five seconds.
    Shows nothing without tqdm or with `quiet`."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    terminal = sys.stderr.isatty()  # a log file keeps all updates: end with a line feed
    return tqdm(items, desc=what, total=total, disable=quiet, delay=5, dynamic_ncols=True,
                mininterval=0.5 if terminal else 10, leave=not terminal, **options)  # fmt: skip


def survive_closed_streams() -> None:
    """From here on printing never raises. If stdout fails, the text goes to stderr; if stderr fails
    too, it is lost."""
    for name, numbers in (("stdout", (1, 2)), ("stderr", (2,))):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # pytest or a notebook has replaced it
        with contextlib.suppress(OSError):
            stream.flush()
        raw = io.BufferedWriter(SafeStream(*numbers))
        kept = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
        setattr(sys, name, kept)


class SafeStream(io.FileIO):
    """A raw output stream that never fails: it writes to the first file descriptor that works. If
    none does, the data is lost."""

    def __init__(self, *numbers: int):
        super().__init__(numbers[0], "w", closefd=False)
        self.numbers = numbers

    def write(self, data: bytes) -> int:
        for number in self.numbers:
            with contextlib.suppress(OSError):
                return os.write(number, data)
        return len(data)


def name_missing_package(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An excepthook that reports a missing package in one line. configure() later installs
    one_line_errors, which calls it."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name in ("tokenizers", "safetensors", "matplotlib"):  # not in requirements.txt
        print(f"error: this needs {name}: pip install {name}", file=sys.stderr)
    elif name in ("torch", "numpy"):
        print(
            f"error: this Python ({sys.executable}) has no {name}: activate the environment "
            "(after make demo: source .venv/bin/activate), or pip install -r requirements.txt",
            file=sys.stderr,
        )
    else:
        sys.__excepthook__(kind, error, trace)
