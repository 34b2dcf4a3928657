"""What train.py, sample.py and the other scripts import. Nothing here imports them.

Import it before torch. Without expandable segments a GPU's memory fills with cached blocks of sizes
that are no longer needed, and CUDA reads the variable that asks for them only once, when it starts.
And what may go wrong while torch is imported, which takes seconds, is dealt with here.
"""

import gc
import os
import re
import signal
import sys
from importlib import metadata
from pathlib import Path

from steady.output import open_closed_streams

MIN_TORCH = (2, 11)

# Every torch so far reads the first name, the second only 2.10 and newer. What the user set stays.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

open_closed_streams()

# Importing torch and its compiler, and compiling, makes millions of objects that stay. Python looks
# for garbage among them after every 700 new ones, which takes a quarter of that time.
gc.set_threshold(50_000)

# Until configure() has been reached, Ctrl-C ends one of our scripts at once and in silence.
script = getattr(sys.modules["__main__"], "__file__", None)
if script and Path(script).resolve().parent == Path(__file__).resolve().parents[1]:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def require_new_torch() -> None:
    """Ends the process if torch is too old; that is known without importing it."""
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


require_new_torch()
