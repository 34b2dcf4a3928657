"""Override a script's settings from config files and the command line, with checks and `--help`.

A script lists its settings as plain assignments at its top and then calls `configure(globals())`:

    # optimizer
    learning_rate = 6e-4  # peak learning rate

    config = configure(globals())

    $ python train.py config/train_gpt2.py --learning_rate=3e-4

Settings are applied in the order given, so the last one wins. A config file is Python: it sees the
current settings, may import modules, and may define helper variables that begin with an underscore.
Any other variable must be a setting. The comment after an assignment is its `--help` text.
"""

import ast
import contextlib
import difflib
import math
import numbers
import os
import re
import reprlib
import signal
import sys
import textwrap
import traceback
import types
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from steady import UserError, visible
from steady.folder import require_file
from steady.output import name_missing_package, open_closed_streams

HERE = Path(__file__).parent
CONFIGS = HERE / "config"

# The allowed values of all scripts' settings. GPTConfig checks the architecture's, and combinations
# are checked where they are used.
CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "activation_checkpointing": ("none", "selective", "block"),  # from fastest to least memory
    "parallel": ("ddp", "fsdp"),
    "backend": ("auto", "nccl", "gloo"),
    "optimizer": ("adamw", "muon"),
    "lr_schedule": ("cosine", "wsd"),
}
RANGES = (
    # upper limits: larger values overflow, or take too long
    ("at least 1 and at most 2147483647", lambda value: 1 <= value < 2**31, (
        "block_size", "eval_iters", "max_new_tokens", "steps", "warmup_steps", "eval_windows",
        "log_interval",
    )),
    ("at least 1 and at most 1000000", lambda value: 1 <= value <= 10**6, (
        "batch_size", "gradient_accumulation_steps", "num_samples", "processes", "num_proc",
        "micro_batch", "gpus",
    )),
    ("at least 0 and at most 4294967296", lambda value: 0 <= value <= 2**32, (
        "vocab_size", "sampled_softmax",
    )),
    ("at least 0 and below 2**63", lambda value: 0 <= value < 2**63, (
        "eval_interval", "sample_interval", "max_iters", "warmup_iters", "lr_decay_iters", "top_k",
        "max_tokens",
    )),
    ("at least 0 and finite", lambda value: 0 <= value < math.inf, (
        "learning_rate", "min_lr", "weight_decay", "grad_clip", "second_target", "temperature",
        "reference",
    )),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, ("beta1", "beta2")),
    ("above 0 and at most 1", lambda value: 0 < value <= 1, ("top_p",)),
    ("at least 0 and at most 1", lambda value: 0 <= value <= 1, (
        "smooth", "decay_fraction", "short_sequences",
    )),
    ("above 0 and below 1", lambda value: 0 < value < 1, ("val_fraction",)),
    ("a 64-bit integer", lambda value: -(2**63) <= value < 2**63, ("seed",)),
)  # fmt: skip


PLAIN = bool | int | float | str | list | tuple | dict  # the types of settings (or None)
# train.py's settings without the model's (GPTConfig's fields): any expression may set them
KNOWN = {*CHOICES, *(name for _, _, names in RANGES for name in names), "out_dir", "dataset",
         "init_from", "device", "compile", "decay_lr", "eval_only", "wandb_log", "wandb_project",
         "wandb_run_name", "fp8", "average_weights", "always_save_checkpoint"}  # fmt: skip
ARITHMETIC = {f.__name__: f for f in (abs, float, int, max, min, round, str)}  # in defaults
# values of these types are converted to the setting's
NEAR = {int: numbers.Integral, float: numbers.Real, list: list | tuple, tuple: list | tuple}
SHARED = ("out_dir", "seed", "device", "dtype")  # sample.py takes them from a training config
PATHS = ("out_dir", "dataset", "init_from", "to", "input", "out", "data")  # may begin with ~/


class Setting(NamedTuple):
    """One `name = default  # comment` line of a script, under a `# section` comment."""

    default: Any
    comment: str
    section: str


