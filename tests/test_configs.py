"""Every config file loads, every setting is used, and the scripts' --help is complete."""

import ast

import pytest
from conftest import ROOT

from configurator import read_settings, resolve
from model import GPTConfig

SETTINGS = read_settings(ROOT / "train.py")


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.py")), ids=lambda p: p.name)
def test_config_file_loads_and_says_how_to_use_it(path):
    config = resolve(SETTINGS, [str(path)])
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert f"config/{path.name}" in docstring
    GPTConfig(**{k: config[k] for k in ("n_layer", "n_head", "n_kv_head", "n_embd", "dropout")})
    assert config["lr_decay_iters"] == 0  # so --max_iters alone shortens the schedule too


SCRIPTS = ["train.py", "sample.py", "bench.py", "convert.py", "plot.py"]


def names_read(source: str) -> set[str]:
    """The names that a script reads, as variables or as config["name"]."""
    tree = ast.parse(source)
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and type(n.ctx) is ast.Load}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            names.add(node.slice.value)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
            names.add(getattr(node.args[0], "value", None))
    return names


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_setting_is_read_and_has_a_comment(script):
    read = set(GPTConfig.__dataclass_fields__) if script == "train.py" else set()
    sources = {
        "train.py": [
            "train.py",
            "steady/optim.py",
            "steady/runlog.py",
            "steady/distributed.py",
            "steady/memory.py",
            "steady/sampled.py",
        ]
    }.get(script, [script])
    for source in sources:
        read |= names_read((ROOT / source).read_text(encoding="utf-8"))
    for name, setting in read_settings(ROOT / script).items():
        assert name in read, f"{script}: nothing reads {name}"
        assert setting.comment, f"{script}: {name} has no comment"


def test_nanogpt_names_keep_their_meaning():
    for name in """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint
        init_from wandb_log wandb_project wandb_run_name dataset gradient_accumulation_steps
        batch_size block_size n_layer n_head n_embd dropout learning_rate max_iters weight_decay
        beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr device dtype
        compile""".split():
        assert name in SETTINGS


@pytest.mark.parametrize("script", SCRIPTS)
def test_f35_help(run, script):
    shown = run(script, "--help")
    assert shown.startswith(f"usage: python {ROOT / script}")
    for name in read_settings(ROOT / script):
        assert f"  --{name}=" in shown
    assert max(map(len, shown.splitlines())) < 130
