import ast
import math
import re
import sys

import pytest
from conftest import ROOT

from configurator import (
    KNOWN,
    Setting,
    check_values,
    configure,
    describe,
    one_line_errors,
    read_settings,
    resolve,
)
from model import GPTConfig
from steady import UserError

SCRIPT = '''"""A script."""
# output
out_dir = "out"  # folder
# training
steps = 10  # number of steps
rate = 6e-4  # learning rate
fast = True  # be fast
start = "\\n"  # prompt
config = configure(globals())
later = 5  # no setting
'''


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return read_settings(path)


def test_a_setting_may_have_any_default_with_a_plain_value(tmp_path, monkeypatch):
    """nanoGPT computes its default dtype. The model ignored n_head = HEADS silently."""
    path = tmp_path / "script.py"
    computed = 'dtype = "bfloat16" if len("two") == 2 else "float16"\nHEADS = 4\nn_head = HEADS\n'
    computed += "import numpy\nseed = numpy.int64(3)\nkey = str(open)\nn_embd = len('abcd')\n"
    computed += "from model import GPTConfig\nmin_lr = [1.0]\nmin_lr = numpy.array(min_lr)\n"
    path.write_text(computed + "folder = open\n" + SCRIPT)
    known = {"out_dir", "steps", "rate", "fast", "start", "min_lr"}
    assert {"n_head"} == read_settings(path).keys() - known
    namespace = {"__file__": str(path), "configure": configure}
    monkeypatch.setattr(sys, "argv", [str(path)])
    exec(path.read_text(), namespace)
    assert namespace["config"]["dtype"] == "float16" and namespace["config"]["n_head"] == 4
    assert namespace["config"]["n_embd"] == 4 and type(namespace["seed"]) is int
    assert namespace["config"].keys().isdisjoint({"key", "min_lr"})  # may be secret; an array
    monkeypatch.setattr(sys, "argv", [str(path), "--dtype=float32"])
    exec(path.read_text(), namespace)
    assert namespace["dtype"] == "float32"
    monkeypatch.setattr(sys, "argv", [str(path), "--folder=here"])
    with pytest.raises(ValueError, match="unknown setting '--folder=.*lists all .*name = value"):
        exec(path.read_text(), namespace)


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), ("0.5", 0.5), ("full", "full"), ("", ""), ("true", True)]
)
def test_a_setting_without_a_default_takes_any_value(text, value):
    settings = {"window": Setting(None, "", ""), "size": Setting(3, "", "")}
    config = resolve(settings, [f"--window={text}", "--size=4"])
    assert config == {"window": value, "size": 4}
    check_values(config)  # other scripts' choices do not count


def test_settings_are_read_with_default_comment_and_section(settings):
    assert list(settings) == ["out_dir", "steps", "rate", "fast", "start"]
    assert settings["rate"].default == 6e-4
    assert settings["rate"].comment == "learning rate"
    assert settings["rate"].section == "training"


def test_a_default_may_be_computed(tmp_path):
    """nanoGPT's own train.py has 5 * 8; such settings were left out of the run, silently."""
    (tmp_path / "s.py").write_text(
        "steps = 5 * 8  # steps\nrate = 6e-4\nlowest = rate / 10\nname = f'run-{steps}'\n"
        "path = open('nowhere')\nwidths = [8, 2 * 8]\nconfigure(globals())\nlater = 3\n"
    )
    settings = read_settings(tmp_path / "s.py")
    found = {name: setting.default for name, setting in settings.items()}
    assert found.pop("lowest") == pytest.approx(6e-5)
    assert found == {"steps": 40, "rate": 6e-4, "name": "run-40", "widths": [8, 16]}
    for text in ("[4,4]", "4,4"):
        assert resolve(settings, [f"--widths={text}"])["widths"] == [4, 4]
    with pytest.raises(ValueError, match="--widths takes a value of type list, not '4;4'"):
        resolve(settings, ["--widths=4;4"])


def test_later_arguments_win_whether_file_or_key(settings, tmp_path):
    file = tmp_path / "c.py"
    file.write_text("steps = 20\nrate = 1e-3\n")
    assert resolve(settings, ["--steps=5", str(file)])["steps"] == 20
    assert resolve(settings, [str(file), "--steps=5"])["steps"] == 5


