"""Check that the commands, links, figures and test names in README.md and docs/ are real."""

import ast
import importlib.util
import inspect
import io
import re
import shlex

import pytest
import torch
import torch._inductor.config
from conftest import ROOT

from configurator import read_settings, resolve

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [
    *ROOT.glob("*.py"),
    *ROOT.glob("config/*.py"),
    *ROOT.glob("dev/*.py"),
    *ROOT.glob("data/*/prepare.py"),
]
TEXTS = [
    "accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run",
    "Not enough SMs to use max_autotune_gemm",
    "libcuda.so cannot found",
    "expandable_segments",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHDYNAMO_DISABLE",
    "BackendCompilerFailed",
    "empty_cache",
    "current_seed during CUDA graph capture",
]


def commands(text: str) -> list[str]:
    """The commands in a page or docstring: indented lines, and `python ...`."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"^ {4,}((?:python|torchrun|make) .*)$", text, re.MULTILINE)
    found += [c.replace("\n", " ") for c in re.findall(r"`((?:python|torchrun|make) [^`]+)`", text)]
    return [command for command in found if "llama.cpp/" not in command]


def all_commands() -> list[tuple[str, str]]:
    texts = [(page.name, page.read_text(encoding="utf-8")) for page in PAGES]
    for script in SCRIPTS:
        docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        texts.append((str(script.relative_to(ROOT)), docstring))
    return [(name, command) for name, text in texts for command in commands(text)]


def settings_of(script: str) -> set[str]:
    """The settings of one of our scripts."""
    source = (ROOT / script).read_text(encoding="utf-8")
    if not re.search(r"configure\(|prepare_hub_dataset\(|read_settings\(", source):
        return set()
    names = set(read_settings(ROOT / script))
    if script == "dev/turns.py":
        names |= settings_of("bench.py")
    if script == "bench.py":
        names |= set(read_settings(ROOT / "train.py"))
    if "prepare_hub_dataset" in source:
        names |= set(read_settings(ROOT / "steady" / "prepare.py"))
    return names | {"help"}


def check_command(command: str) -> None:
    """Fails if a file, module or flag does not exist."""
    words = shlex.split(command.split(" | ")[0], comments=True)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1].rstrip(':')}:", makefile, re.MULTILINE)
        return
    if words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        return
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2])
        return
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    script, names = words[at], settings_of(words[at])
    if words[0] == "torchrun":
        check_split(words[:at], words[at:])
    for word in words[at + 1 :]:
        if re.match("--nano(gpt|chat)_runs=", word):  # [NAME: ]NUMBERS, separated by commas
            for recipe in word.partition("=")[2].split(","):
                assert re.fullmatch(r"(.+: )?[\d.e:kM-]+", recipe.strip()), recipe
        if word.startswith("--"):
            assert word[2:].partition("=")[0] in names, f"{script} has no {word}"
        elif word.endswith(".py"):
            assert (ROOT / word).exists(), word


def check_split(torchrun: list[str], command: list[str]) -> None:
    """Fails if the processes cannot divide the micro-batches of an iteration."""
    counts = dict(word[2:].split("=") for word in torchrun if "=" in word)
    processes = int(counts.get("nnodes", 1)) * int(counts["nproc_per_node"])
    settings = resolve(read_settings(ROOT / "train.py"), command[1:])
    assert settings["gradient_accumulation_steps"] % processes == 0, f"{processes} processes"


@pytest.mark.parametrize("name", sorted({name for name, _ in all_commands()}))
def test_every_command_names_files_and_flags_that_exist(name):
    for command in [command for page, command in all_commands() if page == name]:
        try:
            check_command(command)
        except Exception as error:
            raise AssertionError(f"{name}: {command}: {error}") from None


def test_a_wrong_command_is_noticed():
    assert len(all_commands()) > 60
    for command in ("python trian.py", "python train.py --bacth_size=4", "make tset",
                    "python train.py config/nothing.py", "python -m steady.nothing",
                    "torchrun --nproc_per_node=3 train.py config/train_gpt2.py"):  # fmt: skip
        with pytest.raises((AssertionError, FileNotFoundError)):
            check_command(command)


@pytest.mark.parametrize("text", TEXTS)
def test_the_texts_people_search_for_are_found(text):
    pages = {page.name for page in PAGES if text in page.read_text(encoding="utf-8")}
    assert "troubleshooting.md" in pages
    headings = re.findall(r"^### (.*)$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert any(text in heading for heading in headings)


def test_torch_knows_the_torch_logs_that_are_recommended(fork):
    """torch rejects unknown names with this call when it is imported."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    values = sorted(set(re.findall(r"TORCH_LOGS=([\w.+]+)", pages)))
    assert len(values) >= 4

    def accepted(value):
        return (
            fork("", code="import torch; torch._logging._init_logs()", TORCH_LOGS=value).wait() == 0
        )

    assert accepted(",".join(values)) and not accepted("torch.nonsense")


