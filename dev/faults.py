"""Hit the scripts with random kills, signals and bad inputs, and check that nothing is lost.

    make faults
    python dev/faults.py --kills=200 --stops=100 --fuzz=3000 --preparations=50

kills: send SIGKILL at a random moment, also to a process under one torchrun or two, and resume the
run until it is complete. Its losses and weights must be bit for bit those of an uninterrupted run.
stops: the same with SIGINT, SIGTERM and SIGHUP: directly, piped to a tee that gets the signal too,
under nohup, and under torchrun. A stopped run must save and exit with status 0.
fuzz: bad command lines, config files, environment variables, checkpoints, metadata, token files,
texts and tokenizers, and folders with links in them. The script must either do as asked or print a
one-line error that names the culprit. It must never print a traceback or a control character, die
of a signal, take more than a minute, or change a file elsewhere.
preparations: kill a prepare script with two threads at a random moment. The next one must write the
same files as an uninterrupted one.

Prints the tries and failures per kind and the command of each failure; exits with 1 if there is
any. Ctrl-C ends it early and prints the counts so far.
A kill or stop counts only if the run was still going.
"""

import contextlib
import gc
import gzip
import json
import multiprocessing
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import steady

steady.start_script()

import matplotlib.pyplot
import torch
import torch._dynamo
import torch.distributed.fsdp

import convert  # noqa: F401
from configurator import configure, parse, read_settings
from steady import checkpoint, prepare
from steady.prepare import split_text, write_dataset
from steady.runlog import read_metrics
from steady.tokenizer import CharTokenizer, train_bpe

# how much to try
kills = 24  # runs killed by SIGKILL
stops = 12  # runs stopped by a signal
fuzz = 240  # bad inputs
preparations = 4  # preparations killed
seed = 1  # seed of the random choices
limit_seconds = 60  # time limit for a bad input
keep = False  # keep the folder of every failure

configure(globals(), positional="")
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS = 24
TINY = ["--batch_size=2", "--gradient_accumulation_steps=2", "--block_size=16", "--n_layer=1",
        "--n_head=2", "--n_embd=32", "--eval_interval=4", "--eval_iters=2", "--compile=False",
        "--device=cpu", f"--max_iters={ITERATIONS}", "--lr_decay_iters=24"]  # fmt: skip
KILLS = ("kill",) * 8 + ("kill under torchrun", "kill under two torchruns")
STOPS = ("stop", "stop in a pipe to tee", "stop under nohup", "stop under torchrun")
draw = random.Random(seed)
tried, failed = Counter(), Counter()

# Imports take most of a short run's time, so fork this process instead of starting a fresh one.
context = multiprocessing.get_context("fork")
torch.set_num_threads(1)


def start(
    command: list[str], folder: Path, way: str = "", variables: dict[str, str] | None = None
) -> multiprocessing.process.BaseProcess:
    """Run `command` in `folder` as a session leader, with its output in `folder`/log."""
    process = context.Process(target=in_child, args=(command, folder, way, variables or {}))
    process.start()
    while process.is_alive() and os.getpgid(process.pid) != process.pid:
        time.sleep(0.001)
    return process