def test_f32_int_is_accepted_for_float_and_booleans_in_any_case(settings, tmp_path):
    config = resolve(settings, ["--rate=1", "--fast=false"])
    assert config["rate"] == 1.0 and type(config["rate"]) is float
    file = tmp_path / "c.py"
    file.write_text("rate = 1\n")  # an int here, not a string
    assert type(resolve(settings, [str(file)])["rate"]) is float
    assert config["fast"] is False
    assert resolve(settings, ["--fast=TRUE"])["fast"] is True


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--steps=1.5", "int"),
        ("--steps=True", "int"),
        ("--rate=fast", "float"),
        ("--fast=1", "bool"),
        ("--fast=yes", "bool"),
    ],
)
def test_f32_wrong_type_names_key_value_and_expected_type(settings, argument, expected):
    key, value = argument.lstrip("-").split("=")
    with pytest.raises(ValueError) as error:
        resolve(settings, [argument])
    for part in (key, value, expected):
        assert part in str(error.value)


def test_wrong_type_in_a_config_file_names_the_file(settings, tmp_path):
    file = tmp_path / "c.py"
    file.write_text("steps = 'many'\n")
    with pytest.raises(ValueError, match=r"c\.py: steps takes a value of type int, not 'many'"):
        resolve(settings, [str(file)])


def test_true_and_huge_numbers_in_a_config_file_are_no_integers_or_floats(settings, tmp_path):
    file = tmp_path / "c.py"
    for text, found in (("steps = True", "int, not True"), ("rate = 10**400", "float, not 1000")):
        file.write_text(text + "\n")
        with pytest.raises(UserError, match=f"takes a value of type {found}"):
            resolve(settings, [str(file)])


def test_imports_of_a_config_file_are_no_settings_and_leave_no_trace(settings, tmp_path):
    file, before = tmp_path / "c.py", list(sys.path)
    (tmp_path / "folder").mkdir()  # a namespace package has no file
    file.write_text(
        "from math import pi as circle\nimport folder\n"
        "try:\n    from winreg import *\nexcept ImportError:\n    pass\nrate = circle\n"
    )
    assert resolve(settings, [str(file)])["rate"] == math.pi and sys.path == before
    file.write_text("1 / 0\n")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        resolve(settings, [str(file)])
    assert sys.path == before


def test_help_shows_the_values_of_config_files(run):
    shown = run("train.py", "config/train_gpt2_muon.py", "--help")
    assert "--max_iters=640 " in shown and "--optimizer=muon " in shown


def test_words_and_folders_in_the_place_of_others_are_named(settings, tmp_path):
    with pytest.raises(UserError, match="init_from='Resum', did you mean 'resume'"):
        check_values({"init_from": "Resum"})
    with pytest.raises(UserError, match=f"not a file .a run: --out_dir={tmp_path}"):
        resolve(settings, [str(tmp_path)])


def test_checks_of_values_leave_out_what_does_not_apply(tmp_path, monkeypatch):
    halves = {"short_sequences": 0.5, "block_size": 15}
    check_values(halves | {"eval_only": True})
    with pytest.raises(UserError, match="needs an even block_size"):
        check_values(halves)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="GPT-2 has another architecture"):
        check_values({"init_from": "gpt2"})
    (tmp_path / "gpt2").mkdir()
    check_values({"init_from": "gpt2"})  # a run's folder


def test_f33_only_the_first_equals_sign_separates(settings):
    assert resolve(settings, ["--start=1+1="])["start"] == "1+1="
    assert resolve(settings, ["--start=a=b=c"])["start"] == "a=b=c"


def test_text_settings_take_any_text(settings):
    assert resolve(settings, ["--start=12"])["start"] == "12"
    assert resolve(settings, ["--start=None"])["start"] == "None"
    assert resolve(settings, ["--start="])["start"] == ""


def test_f34_typo_on_the_command_line_names_the_nearest(settings):
    with pytest.raises(ValueError, match="unknown setting '--stepz=3', did you mean 'steps'"):
        resolve(settings, ["--stepz=3"])
    with pytest.raises(ValueError, match="did you mean 'out_dir'"):
        resolve(settings, ["--out-dir=x"])


