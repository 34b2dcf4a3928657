"""What surrounds model.py and train.py. Importing this package changes nothing.

`start_script()` is the first line of every script, before torch is imported.
"""

import gc
import os
import re
import signal
import sys
import warnings
from importlib import metadata

MIN_TORCH = (2, 11)

# Every torch so far reads the first name, the second only 2.10 and newer.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def visible(text: str) -> str:
    """`text` with its control characters, line feeds and tabs excepted, as escapes: a terminal
    would obey them, and text from files may hold any."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


class UserError(ValueError):
    """A message to the user: it ends a script with one line and no traceback.

    The line says what is wrong, the value, and what to do. All other errors keep their traceback.
    """

    def __init__(self, message: str):
        super().__init__(visible(message))


def start_script() -> None:
    """Set up the process. Call it before `import torch`.

    Without expandable segments a GPU's memory fills with cached blocks of sizes that are no longer
    needed, and CUDA reads the variable that turns them on only once, when it starts. A user's own
    choice stays. Until configure() installs its handlers, Ctrl-C ends the script silently.
    """
    require_new_torch()
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    open_closed_streams()
    # Importing torch and compiling make millions of objects that stay. By default Python searches
    # for garbage after every 700 new ones, which takes a quarter of that time.
    gc.set_threshold(50_000)
    warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own functions
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def require_new_torch() -> None:
    """End the process if torch is too old. Reads its version without importing it."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < MIN_TORCH:
        needed = ".".join(map(str, MIN_TORCH))
        raise SystemExit(
            f"error: torch {version} is too old: pip install --upgrade 'torch>={needed}'"
        )


def open_closed_streams() -> None:
    """Point closed standard streams (`>&-`) at the null device. Otherwise the next file that is
    opened, such as a checkpoint, gets the number 1 and everything that libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:  # Python found it closed
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))