def read_settings(
    script: str | Path, namespace: dict[str, Any] | None = None
) -> dict[str, Setting]:
    """Read a script's settings from its source without running it.

    Settings are module-level assignments of plain values, or of arithmetic with them, before the
    call of `configure`. If the script runs, its `namespace` has the current values, and those in
    KNOWN and GPTConfig's fields may come from any expression.
    """
    namespace = namespace or {}
    known = KNOWN | {*getattr(namespace.get("GPTConfig"), "__dataclass_fields__", ())}
    source = Path(script).read_text(encoding="utf-8")
    lines, settings, section = source.split("\n"), {}, ""  # ast ends lines only at \n
    scope = {"__builtins__": ARITHMETIC, "math": math}
    for node in ast.parse(source).body:
        called = getattr(getattr(node, "value", None), "func", None)
        if getattr(called, "id", "") == "configure":
            break
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = (part for target in targets for part in ast.walk(target) if hasattr(part, "id"))
        names = [part.id for part in parts if isinstance(part.ctx, ast.Store)]
        try:  # such as 5 * 8, or learning_rate / 10
            alone = ast.Module([ast.Assign(targets, node.value)], [])
            exec(compile(ast.fix_missing_locations(alone), str(script), "exec"), scope)
        except Exception:
            names = [name for name in names if name in known]
        above = takewhile(lambda line: line.startswith("#"), reversed(lines[: node.lineno - 1]))
        for line in above:  # the first line of a comment block names the section
            section = line.lstrip("# ")
        comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        for name in names:
            value = namespace.get(name, scope.get(name, ...))
            if isinstance(value, numbers.Number) and hasattr(value, "item"):  # NumPy's
                value = value.item()
            skipped = name.isupper() or name.startswith("_")  # a constant, or private
            if not skipped and isinstance(value, PLAIN | None):
                settings[name] = Setting(value, comment.lstrip("# "), section)
    return settings


def configure(
    namespace: dict[str, Any],
    base: str = "",
    positional: str = "config/FILE.py",
    ignored: str = "",
    choices: dict[str, tuple] | None = None,
) -> dict[str, Any]:
    """Apply `sys.argv` to the settings of the calling script and return all of them.

    Args:
        namespace: the script's `globals()`; its settings are updated in place.
        base: another script whose settings are also accepted (train.py's, for bench.py).
        positional: name for arguments without dashes in `--help`; "" if the script takes none.
        ignored: a script whose settings are ignored in config files (train.py's, for sample.py,
            which accepts the config file of a training run).
        choices: the allowed values of this script's own settings.

    Raises UserError with key, value and remedy for invalid settings. From here on, any UserError
    or OSError ends the script with one line and no traceback.
    """
    sys.excepthook = one_line_errors
    open_closed_streams()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see steady/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):  # replace characters that the terminal lacks
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace", line_buffering=True)
    sys.argv[1:] = [argument.rstrip("\r") for argument in sys.argv[1:]]  # a Windows script's
    script = Path(namespace.get("__file__") or "")
    source = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""
    if not re.search(r"(configure|dataset)\(\s*(namespace=)?globals\(", source):
        # exec(open("train.py").read()), e.g. in a notebook
        found = {str(script): read_settings(script) for script in HERE.glob("*.py")}
        fitting = [script for script in found if found[script].keys() <= namespace.keys()]
        namespace["__file__"] = max(fitting, key=lambda script: len(found[script]))
        if "ipykernel" in sys.modules:
            sys.argv = [namespace["__file__"]]
    settings = read_settings(HERE / base) if base else {}
    settings |= read_settings(namespace["__file__"], namespace)
    ignores = read_settings(HERE / ignored) if ignored else {}
    if {"--help", "-h"} & set(sys.argv[1:]):
        files = [argument for argument in sys.argv[1:] if positional and argument.endswith(".py")]
        shown = resolve(settings, files, ignores)  # with the values of config files
        settings = {name: s._replace(default=shown[name]) for name, s in settings.items()}
        about = (namespace.get("__doc__") or "").partition("\n\n")[0]
        print(describe(settings, sys.argv[0], positional, about))
        raise SystemExit(0)
    config = resolve(settings, sys.argv[1:], ignores, config_files=bool(positional))
    for name in PATHS:  # shells do not expand --key=~/FOLDER
        if isinstance(config.get(name), str):
            config[name] = os.path.expanduser(config[name])
    check_values(config, choices)
    namespace.update(config)
    return config