@pytest.mark.parametrize("imports", ["", "import math\n", "from math import pi\n"])
def test_f34_a_name_of_pythons_math_in_a_config_is_no_setting(settings, tmp_path, imports):
    path = tmp_path / "c.py"
    path.write_text(f"{imports}gamma = 0.9\n")
    with pytest.raises(ValueError, match="unknown setting 'gamma'"):
        resolve(settings, [str(path)])


def test_f34_typo_in_a_config_file_names_the_nearest(settings, tmp_path):
    file = tmp_path / "c.py"
    file.write_text("rats = 1e-3\n")
    with pytest.raises(ValueError, match=r"unknown setting 'rats' in .*, did you mean 'rate'"):
        resolve(settings, [str(file)])


def test_f34_naive_exec_ignores_the_typo():
    naive = {"rate": 6e-4}
    exec("rats = 1e-3", naive)  # nanoGPT executes its config files like this
    assert naive["rate"] == 6e-4


def test_config_file_may_import_and_compute_with_private_names(settings, tmp_path):
    file = tmp_path / "c.py"
    file.write_text(
        "import math\nfrom pathlib import Path\n"
        "def _double(x): return 2 * x\n"
        "_base = 8\nsteps = _double(_base) + int(math.sqrt(16))\nrate = rate / 2\n"
    )
    config = resolve(settings, [str(file)])
    assert config["steps"] == 20
    assert config["rate"] == 3e-4
    assert set(config) == set(settings)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("steps = ", "SyntaxError"),
        ("steps = 1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(0)", r"c\.py failed: SystemExit: 0 \(c\.py, line 1\)"),
        ("from helper import *", r"c\.py failed: ZeroDivisionError: .* \(helper\.py, line 2\)"),
    ],
)
def test_broken_config_file_is_one_line(settings, tmp_path, content, expected):
    file = tmp_path / "c.py"
    file.write_text(content)
    (tmp_path / "helper.py").write_text("steps = 1\nrate = 1 / 0\n")
    with pytest.raises(ValueError, match=expected):
        resolve(settings, [str(file)])


def test_f39_config_file_with_a_byte_order_mark_or_in_another_encoding(settings, tmp_path):
    file = tmp_path / "c.py"
    file.write_bytes(b"\xef\xbb\xbfsteps = 7\n")
    assert resolve(settings, [str(file)])["steps"] == 7
    other = tmp_path / "latin.py"
    other.write_bytes("start = 'Größe'\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.py failed: SyntaxError: .*utf-8"):
        resolve(settings, [str(other)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "8"], "'--steps' is not --key=value: write --steps=8"),
        (["train_gpt.py"], "'train_gpt.py', did you mean config/train_gpt2.py?"),
        (["--lr=1"], "unknown setting '--lr=1': did you mean 'learning_rate'?"),
        (["-steps=8"], "write --steps=8"),
        (["\u2013\u2013steps=8"], "a setting is written --key=value"),  # an editor's dashes
        (["--fast", "False"], "there is no config file 'False' .*a setting is written --key=value"),
        (["--steps=1\n2"], r"not '1\\n2'$"),
    ],
)
def test_what_people_write_by_mistake_is_answered_with_what_to_write(settings, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        resolve(settings, arguments)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["batch_size", "num_samples", "vocab_size"])
def test_f50_settings_have_an_upper_limit(name):
    with pytest.raises(ValueError, match=rf"{name}=.* must be at least . and at most \d+"):
        check_values({name: 2**63})


def test_a_line_of_a_config_file_that_sets_nothing_is_named(settings, tmp_path):
    for line in ("steps: 3", "{'steps': 3}", "steps == 3", "class Config:\n    steps: int = 3"):
        (tmp_path / "c.py").write_text(f"rate = 0.5\n{line}\n")
        named = re.escape(line.partition("\n")[0])
        with pytest.raises(ValueError, match=f"c.py, line 2: .{named}. sets nothing: write name"):
            resolve(settings, [str(tmp_path / "c.py")])
    for fine in (
        "steps: int\nsteps = 3\n",
        "from typing import NamedTuple\nclass Shape(NamedTuple):\n    layers: int\n",
        "def _half(n):\n    result: int\n    return n // 2\n",
        "if __name__ == '__main__':\n    ",  # as when nanoGPT runs it
        "class Small:\n    steps = 4\nsteps = Small.steps\n",
    ):
        (tmp_path / "c.py").write_text(fine + "rate = 0.25\n")
        assert resolve(settings, [str(tmp_path / "c.py")])["rate"] == 0.25


