"""Take each fix out, one at a time, and see that a test notices.

    python dev/switch_off.py --rows=F19,F22
    python dev/switch_off.py --gpu --jobs=8

dev/switch_off.txt lists the fixes, by the numbers of docs/failures.md. One after the other is
switched off in a copy of this checkout, and its tests run there: one of them must fail. Prints a
Markdown table and, at the end, in how many cases that was so; the exit status is 1 if it was not so
in all of them.
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

rows = ""  # which, with commas between; default: all
gpu = False  # those whose tests need a GPU; False: those whose tests do not
check = False  # switch nothing off: all tests must pass
jobs = 1  # at a time


class Fix(NamedTuple):
    """A fix, and how to take it out."""

    row: str
    without: str  # what a run is like without it
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
    """What git tracks, or where git does not know, all but what it would ignore."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        ignored = shutil.ignore_patterns(".*", "__pycache__", "out", "out-*", "wandb", "*.bin")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def switch_off(fix: Fix, folder: Path) -> None:
    """Raises UserError where the text to replace is not there once."""
    for name, old, new in fix.edits:
        path = folder / name
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise UserError(f"found {text.count(old)} times in {name}: {old}")
        text = text.replace(old, new)
        ast.parse(text)  # a test that fails since nothing can be imported would prove nothing
        path.write_text(text, encoding="utf-8")


def first_failure(fix: Fix) -> str:
    """The first test that fails, with its reason; "" if none does. Raises UserError where none
    was run."""
    with tempfile.TemporaryDirectory() as name:
        copy_checkout(Path(name))
        if not check:
            switch_off(fix, Path(name))
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider"]
        wide = os.environ | {"COLUMNS": "300"}  # else the reasons are cut off
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
    """Whether a test fails if and only if the fix is off, and a row of the table."""
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
        raise UserError(f"rows={rows} with gpu={gpu}: there are none")
    print("| | switched off | test that failed |\n|---|---|---|", flush=True)
    as_wanted = []
    with ThreadPoolExecutor(jobs) as pool:
        for good, line in pool.map(try_out, fixes):
            print(line, flush=True)
            as_wanted.append(good)
    print(f"\n{sum(as_wanted)} of {len(as_wanted)} as they must be")
    sys.exit(not all(as_wanted))