def dataset_name(folder: Path) -> str:
    """The value of `--dataset` for a folder: its name if it is in data/, else its path."""
    path = Path(os.path.abspath(folder))
    in_data = path.parent.resolve() == (CONFIGS.parent / "data").resolve()
    return path.name if in_data else str(path)


def configs_for(dataset: str) -> list[Path]:
    """The files in config/ that set this `dataset`."""
    line = f'\ndataset = "{dataset}"\n'
    paths = sorted(path for path in CONFIGS.glob("[!.]*.py") if path.is_file())
    return [p for p in paths if line in p.read_text(encoding="utf-8", errors="replace")]


def architecture_note(asked: dict[str, Any], config: dict[str, Any], defaults: type) -> str | None:
    """A note that names the settings which the loaded weights overrule, or None. `asked` are the
    settings as given, `config` the run's, `defaults` a class with the architecture's defaults."""
    given = {argument.partition("=")[0] for argument in sys.argv[1:]}
    ignored = [
        f"--{name}={value} (it is {config[name]})"
        for name, value in asked.items()
        if f"--{name}" in given or value != getattr(defaults, name, value)
        if name not in (*PATHS, "batch_size") and value != config[name]
        if value or name not in ("vocab_size", "n_kv_head", "n_hidden")  # 0: any size
    ]
    return f"note: without effect on this model: {', '.join(ignored)}" if ignored else None


def resolve(
    settings: dict[str, Setting],
    arguments: list[str],
    ignored: dict[str, Setting] | None = None,
    config_files: bool = True,
) -> dict[str, Any]:
    """Apply the config files and `--key=value` arguments to the defaults, in the order given."""
    config = {name: setting.default for name, setting in settings.items()}
    for argument, after in zip_longest(arguments, arguments[1:], fillvalue="-"):
        if not argument.startswith("-"):
            if not config_files:
                raise UserError(f"{argument!r} is not a setting: write --key=value (see --help)")
            run_config_file(argument, settings, config, ignored or {})
            continue
        key, equals, text = argument.lstrip("-").partition("=")  # only the first "=" separates
        if key not in settings:
            raise UserError(f"unknown setting {argument!r}{nearest(key, settings)}")
        kind = type(settings[key].default)
        if not argument.startswith("--") or not equals and kind is not bool:
            example = text or (settings[key].default if after.startswith("-") else after)
            raise UserError(f"{argument!r} is not --key=value: write --{key}={example}")
        value = parse(text if equals else "True", kind)  # a bare --flag is True
        config[key] = check(settings[key], value, f"--{key}")
    return config


