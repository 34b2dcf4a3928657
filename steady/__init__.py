"""The code around model.py and train.py. Importing this package has no side effects.

Every script calls `start_script()` first, before it imports torch.
"""

import contextlib
import gc
import os
import signal
import sys
import warnings
from importlib import metadata

MIN_TORCH = (2, 11)

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def visible(text: str) -> str:
    """Escape the control characters in `text`, except line feeds and tabs. A terminal would obey
    them, and text from files may contain any."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


class UserError(ValueError):
    """An error for the user: it ends a script with one line and no traceback.

    The line names the problem, the value and the remedy. Other errors keep their traceback, except
    for OSErrors, missing packages and Ctrl-C.
    """

    def __init__(self, message: str):
        super().__init__(visible(message))


def start_script() -> None:
    """Set up the process. Call it before `import torch`.

    Without expandable segments, GPU memory fills up with cached blocks of sizes that are no longer
    needed. torch reads the variable that enables them only once, at startup. A value set by the
    user stays. Until configure() installs its handlers, Ctrl-C ends the script silently.
    """
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        version = metadata.version("torch")  # without importing it
        if tuple(map(int, version.split(".")[:2])) < MIN_TORCH:
            raise SystemExit(f"error: torch {version} is too old: pip install -U 'torch>=2.11'")
    from steady.output import name_missing_package

    sys.excepthook = name_missing_package
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # Importing torch and compiling create millions of long-lived objects. By default Python
    # collects garbage after every 700 new objects, which takes a quarter of that time.
    gc.set_threshold(50_000)
    warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about its own code
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