def load_script_of_a_data_set(folder):
    import datasets

    (folder / "openwebtext.py").write_text("", encoding="utf-8")
    datasets.load_dataset(str(folder / "openwebtext.py"))


def load_code(folder):
    torch.save(io.StringIO, folder / "ckpt.pt")
    torch.load(folder / "ckpt.pt", weights_only=True)


def load_half_a_checkpoint(folder):
    torch.save(torch.zeros(100), folder / "ckpt.pt")
    (folder / "ckpt.pt").write_bytes((folder / "ckpt.pt").read_bytes()[:-200])
    torch.load(folder / "ckpt.pt")


def load_compiled_weights(folder):
    compiled = torch.compile(torch.nn.Linear(2, 2))
    torch.nn.Linear(2, 2).load_state_dict(compiled.state_dict())


def compile_with_a_broken_backend(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.compile_fx.compile_fx", lambda *a, **more: 1 / 0)
        torch._dynamo.reset()
        torch.compile(torch.nn.Linear(2, 2))(torch.zeros(2))


def compile_without_a_compiler(folder):
    broken = {"cpp.cxx": (None, str(folder / "none")), "force_disable_caches": True}
    with torch._inductor.config.patch(broken):
        torch._dynamo.reset()
        torch.compile(torch.nn.Linear(2, 2))(torch.zeros(2))


def compile_for_an_old_gpu(folder):
    from torch._inductor.exc import GPUTooOldForTriton

    gpu = type("Properties", (), {"name": "Tesla P100", "major": 6, "minor": 0})()
    raise GPUTooOldForTriton(gpu, inspect.currentframe())


def split_at_every_equals_sign(folder):
    key, value = "--start=1+1=".split("=")


PROVOKED = {
    'Unexpected key(s) in state_dict: "_orig_mod.': load_compiled_weights,
    "Weights only load failed": load_code,
    "failed finding central directory": load_half_a_checkpoint,
    "random_ expects 'from' to be less than 'to'": lambda folder: torch.randint(10 - 1024, (4,)),
    "'charmap' codec can't decode byte": lambda folder: b"\x81".decode("cp1252"),
    "Dataset scripts are no longer supported": load_script_of_a_data_set,
    "too many values to unpack": split_at_every_equals_sign,
    "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:":
        compile_with_a_broken_backend,
    "torch._inductor.exc.InductorError:": compile_without_a_compiler,
    "No working C++ compiler found": compile_without_a_compiler,
    "too old to be supported by the triton GPU compiler": compile_for_an_old_gpu,
    "DefaultCPUAllocator: can't allocate memory": lambda folder: torch.empty(2**60),
}  # fmt: skip


@pytest.mark.parametrize("text", PROVOKED)
def test_quotes_of_torchs_messages_are_exact(text, tmp_path):
    """CUDA's messages are checked in test_gpu.py, and ours in the tests of each feature."""
    assert any(text in page.read_text(encoding="utf-8") for page in PAGES)
    with pytest.raises(Exception) as caught:
        PROVOKED[text](tmp_path)
    kind = caught.type
    assert text in f"{kind.__module__}.{kind.__qualname__}: {caught.value}"


def test_every_failure_has_its_section_and_the_tests_exist():
    page = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^### F(\d+) ", page, re.MULTILINE)]
    assert numbers[:60] == list(range(1, 61)) and len(set(numbers)) == len(numbers) > 60
    defined = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").glob("test_*.py"))
    for text in [path.read_text(encoding="utf-8") for path in PAGES]:
        for name in re.findall(r"`(test_f\w+)`", text):
            assert f"def {name}(" in defined, name
    for section in page.split("\n### ")[1:]:
        if int(section[1:3]) <= 43:
            number = section[1:3]
            assert re.search(rf"`test_(f\d+_)*f{number}_", section), f"F{number} names no test"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
                assert anchor in anchors, f"{page.name}: {target}"


def test_readme_is_short_and_its_figures_are_in_the_results():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 138
    assert max(map(len, readme.splitlines())) <= 130
    prose = "\n".join(line for line in readme.splitlines() if not line.startswith("    "))
    figures = re.findall(r"\d+,\d+|\d+\.\d\d+|\d+ s\b", prose)
    assert len(figures) > 8
    for figure in figures:
        assert figure in results, f"{figure} is not in docs/results.md"


def test_the_file_tree_is_complete():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme[readme.index("## Files") :]
    for path in [*ROOT.glob("*.py"), *(ROOT / "steady").glob("[a-z]*.py")]:
        assert re.search(rf"^ +([a-z0-9]+\.py )*{path.name} ", tree, re.MULTILINE), path.name