def run_config_file(
    path: str, settings: dict[str, Setting], config: dict[str, Any], ignored: dict[str, Setting]
) -> None:
    """Run a Python config file and copy its settings, except for `ignored` ones, to `config`."""
    if not os.path.lexists(path):
        names = [file.name for file in CONFIGS.glob("*.py")]
        close = difflib.get_close_matches(os.path.basename(path), names, n=1)
        near = f", did you mean config/{close[0]}?" if close else ""
        raise UserError(
            f"there is no config file {path!r}{near} (a setting is written --key=value)"
        )
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder, not a file (a run: --out_dir={path})")
    require_file(Path(path))
    source = Path(path).read_bytes()
    namespace = {name: setting.default for name, setting in ignored.items()}
    namespace |= config | {"__file__": path, "__name__": "__main__"}
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)  # for `from base import *`
    # a base may have the name of a module that is loaded already, such as model.py
    shadowed = {}
    for file in Path(folder).glob("*.py"):
        loaded = getattr(sys.modules.get(file.stem), "__file__", None)
        if loaded and os.path.realpath(loaded) != os.path.realpath(file):
            shadowed[file.stem] = sys.modules.pop(file.stem)
    before = set(sys.modules)
    try:
        exec(compile(source, path, "exec"), namespace)
    except (Exception, SystemExit) as error:  # exiting is an error too
        frames = traceback.extract_tb(error.__traceback__)[1:]  # of the config and its helpers
        own = [f for f in frames if os.path.dirname(os.path.abspath(f.filename)) == folder]
        lines = [f" ({os.path.basename(f.filename)}, line {f.lineno})" for f in own]
        reason = f"{type(error).__name__}: {error}{''.join(lines[-1:])}"
        raise UserError(f"config file {path} failed: {reason}") from None
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:  # the next config may have another base
            if os.path.dirname(getattr(sys.modules[name], "__file__", None) or "") == folder:
                del sys.modules[name]
        sys.modules.update(shadowed)
    parsed, imported = ast.parse(source), set()  # imported: such as pi, from math
    assigned = {ast.unparse(t) for node in ast.walk(parsed) for t in getattr(node, "targets", ())}
    used = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
    for node in parsed.body:
        # these set nothing: n_layer: 6, n_layer == 6, {"n_layer": 6}, an unused class
        idle = isinstance(node, ast.Expr) and isinstance(node.value, ast.Dict | ast.Compare)
        if isinstance(node, ast.AnnAssign) and not node.value:
            idle = ast.unparse(node.target) not in assigned
        elif isinstance(node, ast.ClassDef) and node.name not in used:
            idle = settings.keys() & getattr(namespace.get(node.name), "__dict__", {}).keys()
        if idle:
            line = ast.unparse(node).partition("\n")[0]
            raise UserError(
                f"{path}, line {node.lineno}: {line!r} sets nothing: write name = value"
            )
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
            of_python = str(node.module).partition(".")[0] in sys.stdlib_module_names
            if node.names[0].name == "*" and of_python and node.module in sys.modules:
                imported |= vars(sys.modules[node.module]).keys()
    for key, value in namespace.items():
        tool = isinstance(value, types.ModuleType) or callable(value) or key in imported
        if key in settings and (key in SHARED or key not in ignored):
            config[key] = check(settings[key], value, f"{path}: {key}")
        elif not tool and not key.startswith("_") and key not in ignored:
            raise UserError(
                f"unknown setting {key!r} in {path}{nearest(key, settings)} "
                "(helper variables must begin with an underscore)"
            )


def parse(text: str, kind: type) -> Any:
    """Convert command-line text to `kind`; return the text if it is not of that kind."""
    words = {"true": True, "false": False}
    if kind is bool or kind is type(None) and text.lower() in words:
        return words.get(text.lower(), text)
    if kind is int and re.fullmatch(r"\d{1,9}[eE]\d", text):
        return int(float(text))
    try:
        if kind in (list, tuple, dict, type(None)):
            return ast.literal_eval(text)
        return kind(text) if kind in (int, float) else text
    except (ValueError, SyntaxError, TypeError):
        return text


def check(setting: Setting, value: Any, where: str) -> Any:
    """Return `value` if it has the setting's type, or convert it if its type is near."""
    kind = type(setting.default)
    if type(value) is kind or setting.default is None:
        return value
    if isinstance(value, NEAR.get(kind, ())) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # 10**400 is no float
            return kind(value)
    words = " (True or False)" if kind is bool else ""
    raise UserError(
        f"{where} takes a value of type {kind.__name__}{words}, not {reprlib.repr(value)}"
    )


