"""The structure of the sources: the import graph and the length of files."""

import ast
import re
import runpy
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT

FILES = [*ROOT.glob("*.py"), *(ROOT / "steady").glob("*.py")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The project's modules that a file imports anywhere, including imports for type checkers."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def test_nothing_in_steady_imports_a_script():
    scripts = {"train", "sample", "bench", "convert", "plot"}
    for name, path in MODULES.items():
        if name.startswith("steady"):
            assert not imports(path) & scripts, name


def test_imports_run_one_way():
    order = TopologicalSorter({name: imports(path) for name, path in MODULES.items()})
    order.prepare()  # raises a CycleError that names the cycle


def test_a_circle_and_an_import_upwards_would_be_found(tmp_path):
    path = tmp_path / "naive.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import model\n"
        "def f():\n    from steady import memory\n"
    )
    assert imports(path) == {"steady.memory", "model"}


def test_the_model_needs_little_and_changes_nothing_global():
    """A student should be able to read model.py and its imports in one sitting."""
    code = """
import gc, os, signal, sys
import torch, torch._dynamo, torch._functorch.config, torch.utils.checkpoint
def state():
    return (gc.get_threshold(), dict(os.environ), sys.excepthook, signal.getsignal(signal.SIGINT),
            torch.get_float32_matmul_precision(), torch._functorch.config.get_config_copy())
before = state()
import model
assert state() == before
files = [m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)]
print(*[f for f in files if f.startswith(os.getcwd() + os.sep) and ".venv" not in f], sep="\\n")
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    files = found.stdout.split()
    lines = sum(len(Path(name).read_text(encoding="utf-8").splitlines()) for name in files)
    assert 1 < len(files) <= 4 and lines <= 650, (files, lines, found.stderr)


def test_train_names_few_things_of_other_files():
    text = (ROOT / "train.py").read_text(encoding="utf-8")
    files = "|".join(path.stem for path in (ROOT / "steady").glob("*.py"))
    found = set(re.findall(rf"\b(?:{files}|convert)\.[a-z_]\w*", text)) - {"convert.py"}
    assert len(found) <= 22, sorted(found)


def test_only_one_module_asks_how_processes_share_the_work():
    for path in FILES:
        if path.name not in ("distributed.py", "configurator.py", "train.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            assert not words & {"ddp", "fsdp"}, path


def test_every_fix_can_still_be_switched_off():
    """dev/switch_off.txt quotes the sources: update its texts when you change them."""
    script = runpy.run_path(str(ROOT / "dev" / "switch_off.py"))
    fixes = script["read_fixes"](ROOT / "dev" / "switch_off.txt")
    assert {fix.row for fix in fixes} >= {f"F{number:02}" for number in (*range(1, 44), 53, 54)}
    for fix in fixes:
        for name, old, new in fix.edits:
            assert (ROOT / name).read_text(encoding="utf-8").count(old) == 1, (fix.row, old)
            assert old != new