def test_missing_config_file_and_missing_value_say_what_to_write(settings):
    with pytest.raises(ValueError, match="there is no config file 'nowhere.py' .a setting"):
        resolve(settings, ["nowhere.py"])
    with pytest.raises(ValueError, match="a setting is written --key=value"):
        resolve(settings, ["steps=3"])
    with pytest.raises(ValueError, match="write --steps=10"):
        resolve(settings, ["--steps"])


@pytest.mark.parametrize("text, value", [("1e3", 1000), ("6E5", 600000), ("1000", 1000)])
def test_a_whole_number_may_have_an_exponent(settings, text, value):
    found = resolve(settings, [f"--steps={text}"])["steps"]
    assert found == value and type(found) is int
    with pytest.raises(ValueError, match="takes a value of type int"):
        resolve(settings, ["--steps=1.5e0"])


def test_numpys_numbers_are_numbers(settings, tmp_path):
    file = tmp_path / "c.py"
    for kind in ("float64", "float32"):
        file.write_text(f"import numpy as np\nrate = np.{kind}(0.25)\nsteps = np.int64(3)\n")
        found = resolve(settings, [str(file)])
        assert (found["rate"], type(found["rate"])) == (0.25, float)
        assert (found["steps"], type(found["steps"])) == (3, int)


