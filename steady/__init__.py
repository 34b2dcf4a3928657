"""What train.py, sample.py and the other scripts import. Nothing here imports them.

Import it before torch: without expandable segments a GPU's memory fills with cached blocks of sizes
that are no longer needed, and CUDA reads the variable that asks for them only once, when it starts.
"""

import os

# Every torch so far reads the first name, the second only 2.10 and newer. What the user set stays.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
