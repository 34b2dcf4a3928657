"""Remove each fix, one at a time, and check that a test fails without it.

    python dev/switch_off.py --rows=F19,F22
    python dev/switch_off.py --gpu --jobs=8

dev/switch_off.txt lists the fixes by number (see docs/failures.md). This script switches off one
fix in a copy of the checkout and runs its tests there: at least one must fail. It prints a Markdown
table and a count of the fixes whose tests did fail. The exit status is 1 unless all did.
"""

import ast
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
import steady

steady.start_script()

from configurator import configure
from steady import UserError

ROOT = Path(__file__).parents[1]

rows = ""  # numbers of the fixes, separated by commas; default: all
gpu = False  # True: only fixes whose tests need a GPU; False: only the others
check = False  # switch nothing off: all tests must pass
jobs = 1  # fixes to try in parallel


class Fix(NamedTuple):
    """A fix, and how to remove it."""

    row: str
    without: str  # how a run behaves without it
    tests: list[str]  # pytest's arguments
    edits: list[tuple[str, str, str]]  # file, old text, new text

    @property
    def needs_gpu(self) -> bool:
        return "test_gpu" in self.tests[0]


def read_fixes(path: Path) -> list[Fix]:
    fixes = []
    for block in path.read_text(encoding="utf-8").strip().split("\n\n")[1:]:
        title, tests, *lines = block.splitlines()
        row, _, without = title.partition(" ")
        edits, file, before = [], "", ""
        for line in lines:
            kind, text = line[:2].strip(), line[2:]
            if kind == "-" and before == "-":
                edits[-1][1].append(text)
            elif kind == "-":
                edits.append((file, [text], []))
            elif kind == "+":
                edits[-1][2].append(text)
            else:
                file = text
            before = kind
        edits = [(file, "\n".join(old), "\n".join(new)) for file, old, new in edits]
        fixes.append(Fix(row, without, shlex.split(tests), edits))
    return fixes


def copy_checkout(folder: Path) -> None:
    """Copy the tracked files; outside of a git checkout, all files that git would not ignore."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        ignored = shutil.ignore_patterns(".*", "__pycache__", "out", "out-*", "wandb", "*.bin")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def switch_off(fix: Fix, folder: Path) -> None:
    """Apply the edits; raises UserError unless each old text occurs exactly once."""
    for name, old, new in fix.edits:
        path = folder / name
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise UserError(f"found {text.count(old)} times in {name}: {old}")
        text = text.replace(old, new)
        ast.parse(text)  # a test that fails on a syntax error proves nothing
        path.write_text(text, encoding="utf-8")


def first_failure(fix: Fix) -> str:
    """The first failing test with its reason; "" if all pass. Raises UserError if no test ran."""
    with tempfile.TemporaryDirectory() as name:
        copy_checkout(Path(name))
        if not check:
            switch_off(fix, Path(name))
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider"]
        wide = os.environ | {"COLUMNS": "300"}  # or pytest cuts off the reasons
        done = subprocess.run(
            [*pytest, *fix.tests], cwd=name, capture_output=True, text=True, env=wide
        )
    lines = done.stdout.splitlines()
    for line in lines:
        if done.returncode == 1 and line.startswith(("FAILED ", "ERROR ")):
            return line.partition(" ")[2]
    if done.returncode or " passed" not in lines[-1]:
        raise UserError(f"no test ran: {' '.join(lines[-1:]) or done.stderr[-300:]}")
    return ""


def try_out(fix: Fix) -> tuple[bool, str]:
    """Whether the tests fail (with --check: pass) as they should, and a row of the table."""
    try:
        failure = first_failure(fix)
    except (ValueError, SyntaxError) as error:
        return False, f"| {fix.row} | {fix.without} | **not tried: {error}** |"
    print(f"{fix.row} {fix.without}: {failure or 'passed'}", file=sys.stderr, flush=True)
    test = failure.partition(" - ")[0].removeprefix("tests/")
    shown = f"`{test}`" if test else "none" if check else "**none**"
    return bool(failure) is not check, f"| {fix.row} | {fix.without} | {shown} |"


if __name__ == "__main__":
    configure(globals(), positional="")
    wanted = rows.split(",") if rows else ()
    fixes = [fix for fix in read_fixes(ROOT / "dev" / "switch_off.txt")
             if fix.needs_gpu is gpu and (not wanted or fix.row in wanted)]  # fmt: skip
    if not fixes:
        raise UserError(f"no fixes match rows={rows} with gpu={gpu}")
    print("| | switched off | test that failed |\n|---|---|---|", flush=True)
    as_wanted = []
    with ThreadPoolExecutor(jobs) as pool:
        for good, line in pool.map(try_out, fixes):
            print(line, flush=True)
            as_wanted.append(good)
    print(f"\n{sum(as_wanted)} of {len(as_wanted)} as expected")
    sys.exit(not all(as_wanted))