def test_folders_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    script = tmp_path / "s.py"
    script.write_text('out_dir = "out"  # folder\nconfigure(globals())\n')
    monkeypatch.setattr(sys, "argv", ["s.py", "--out_dir=~/runs/1"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("HOME", "/home/someone")
    namespace = {"__file__": str(script)}
    assert configure(namespace)["out_dir"] == namespace["out_dir"] == "/home/someone/runs/1"
    with pytest.raises(ValueError, match="out_dir is empty"):
        check_values({"out_dir": ""})
    with pytest.raises(ValueError, match="init_from is empty: leave it out"):
        check_values({"init_from": ""})


def test_bare_flag_of_a_boolean_means_true(settings):
    settings["fast"] = settings["fast"]._replace(default=False)
    assert resolve(settings, ["--fast"])["fast"] is True


def test_f35_help_lists_every_key_with_default_and_comment(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as end:
        configure({"__file__": str(tmp_path / "script.py")})
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for name, setting in settings.items():
        assert f"--{name}=" in shown and setting.comment in shown
    assert "--rate=0.0006" in shown


def test_a_file_that_cannot_be_written_is_one_line(fork):
    process = fork("data/text/prepare.py", f"--input={__file__}", "--tokenizer=byte",
                   "--out=/dev/null/folder")  # fmt: skip
    found = process.stdout.read()
    assert found.startswith("error: /dev/null/folder/meta.json cannot be read: [Errno 20] Not a")
    assert found.count("\n") == 1
    assert process.wait() == 1


def test_a_value_of_thousands_of_characters_is_not_all_of_an_error(capsys):
    one_line_errors(OSError, OSError(36, "File name too long", 5000 * "9"), None)
    shown = capsys.readouterr().err
    assert shown.startswith("error: [Errno 36] File name too long: '999") and len(shown) < 300


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"learning_rate": 1e-5, "min_lr": 6e-5, "decay_lr": True},
         "min_lr=6e-05 must be at most learning_rate=1e-05: "
         "use --min_lr=0.0, or a tenth of the rate"),
        ({"block_size": 0}, "block_size=0 must be at least 1 and at most 2147483647"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_meant_are_refused(values, expected):
    with pytest.raises(ValueError) as error:
        check_values(values)
    assert str(error.value) == expected
    check_values({"learning_rate": 1e-5, "min_lr": 6e-5, "decay_lr": False})


def test_help_columns_line_up(settings):
    shown = describe(settings, "s.py", "FILE").splitlines()
    lines = [line for line in shown if line.startswith("  --")]
    columns = {line.index(settings[line[4:].split("=")[0]].comment) for line in lines}
    assert len(lines) == len(settings) and len(columns) == 1


def test_help_fits_80_columns():
    comment = " ".join(["word"] * 40)
    names = ("a", "a_name_that_leaves_no_room_for_a_comment")
    shown = describe({n: Setting(1, comment, "section") for n in names}, "s.py", "")
    lines = shown.splitlines()[3:]
    assert max(map(len, lines)) <= 80 and " ".join(shown.split()).count(comment) == 2
    assert lines[0].startswith("  --a=1     ") and f"  --{names[1]}=1" in lines
    assert {len(line) - len(line.lstrip()) for line in lines} == {2, 32}


def test_help_keeps_sections_together_when_a_script_changes_what_it_shares(settings):
    own = Setting(1e-3, "peak", "of its own")
    shown = describe(settings | {"rate": own}, "s.py", "").splitlines()
    sections = [line for line in shown if line and not line.startswith("  --")][1:]
    assert sections == ["output", "training", "of its own"]
    assert shown[0] == "usage: python s.py [--key=value ...]"


CALLS = r"^ *(config = )?(configure|prepare_hub_dataset)\(globals\(\)"
SCRIPTS = {
    str(path.relative_to(ROOT))
    for pattern in ("*.py", "data/*/prepare.py", "dev/*.py")
    for path in ROOT.glob(pattern)
    if re.search(CALLS, path.read_text(encoding="utf-8"), re.MULTILINE)
} - {"configurator.py"}


def test_private_names_and_constants_are_no_settings(tmp_path):
    (tmp_path / "s.py").write_text("_kept: list[int] = []\nSIZE = 3\nsteps = 5  # number\n")
    assert list(read_settings(tmp_path / "s.py")) == ["steps"]


def test_settings_of_ones_own_may_have_names_of_other_scripts(tmp_path, monkeypatch):
    check_values({"steps": [1000, 2000], "reference": "out-a"})
    settings = {"extra": Setting({"k": 0.1}, "", "")}
    assert resolve(settings, ["--extra={'k': 0.3}"]) == {"extra": {"k": 0.3}}
    # a training config's top_k is not sample.py's
    (tmp_path / "c.py").write_text("top_k = 1\nseed = 5\n")
    mine, theirs = ({name: Setting(3, "", "") for name in ("top_k", "seed")} for _ in range(2))
    found = resolve(mine, [str(tmp_path / "c.py")], theirs)
    assert found == {"top_k": 3, "seed": 5}


def test_all_of_train_pys_settings_are_known():
    fields = GPTConfig.__dataclass_fields__.keys()
    assert read_settings(ROOT / "train.py").keys() <= KNOWN | fields


def test_a_line_may_have_several_settings(tmp_path):
    (tmp_path / "s.py").write_text(
        "n_layer, n_head = 2, 4  # sizes\nrate = low = 0.5\nwidth: list = [3]\n"
        "scale = math.sqrt(100)\nconfigure(globals())\n"
    )
    settings = read_settings(tmp_path / "s.py")
    assert {name: setting.default for name, setting in settings.items()} == {
        "n_layer": 2, "n_head": 4, "rate": 0.5, "low": 0.5, "width": [3], "scale": 10.0,
    }  # fmt: skip
    assert settings["n_head"].comment == "sizes"


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_help_says_how_the_script_is_called(run, script):
    """The usage line shows the script's path, and config files only if it accepts them."""
    usage, *lines = run(script, "--help").splitlines()
    takes = {"plot.py": "[OUT_DIR ...] "}.get(script, "")
    if script in ("train.py", "sample.py", "bench.py"):
        takes = "[config/FILE.py ...] "
    assert usage == f"usage: python {ROOT / script} {takes}[--key=value ...]"
    docstring = ast.get_docstring(ast.parse((ROOT / script).read_text(encoding="utf-8")))
    about = " ".join(docstring.partition("\n\n")[0].split())
    assert f"{' '.join(lines)} ".startswith(f" {about} ")
    if not read_settings(ROOT / script):
        return
    rows = [line for line in lines if line[:4] == "  --" and " " in line.strip()]
    flags = [re.fullmatch(r"  --\w+=.*?  +(\S.*)", line) for line in rows]
    assert all(flags) and {found.start(1) for found in flags} == {32}
    assert max(map(len, lines)) <= 80
    if not takes:
        with pytest.raises(ValueError, match="'notes.txt' is not a setting: write --key=value"):
            run(script, "notes.txt")


def test_all_scripts_are_found():
    assert len(SCRIPTS) >= 18


def test_a_script_without_arguments_has_its_defaults(settings):
    assert resolve(settings, []) == {name: setting.default for name, setting in settings.items()}
