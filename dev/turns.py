"""Compare the speed of several checkouts of this project by running their bench.py in turns.

    git worktree add ../before HEAD~1
    python dev/turns.py config/train_gpt2.py --folders=../before,. --batch_size=32

Clocks, power limits and other jobs change a GPU's speed more than most code changes do, so only
compare figures from the same call. All other flags go to bench.py. Each run appends a line of JSON
to --out.
"""

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import steady

steady.start_script()

import json

from configurator import read_settings
from steady import UserError

# comparison
folders = "."  # checkouts, separated by commas
rounds = 2  # runs of each checkout
out = ""  # file to append a line of JSON per run to

given = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:] if argument[:2] == "--")
if "help" in given:
    print(__doc__)
    for name, setting in read_settings(__file__).items():
        print(f"  --{name}={setting.default}  {setting.comment}")
    raise SystemExit
folders = given.pop("folders", folders).split(",")
rounds, out = int(given.pop("rounds", rounds)), given.pop("out", out)
rest = [argument for argument in sys.argv[1:] if argument[:2] != "--"]
rest += [f"--{name}={value}" for name, value in given.items()]

FIGURES = ("tokens/s", "ms per step", "spread", "peak memory", "first step")
print(f"{'':20}" + "".join(f"{name:>14}" for name in FIGURES), flush=True)
for _ in range(rounds):
    for folder in folders:
        done = subprocess.run(
            [sys.executable, "bench.py", *rest], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise UserError(f"bench.py in {folder} failed: {(done.stdout + done.stderr)[-2000:]}")
        found = {
            name: float(
                re.search(rf"^{name} +([\d.,]+)", done.stdout, re.MULTILINE)[1].replace(",", "")
            )
            for name in FIGURES
            if re.search(rf"^{name} ", done.stdout, re.MULTILINE)
        }
        print(f"{folder:20}" + "".join(f"{found.get(n, 0):14,.2f}" for n in FIGURES), flush=True)
        if out:
            device = done.stdout.partition(",")[0].removeprefix("device ")
            with open(out, "a", encoding="utf-8") as file:
                entry = {"folder": folder, "flags": rest, "device": device} | found
                file.write(json.dumps(entry) + "\n")