def check_values(values: dict[str, Any], more_choices: dict[str, tuple] | None = None) -> None:
    """Raise UserError for a setting that is out of range or not one of its choices."""
    for name, choices in (CHOICES | (more_choices or {})).items():
        if values.get(name, choices[0]) not in choices:
            raise UserError(f"unknown {name}={values[name]!r}: use {', '.join(choices)}")
    for name in ("out_dir", "dataset", "init_from"):
        if values.get(name) == "":
            raise UserError(f"{name} is empty: leave it out, or name a folder (. is this one)")
    source = str(values.get("init_from", "scratch"))
    near = difflib.get_close_matches(source.lower(), ("scratch", "resume"), cutoff=0.8)
    if near and source != near[0] and not Path(source).exists():
        raise UserError(f"unknown init_from={source!r}, did you mean {near[0]!r}?")
    if re.fullmatch(r"(openai-community/)?gpt2(-\w+)?", source) and not Path(source).exists():
        raise UserError(
            f"init_from={source}: GPT-2 has another architecture, with biases and learned "
            "positions: use HuggingFaceTB/SmolLM2-135M, which has the same size"
        )
    for words, holds, names in RANGES:
        for name in names:
            value = values.get(name)
            if isinstance(value, numbers.Real) and not holds(value):
                raise UserError(f"{name}={value!r} must be {words}")
    lowest, peak = values.get("min_lr", 0.0), values.get("learning_rate", math.inf)
    if lowest > peak and values.get("decay_lr", True):
        raise UserError(
            f"min_lr={lowest} must be at most learning_rate={peak}: use --min_lr=0.0, or a tenth "
            "of the rate"
        )
    trains_on_halves = values.get("short_sequences") and not values.get("eval_only")
    if trains_on_halves and values.get("block_size", 0) % 2:
        raise UserError(f"short_sequences needs an even block_size, not {values['block_size']}")


# hints for nanoGPT's settings
ELSEWHERE = {
    "lr": "did you mean 'learning_rate'?",
    "config": "write the file's path alone, without --config=",
    "bias": "this model has no biases: leave it out",
    "compile": "this script does not compile: leave it out",
    "init_from": "name the run's folder with --out_dir=FOLDER instead; to use a pretrained model, "
    "finetune it with train.py first",
}


def nearest(key: str, settings: dict[str, Setting]) -> str:
    """The end of a message: the nearest setting, or a pointer to --help."""
    if key in ELSEWHERE:
        return f": {ELSEWHERE[key]}"
    close = difflib.get_close_matches(key.replace("-", "_"), settings, n=1)
    if close:
        return f", did you mean {close[0]!r}?"
    return "; --help lists all (to add one, write name = value in the script, above configure)"


def describe(settings: dict[str, Setting], script: str, positional: str, about: str = "") -> str:
    """The text of `--help`: every setting with its default and comment, by section."""
    files = f"[{positional} ...] " if positional else ""
    lines = [f"usage: python {script} {files}[--key=value ...]"]
    lines += ["", *textwrap.wrap(about, 80)] if about else []
    for section in dict.fromkeys(setting.section for setting in settings.values()):
        lines += ["", section] if section else [""]
        for name, setting in settings.items():
            if setting.section == section:
                default = repr(setting.default) if setting.default == "\n" else setting.default
                flag = f"  --{name}={default}"
                comment = textwrap.wrap(setting.comment, 48, break_on_hyphens=False)
                if len(flag) > 30:  # the comment begins on the next line
                    comment.insert(0, "")
                rows = zip_longest([flag], comment, fillvalue="")
                lines += [f"{left:32}{right}".rstrip() for left, right in rows]
    return "\n".join(lines)


def one_line_errors(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An excepthook: UserErrors, errors about files, Ctrl-C and missing packages become one line.
    Other errors keep their traceback, and so do file errors in your lines of model.py or train.py.
    """
    frames = [Path(frame.filename) for frame in traceback.extract_tb(trace)]
    ours = [path.name for path in frames if path.parent in (HERE, HERE / "steady")]
    about_file = isinstance(error, OSError) and error.errno is not None
    yours = ours[-1:] in (["model.py"], ["train.py"])
    if isinstance(error, UserError) or about_file and not yours:
        rank = os.environ.get("RANK", "0")  # set by torchrun
        prefix = "" if rank == "0" else f"rank {rank}: "
        if kind is not BrokenPipeError:  # e.g. `| head`
            text = "\\n".join(visible(str(error)).splitlines())
            text = re.sub(r"(\S{100})\S{400,}(\S{100})", r"\1...\2", text)  # shorten values, paths
            print(f"{prefix}error: {text}", file=sys.stderr, flush=True)
        try:
            sys.stdout.flush()
        except OSError:  # else Python retries at exit and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    else:
        name_missing_package(kind, error, trace)