def in_child(command: list[str], folder: Path, way: str, variables: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as before configure(), see steady
    if "nohup" in way:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ.update(variables)
    os.chdir(folder)
    with open("log", "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.setsid()
    if "tee" in way:
        tee = subprocess.Popen(["tee", "copy"], stdin=subprocess.PIPE)
        for stream in (1, 2):
            os.dup2(tee.stdin.fileno(), stream)
    sys.stdout = sys.__stdout__ = open(1, "w")  # the parent's may not be files
    sys.stderr = sys.__stderr__ = open(2, "w")
    sys.argv, sys.path[0] = command[1:], str(ROOT)
    try:
        runpy.run_path(command[1], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def start_torchrun(command: list[str], folder: Path, kind: str = "") -> subprocess.Popen:
    """Run it in two processes: of one torchrun, or of two, as on two machines."""
    torchrun = [command[0], "-m", "torch.distributed.run"]
    if "two torchruns" in kind:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        torchrun += ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=1",
                     f"--rdzv_endpoint=127.0.0.1:{port}"]  # fmt: skip
        line = shlex.join([*torchrun, *command[1:]])
        command = ["sh", "-c", f"{line} & {line} & wait"]
    else:
        command = [*torchrun, "--standalone", "--nproc_per_node=2", *command[1:]]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)


def workers(parent: int) -> list[int]:
    """All descendants of a process."""
    started = []
    for file in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            started += [int(pid) for pid in file.read_text().split()]
    return [*started, *(pid for child in started for pid in workers(child))]


def fail(kind: str, command: list[str], why: str, folder: Path) -> None:
    failed[kind] += 1
    print(f"FAILED {kind}: {why}\n  {shlex.join(map(str, command))}", flush=True)
    if keep:
        kept = shutil.copytree(folder, tempfile.mkdtemp(prefix="fault-"), dirs_exist_ok=True)
        print(f"  {kept}")


def train_command(data: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *TINY, f"--dataset={data}",
            f"--out_dir={out}", *more]  # fmt: skip


def same(a: object, b: object) -> bool:
    """Whether two checkpoints are bit for bit identical."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def losses(out: Path) -> list[float]:
    return [e["loss"] for e in read_metrics(out / "metrics.jsonl") if "loss" in e]


def difference(out: Path, whole: Path, may_lack: bool) -> str:
    """How the result of an interrupted run differs from that of an uninterrupted one; "" if not.

    may_lack: metrics may lack lines: if rank 0 is killed, another process may still save a step
    that rank 0 did not get to log.
    """
    ours, theirs = (checkpoint.load(path / "ckpt.pt") for path in (out, whole))
    found, expected = ({e["iter"]: e["loss"] for e in read_metrics(path / "metrics.jsonl")
                        if "loss" in e} for path in (out, whole))  # fmt: skip
    if found.items() - expected.items() or len(found) < len(expected) and not may_lack:
        return "a different loss curve"
    if not same(ours["model"], theirs["model"]):
        return "different weights"
    if not same(ours["optimizer"]["state"], theirs["optimizer"]["state"]):
        return "different moments"
    return ""


def interrupt(kind: str, data: Path, whole: Path, seconds: float, most: int) -> None:
    """Start, interrupt and resume a run until it is complete, with at most `most` interruptions."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    out, log, torchrun = folder / "out", folder / "log", "torchrun" in kind
    signum = draw.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    signum = signal.SIGKILL if "kill" in kind else signum
    reached = interruptions = 0
    while reached < ITERATIONS:
        command = train_command(data, out)
        command += ["--init_from=resume"] if (out / "ckpt.pt").exists() else []
        before = len(losses(out))
        if torchrun:
            process = start_torchrun(command, folder, kind)
            ended = lambda: process.poll() is not None  # noqa: B023, E731
            # do not interrupt imports and the rendezvous
            while not ended() and len(losses(out)) <= before:
                time.sleep(0.02)
        else:
            process = start(command, folder, kind)
            ended = lambda: not process.is_alive()  # noqa: B023, E731
        rest = draw.uniform(0.0, 1.1) * seconds * (1.0 - reached / ITERATIONS / 2)
        end = time.monotonic() + (rest if interruptions < most else 3600)
        while not ended() and time.monotonic() < end:
            time.sleep(0.002)
        training, was_there = len(losses(out)) > before, (out / "ckpt.pt").exists()
        interrupted = not ended()
        if interrupted:
            interruptions += 1
            tried[kind] += 1
            started = workers(process.pid) if torchrun and "kill" in kind else []
            if started:
                os.kill(draw.choice(started), signal.SIGKILL)
            else:
                os.killpg(process.pid, signum)  # tee gets it too, as from a terminal
        # a torchrun waits minutes for its killed peer: kill it, as a scheduler would
        patience = 5 if interrupted and "two torchruns" in kind else 60
        end = time.monotonic() + patience
        while not ended() and time.monotonic() < end:
            time.sleep(0.002)
        if not ended():
            os.killpg(process.pid, signal.SIGKILL)
            if patience == 60:
                return fail(kind, command, f"still running a minute after {signum.name}", folder)
            process.wait()
        status = process.returncode if torchrun else process.exitcode
        text = log.read_text(errors="replace") if log.exists() else ""
        if not interrupted and status:
            return fail(kind, command, f"status {status}: {text}", folder)
        if "stop" in kind and not torchrun and training and status:
            return fail(kind, command, f"status {status} at {signum.name}", folder)
        if "Traceback" in text and not torchrun:  # torchrun itself prints one
            return fail(kind, command, f"a traceback after {signum.name}", folder)
        if not (out / "ckpt.pt").exists():
            if was_there or training and "stop" in kind:
                return fail(kind, command, f"no checkpoint after {signum.name}", folder)
            continue
        try:
            reached = checkpoint.load(out / "ckpt.pt")["iter_num"]
        except ValueError as error:
            return fail(kind, command, str(error), folder)
        if "stop" in kind and training and reached != len(losses(out)):
            return fail(kind, command, f"saved {reached} of {len(losses(out))}", folder)
    tried["compared with an uninterrupted run"] += 1
    if found := difference(out, whole, may_lack=torchrun and "kill" in kind):
        fail(kind, command, found, folder)
    shutil.rmtree(folder)


# ---- bad inputs --------------------------------------------------------------------------------

VALUES = ["", "0", "-1", "1", "3", "nan", "inf", "-inf", "1e308", "1e-308", "x", "None", "True",
          "auto", "none", "block", "a b", "ü", "\n", "\udcff", "/dev/null", "/proc/1/mem", "[]",
          str(2**31), str(2**63), "9" * 5000, "0x10", "1_0", "reduce-overhead", "'"]  # fmt: skip
STATEMENTS = ["import sys; sys.exit(0)", "1/0", "x = ", "exit()",
              "seed = 10**5000", "batch_size = None", "n_layer = [1]", "learning_rate = 10**400",
              "out_dir = 'a\\nb'", "while True: break", "def f(): return f()\n_ = f()", "lr = 1",
              "\ufeffseed = 1", "import torch", "n_embd = 10**18", "batch_size = 2.0",
              "seed = True", "from nowhere import x", "print(", "'",
              "max_iters = 1", "del seed", "seed = seed + 1", "_x = 1", "x: int = 1", "\0",
              "class seed: pass", "dataset = b'x'", "eval_iters = 0"]  # fmt: skip
VARIABLES = {
    "RANK": ["x", "-1", "5"],
    "WORLD_SIZE": ["0", "2", "x"],
    "LOCAL_RANK": ["x", "7"],
    "MASTER_PORT": ["x", "-1", "99999"],
    "TORCHELASTIC_RESTART_COUNT": ["x", "1", "-1"],
    "LOCAL_WORLD_SIZE": ["x"],
    "HOME": ["/nowhere", ""],
    "TMPDIR": ["/nowhere"],
    "COLUMNS": ["x", "0"],
}
AT_ITS_START = {  # only read when Python or torch starts
    "CXX": ["/bin/false", "g++ -O2", "nowhere"],
    "TORCHINDUCTOR_CACHE_DIR": ["/dev/null/x", ""],
    "TORCHDYNAMO_DISABLE": ["1", "x"],
    "TORCHDYNAMO_SUPPRESS_ERRORS": ["1"],
    "PYTORCH_CUDA_ALLOC_CONF": ["nonsense", "expandable_segments:False"],
    "PYTHONIOENCODING": ["ascii", "latin-1"],
    "LC_ALL": ["C", "nowhere"],
}
WRONG = ("command line", "config file", "environment", "checkpoint", "metadata", "token file",
         "hostile checkpoint", "tokenizer", "text", "links")  # fmt: skip
ESCAPE = "\x1b]0;owned\x07"
TENSORS = {  # ways to change a weight
    "meta": lambda w: w.to("meta"), "sparse": lambda w: w.to_sparse(), "bool": lambda w: w.bool(),
    "complex": lambda w: w.cfloat(), "int": lambda w: w.int(), "list": lambda w: w.tolist(),
    "nan": lambda w: w * torch.nan, "half": lambda w: w.half(), "none": lambda w: None,
    "stride 0": lambda w: torch.zeros(1).expand(2**18, 2**18), "empty": lambda w: w[:0],
    "transposed": lambda w: w.T, "shorter": lambda w: w.flatten()[:-1],
}  # fmt: skip
ODD = [None, -1, 0, 2**31 - 1, 2**63, 10**30, "", "x" * 10**5, ESCAPE, [], {}, [[]], 1.5, True,
       float("nan"), {ESCAPE: ESCAPE}, (1, 2)]  # fmt: skip


def nested() -> list:
    """A few bytes in a file, but 2**40 lists when printed."""
    value = []
    for _ in range(40):
        value = [value, value]
    return value


def damage(path: Path) -> str:
    """Damage a file in a random way; returns a description."""
    content = bytearray(path.read_bytes()) or bytearray(1)
    way = draw.choice(["flip", "cut", "empty", "zeros", "append", "noise", "remove", "folder"])
    if way == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif way == "cut":
        del content[draw.randrange(len(content)) :]
    elif way == "empty":
        content.clear()
    elif way == "zeros":
        start = draw.randrange(len(content))
        content[start : start + 64] = bytes(len(content[start : start + 64]))
    elif way == "append":
        content += draw.randbytes(draw.randrange(1, 9))
    elif way == "noise":
        content = draw.randbytes(len(content))
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way != "remove":
        path.write_bytes(content)
    return way


class Trial:
    """A bad input: the command to run, and the culprits that its error may name."""

    def __init__(self, kind: str, data: Path, whole: Path):
        self.kind, self.folder = kind, Path(tempfile.mkdtemp(prefix="faults-"))
        self.data, self.out = self.folder / "data", self.folder / "out"
        self.variables, self.whole, self.asked, self.at_its_start = {}, whole, {}, False
        self.patience, self.notes = limit_seconds, self.folder / "notes.txt"
        shutil.copytree(data, self.data)
        self.command = train_command(self.data, self.out, "--max_iters=2")
        self.culprits: list[str] = []
        getattr(self, kind.replace(" ", "_"))()

    def command_line(self) -> None:
        script = draw.choice(["train.py"] * 9 + ["sample.py"] * 3 + ["plot.py", "convert.py"] * 2)
        names = list(read_settings(ROOT / script))
        sample = ["--device=cpu", "--max_new_tokens=5", "--num_samples=2"]
        bases = {"sample.py": [f"--out_dir={self.whole}", *sample],
                 "plot.py": [str(self.whole)],
                 "convert.py": [f"--out_dir={self.whole}", "--to=exported"]}  # fmt: skip
        if script != "train.py":
            self.command = [sys.executable, str(ROOT / script), *bases[script]]
        for _ in range(draw.randrange(1, 3)):
            name, value = draw.choice([*names, *names, "mode", "lr"]), draw.choice(VALUES)
            if name == "max_iters":  # a huge value is valid
                continue
            form = draw.choice(["--{}={}", "--{}={}", "--{}={}", "--{}\0{}", "-{}={}", "{}={}"])
            self.command += form.format(name, value).split("\0")
            self.culprits += [name, repr(value)[1:-1] or name, os.fsencode(value).decode("latin-1")]
            if form.startswith("--{}="):
                self.asked[name] = value

    def config_file(self) -> None:
        file = self.folder / "config.py"
        text = "\n".join(draw.choices(STATEMENTS, k=draw.randrange(1, 3)))
        file.write_bytes(text.encode(draw.choice(["utf-8", "utf-16", "utf-8", "utf-8"])))
        self.command.insert(2, str(file))
        self.culprits = [str(file), *re.findall(r"^(\w+) = ", text, re.MULTILINE)]

    def environment(self) -> None:
        self.at_its_start = draw.random() < 0.05
        self.patience = limit_seconds * (4 if self.at_its_start else 1)  # it may compile
        table = AT_ITS_START if self.at_its_start else VARIABLES
        for name in draw.sample(list(table), k=draw.randrange(1, 3)):
            self.variables[name] = draw.choice(table[name])
        compiles = any(n.startswith(("CXX", "TORCHDYN", "TORCHIND")) for n in self.variables)
        self.command += [f"--compile={compiles}"]
        self.culprits = list(self.variables)

    def checkpoint(self) -> None:
        shutil.copytree(self.whole, self.out)
        name = draw.choice(["ckpt.pt", "ckpt.pt", "best.pt", "metrics.jsonl"])
        damage(self.out / name)
        self.culprits = [name, str(self.out)]
        self.command += ["--init_from=resume", f"--max_iters={ITERATIONS + 1}"]
        if name != "ckpt.pt" and draw.random() < 0.8:
            script, *more = draw.choice(
                [("sample.py", "--device=cpu", "--max_new_tokens=5"), ("convert.py", "--to=new")]
            )
            more += [f"--out_dir={self.out}"]
            if name == "metrics.jsonl":
                script, more = "plot.py", [str(self.out)]
            self.command = [sys.executable, str(ROOT / script), *more]

    def metadata(self) -> None:
        file = self.data / "meta.json"
        self.culprits = [str(self.data)]
        if draw.random() < 0.5:
            damage(file)
            return
        meta = json.loads(file.read_text())
        values = [None, -1, 0, 10**12, "", "object", "int8", [], {}, [1], 1.5, True, "ü" * 99]
        meta[draw.choice(list(meta))] = draw.choice(values)
        file.write_text(json.dumps(draw.choice([meta, meta, meta, [meta], 1, None])))

    def token_file(self) -> None:
        file = self.data / draw.choice(["train.bin", "val.bin"])
        damage(file)
        self.culprits = [str(self.data)]

    def hostile_checkpoint(self) -> None:
        shutil.copytree(self.whole, self.out)
        name = draw.choice(["best.pt", "ckpt.pt"])
        saved = checkpoint.read(self.out / name) | {"format": checkpoint.FORMAT}
        way = draw.randrange(5)
        if way == 0:
            key = draw.choice([*saved["model"], ESCAPE])
            weight = saved["model"].get(key, torch.ones(3, 3))
            saved["model"][key] = draw.choice(list(TENSORS.values()))(weight)
        elif way == 1:
            saved["model_config"][draw.choice([*saved["model_config"], ESCAPE])] = draw.choice(ODD)
        elif way == 2:
            saved[draw.choice([*saved, "pretrained"])] = draw.choice([*ODD, nested()])
        elif way == 3:
            inside = draw.choice([key for key in saved if isinstance(saved[key], dict)])
            saved[inside][draw.choice([*saved[inside], ESCAPE])] = draw.choice([*ODD, nested()])
        else:
            kind, alphabet = (
                draw.choice(["hf", "gpt2", "byte", "char"]),
                draw.choice(["ab", ESCAPE]),
            )
            saved["tokenizer"] = {"tokenizer": kind, "json": "{}", "alphabet": alphabet}
        (self.out / name).unlink()  # the old file is memory-mapped
        torch.save(saved, self.out / name)
        script, *more = draw.choice(
            [("sample.py", "--device=cpu", "--max_new_tokens=5"), ("convert.py", "--to=new")]
        )
        self.command = [sys.executable, str(ROOT / script), f"--out_dir={self.out}",
                        f"--ckpt={name}", *more]  # fmt: skip
        self.culprits = [name, "--start"]

    def prepare(self, *more: str) -> None:
        """Use the command that prepares a text."""
        self.command = [sys.executable, str(ROOT / "data/text/prepare.py"),
                        f"--out={self.folder / 'prepared'}", *more]  # fmt: skip

    def tokenizer(self) -> None:
        theirs, text = self.folder / "theirs", self.folder / "a.txt"
        theirs.mkdir()
        text.write_text("some text, <s> and more\n" * 50)
        made = json.loads(train_bpe(["some text"] * 9, 270).content)
        place = draw.choice([made, made["model"], made["model"]["vocab"], made["added_tokens"][0]])
        key = draw.choice([*place, ESCAPE])
        place[key] = draw.choice([*ODD[:-1], 2**30])
        (theirs / "tokenizer.json").write_text(json.dumps(made))
        for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
            if draw.random() < 0.5:
                keys = ["eos_token", "bos_token", "eos_token_id", "add_bos_token", ESCAPE]
                content = {draw.choice(keys): draw.choice(ODD[:-1]) for _ in range(2)}
                (theirs / name).write_text(json.dumps(draw.choice([content, [content]])))
        if draw.random() < 0.3:
            damage(theirs / "tokenizer.json")
        self.prepare(f"--input={text}", f"--tokenizer=hf:{theirs}")
        self.culprits = [str(theirs), "a.txt"]

    def text(self) -> None:
        name = draw.choice(["a.jsonl", "a.json", "a.ndjson.gz", "a.csv", "a.tsv", "a.txt", "a.md",
                            "a.parquet", "a.txt.zst", "a", f"a{ESCAPE}.jsonl"])  # fmt: skip
        rows = [draw.choice([{"text": "text ü"}] * 9 + [{"text": v} for v in ODD[:-1]] + ODD[:-1])
                for _ in range(30)]  # fmt: skip
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        content = draw.choice([content, content, json.dumps(rows).encode(), b"id,text\n1,x\n" * 20,
                               b"some text\r\n" * 50, draw.randbytes(500), b"",
                               b'{"text": "\xed\xa0\xbd"}\n' * 3 + content])  # fmt: skip
        if name.endswith(".gz") and draw.random() < 0.8:
            content = gzip.compress(content)
        path = self.folder / name
        path.write_bytes(content)
        if draw.random() < 0.2:
            damage(path)
        self.prepare(
            f"--input={path}",
            f"--tokenizer={draw.choice(['byte', 'char', 'bpe:260'])}",
            f"--skip_bad_rows={draw.random() < 0.5}",
            f"--num_proc={draw.choice([1, 1, 2])}",
        )
        self.culprits = ["/a", "would be empty", "--input"]

    def links(self) -> None:
        """A downloaded folder whose links point to one of the user's files."""
        self.notes.write_text("mine")
        script = draw.choice(["train.py", "prepare.py", "convert.py"])
        names = {
            "train.py": [
                ".lock",
                "ckpt.pt",
                "best.pt",
                "metrics.jsonl",
                "wandb_id",
                "previous",
                "ckpt.pt.tmp",
            ],
            "prepare.py": [
                "train.bin",
                "val.bin",
                "meta.json",
                "train.bin.tmp",
                "tokenizer.json",
            ],
            "convert.py": ["config.json", "model.tmp", "tokenizer.json", "model.safetensors"],
        }
        folder = {"train.py": self.out, "prepare.py": self.folder / "prepared",
                  "convert.py": self.folder / "new"}[script]  # fmt: skip
        folder.mkdir()
        for name in draw.sample(names[script], k=draw.randrange(1, 4)):
            (folder / name).symlink_to(self.notes)
        self.culprits = [str(folder), folder.name]
        if script == "prepare.py":
            (self.folder / "a.txt").write_text("some text\n" * 99)
            self.prepare(f"--input={self.folder / 'a.txt'}", "--tokenizer=byte")
        elif script == "convert.py":
            self.command = [sys.executable, str(ROOT / script), f"--out_dir={self.whole}",
                            f"--to={folder}"]  # fmt: skip

    def run(self) -> int | None:
        """The exit status of the command; None if it does not end in time."""
        if not self.at_its_start:
            process = start(self.command, self.folder, variables=self.variables)
            process.join(self.patience)
            status = process.exitcode
            process.kill()
            return status
        with open(self.folder / "log", "w") as log:
            process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=os.environ | self.variables,
                stdout=log,
                stderr=log,
            )
        try:
            return process.wait(self.patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def verdict(self, status: int | None) -> str:
        """The problem with how it ended; "" if there is none."""
        shown = (self.folder / "log").read_text(errors="replace")
        if status is None:
            return f"still running after {self.patience} s"
        if "Traceback" in shown:
            return "a traceback: " + shown.strip().splitlines()[-1][:200]
        if status < 0:
            return f"signal {-status}"
        errors = [line for line in shown.splitlines() if re.match(r"(rank \S+: )?error: ", line)]
        if status and len(errors) != 1:
            return f"status {status} with {len(errors)} lines of error: {shown[-300:]}"
        if "\x1b" in shown and self.kind not in ("command line", "config file"):
            return "a control character on the terminal"
        if self.notes.exists() and self.notes.read_text() != "mine":
            return "it changed a file elsewhere"
        if status and len(errors[0]) > 1500:
            return f"an error of {len(errors[0])} characters"
        if status and not any(culprit in errors[0] for culprit in self.culprits):
            return f"the error names no culprit: {errors[0]}"
        return self.silently_wrong() if status == 0 and "train.py" in self.command[1] else ""

    def silently_wrong(self) -> str:
        """How a run that succeeded ignored its settings; "" if it did not."""
        if "--init_from=resume" in self.command:  # accepted, so it must continue the saved run
            alone = one_more(self.data, self.whole)
            if "metrics.jsonl" in self.culprits:  # which may have lost lines
                shutil.copy(alone / "metrics.jsonl", self.out)
            return difference(self.out, alone, may_lack=False)
        if not (self.out / "ckpt.pt").exists():
            return ""  # another out_dir, or eval_only
        config = checkpoint.load(self.out / "ckpt.pt")["config"]
        settings = read_settings(ROOT / "train.py")
        for name, value in self.asked.items():
            wanted = parse(value, type(settings[name].default))
            if wanted not in (0, "auto", "resume") and config[name] != wanted:
                return f"asked for {name}={wanted!r:.80}, but trained with {config[name]!r}"
        if self.kind == "metadata" and (self.data / "meta.json").is_file():
            if losses(self.out) != losses(self.whole)[:2]:
                return "trained on different metadata without a message"
        return ""


def one_more(data: Path, whole: Path) -> Path:
    """The uninterrupted run, resumed for one more step."""
    out = whole.parent / "one more"
    if not out.exists():
        shutil.copytree(whole, out)
        more = ("--init_from=resume", f"--max_iters={ITERATIONS + 1}")
        start(train_command(data, out, *more), whole.parent).join()
    return out


def mislead(kind: str, data: Path, whole: Path) -> None:
    """Try one bad input."""
    trial = Trial(kind, data, whole)
    problem = trial.verdict(trial.run())
    tried[kind] += 1
    if problem:
        variables = [f"{name}={value}" for name, value in trial.variables.items()]
        fail(kind, [*variables, *trial.command], problem, trial.folder)
    shutil.rmtree(trial.folder)


def kill_preparation(path: Path, whole: Path) -> None:
    """Kill a prepare script with two threads twice, run it again, and compare the files."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    command = [sys.executable, str(ROOT / "data/text/prepare.py"), f"--input={path}",
               "--tokenizer=byte", "--num_proc=2", f"--out={folder / 'out'}"]  # fmt: skip
    kind = "killed preparation"
    signum = draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP))
    for n in range(3):  # the third one is not killed
        process = start(command, folder)
        if n < 2:
            process.join(draw.uniform(0.1, 1.0) * PREPARATION_SECONDS)
            if process.is_alive():
                tried[kind] += 1
                os.kill(process.pid, signum)
        process.join(limit_seconds)
    for name in ("train.bin", "val.bin", "meta.json"):
        if process.exitcode or (folder / "out" / name).read_bytes() != (whole / name).read_bytes():
            shown = (folder / "log").read_text(errors="replace")[-500:]
            return fail(kind, command, f"a different {name} after {signum.name}: {shown}", folder)
    shutil.rmtree(folder)


def kill_preparations(folder: Path) -> None:
    global PREPARATION_SECONDS
    prepare.BATCH = 2**14  # inherited by the processes
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} " * 9}) + "\n" for i in range(20_000)))
    began = time.monotonic()
    start([sys.executable, str(ROOT / "data/text/prepare.py"), f"--input={path}",
           "--tokenizer=byte", f"--out={folder / 'prepared'}"], folder).join()  # fmt: skip
    PREPARATION_SECONDS = time.monotonic() - began
    while sum(tried[kind] for kind in tried if "preparation" in kind) < preparations:
        kill_preparation(path, folder / "prepared")


PREPARATION_SECONDS = 1.0


def main() -> None:
    """Run all kinds of faults."""
    matplotlib.use("Agg")
    gc.collect()
    gc.freeze()  # forked processes skip these objects in garbage collections
    text = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(20))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, whole, whole_of_two = folder / "data", folder / "whole", folder / "whole of two"
        data.mkdir()
        write_dataset(data, CharTokenizer.train(text), split_text(text))
        seconds = 0.0
        for out in (folder / "warm up", whole):
            began = time.monotonic()
            process = start(train_command(data, out), folder)
            process.join()
            seconds = time.monotonic() - began
        if process.exitcode:
            sys.exit((folder / "log").read_text())
        if kills > 9 or stops > 3:
            start_torchrun(train_command(data, whole_of_two), folder).wait()
        print(f"seed {seed}; a run takes {seconds:.1f} s", flush=True)
        for kinds, number in ((KILLS, kills), (STOPS, stops)):
            counted = Counter(kinds[n % len(kinds)] for n in range(number))
            for kind, count in counted.items():
                alone = whole_of_two if "torchrun" in kind else whole
                while tried[kind] + failed[kind] < count:
                    interrupt(kind, data, alone, seconds, min(8, count - tried[kind]))
        if preparations:
            kill_preparations(folder)
        for n in range(fuzz):
            mislead(WRONG[n % len(WRONG)], data, whole)


if __name__ == "__main__":
    began = time.monotonic()
    try:
        main()
    except KeyboardInterrupt:
        pass
    for kind, count in tried.items():
        print(f"{kind:34} tried {count:5}  failed {failed[kind]:5}")
    print(f"seed {seed}, {time.monotonic() - began:.0f} s")
    sys.exit(bool(failed))
