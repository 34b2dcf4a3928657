"""The structure of the project, read from its sources: who imports whom, how long files are."""

import ast
import runpy
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

FILES = [*ROOT.glob("*.py"), *(ROOT / "steady").glob("*.py")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The project's modules that a file imports when it runs, wherever in the file that stands."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # only for annotations
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def test_nothing_in_steady_imports_what_imports_it():
    above = {"train", "model", "sample", "bench", "convert", "plot"}
    for name, path in MODULES.items():
        if name.startswith("steady"):
            assert not imports(path) & above, name


def test_imports_run_one_way():
    order = TopologicalSorter({name: imports(path) for name, path in MODULES.items()})
    order.prepare()  # raises CycleError, which names the circle


def test_a_circle_and_an_import_upwards_would_be_found(tmp_path):
    path = tmp_path / "naive.py"
    path.write_text("def f():\n    from steady import memory\n    import model\n")
    assert imports(path) == {"steady.memory", "model"}


@pytest.mark.parametrize("name", ["train.py", "model.py"])
def test_the_two_files_can_be_read_in_one_sitting(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 330
    if name == "train.py":
        end = next(i for i, line in enumerate(lines) if line == "# the end")
        assert end - lines.index("while not stopping:") <= 90


def test_only_one_module_asks_how_processes_share_the_work():
    for path in FILES:
        if path.name not in ("distributed.py", "configurator.py", "train.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            assert not words & {"ddp", "fsdp"}, path


def test_every_fix_can_still_be_switched_off():
    """dev/switch_off.py replaces pieces of these sources: keep its list in step with them."""
    script = runpy.run_path(str(ROOT / "dev" / "switch_off.py"))
    fixes = script["read_fixes"](ROOT / "dev" / "switch_off.txt")
    assert {fix.row for fix in fixes} >= {f"F{number:02}" for number in (*range(1, 44), 53, 54)}
    for fix in fixes:
        for name, old, new in fix.edits:
            assert (ROOT / name).read_text(encoding="utf-8").count(old) == 1, (fix.row, old)
            assert old != new
