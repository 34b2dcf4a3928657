"""Limited file systems, multi-process launches, shared folders, notebooks (F70 to F78)."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import zlib

import pytest
import torch
from conftest import ROOT, TINY, free_port
from torch import nn

import model as model_file
from configurator import read_settings, resolve
from model import GPT, GPTConfig
from steady import UserError, checkpoint, distributed, folder
from steady.optim import schedule_note

HEADER = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <sys/stat.h>
"""
SHIMS = {  # limits of file systems such as CIFS, some FUSE ones, WSL's drives, NFS
    "no fsync on folders": """int fsync(int f) {
        struct stat s; int (*r)(int) = dlsym(RTLD_NEXT, "fsync");
        if (!fstat(f, &s) && S_ISDIR(s.st_mode)) { errno = EINVAL; return -1; } return r(f); }""",
    "no fsync": "int fsync(int f) { errno = EOPNOTSUPP; return -1; }",
    "no locks": """int fcntl64(int f, int c, ...) {
        int (*r)(int, int, ...) = dlsym(RTLD_NEXT, "fcntl64");
        va_list a; va_start(a, c); void *p = va_arg(a, void *); va_end(a);
        if (c == F_SETLK || c == F_SETLKW) { errno = ENOLCK; return -1; } return r(f, c, p); }""",
    "locks not supported": """int fcntl64(int f, int c, ...) {
        int (*r)(int, int, ...) = dlsym(RTLD_NEXT, "fcntl64");
        va_list a; va_start(a, c); void *p = va_arg(a, void *); va_end(a);
        if (c == F_SETLK || c == F_SETLKW) { errno = EOPNOTSUPP; return -1; }
        return r(f, c, p); }""",
    "no modes": "int fchmod(int f, mode_t m) { errno = EPERM; return -1; }",
    "no hints": "int posix_fadvise64(int f, off_t a, off_t b, int c) { return ESPIPE; }"
                "int posix_fadvise(int f, off_t a, off_t b, int c) { return ESPIPE; }",
    "no maps, no updates": """
    static int ours(int f) {
        char a[64], b[512]; sprintf(a, "/proc/self/fd/%d", f);
        int n = readlink(a, b, 511); if (n < 0) return 0;
        b[n] = 0; return strstr(b, ".pt") != 0; }
    void *mmap64(void *a, size_t n, int p, int fl, int f, off_t o) {
        void *(*r)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap64");
        if (f >= 0 && ours(f)) { errno = ENODEV; return MAP_FAILED; }
        return r(a, n, p, fl, f, o); }
    void *mmap(void *a, size_t n, int p, int fl, int f, off_t o) {
        return mmap64(a, n, p, fl, f, o); }
    int open64(const char *p, int fl, ...) {
        int (*r)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
        va_list a; va_start(a, fl); int m = va_arg(a, int); va_end(a);
        if (strstr(p, ".pt") && (fl & O_ACCMODE) == O_RDWR && !(fl & O_CREAT)) {
            errno = EOPNOTSUPP; return -1; }
        return r(p, fl, m); }""",
}  # fmt: skip


@pytest.mark.skipif(
    not shutil.which("gcc") or sys.platform != "linux", reason="needs gcc and Linux"
)
@pytest.mark.parametrize(
    "names",
    [("no fsync on folders", "no locks", "no hints"),
     ("no fsync", "locks not supported", "no modes", "no maps, no updates")],
)  # fmt: skip
def test_f70_a_file_system_that_cannot_do_something_stops_nothing(sums, tmp_path, names):
    (tmp_path / "shim.c").write_text(HEADER + "\n".join(SHIMS[name] for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", "shim.so", "shim.c", "-ldl"],
                   cwd=tmp_path, check=True)  # fmt: skip
    code = (
        "import sys, runpy\n"
        "for arguments in sys.argv[1].split('|'):\n"
        "    sys.argv = arguments.split()\n"
        "    try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
    )
    (tmp_path / "a.txt").write_text("text " * 99)
    train = ["train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}"]
    steps = [
        ["data/text/prepare.py", f"--input={tmp_path / 'a.txt'}", "--tokenizer=byte",
         f"--out={tmp_path / 'data'}"],
        [*train, "--max_iters=2"], [*train, "--max_iters=3", "--init_from=resume"],
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, "|".join(" ".join(step) for step in steps)], cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(tmp_path / "shim.so")}, capture_output=True, text=True,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "warning" not in shown, shown
    assert ("cannot be locked" in shown) is any("locks" in name for name in names)
    assert checkpoint.load(tmp_path / "out" / "ckpt.pt")["iter_num"] == 3
    assert json.loads((tmp_path / "data" / "meta.json").read_text())["tokens"]["train"] > 9


def test_f70_a_disk_that_fails_is_still_an_error(tmp_path, monkeypatch):
    def fail(number):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"), folder.atomic_write(tmp_path / "a") as file:
        file.write(b"x")
    assert not list(tmp_path.iterdir())


def test_f71_processes_of_one_start_meet_however_often_they_were_restarted():
    """The store still has the keys of earlier starts."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    prefixes = []
    for start in range(3):
        found = {}

        def meet(rank, found=found):
            process = distributed.Process(rank, 3)
            own = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False)
            found[rank] = distributed.rendezvous_prefix(own, process)

        ranks = [threading.Thread(target=meet, args=(rank,)) for rank in (2, 1, 0)]
        for thread in ranks:  # rank 0 comes last, so the others first see keys of an earlier start
            thread.start()
            time.sleep(0.1 * (start > 0))
        for thread in ranks:
            thread.join(20)
        assert len(set(found.values())) == 1 and len(found) == 3
        prefixes.append(found[0])
    assert len(set(prefixes)) == 3


# ---- F73: one value per setting -----------------------------------------------------------------


def test_f73_several_commands_under_one_torchrun_have_names_of_their_own(monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", str(store.port))):  # fmt: skip
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:  # variables left over in the shell: do not ask the store
        patch.setattr(torch.distributed, "TCPStore", None)
        assert distributed.first_in_launch("names", "own") == "own"
    monkeypatch.setenv("RANK", "0")
    found = []
    for seed, value in ((1, "a"), (2, "b"), (1, "of a restart")):
        monkeypatch.setattr(sys, "argv", ["train.py", f"--seed={seed}"])
        found.append(distributed.first_in_launch("names", value))
    assert found == ["a", "b", "a"]


# ---- F74: shared folders ------------------------------------------------------------------------


def test_f74_a_lock_in_a_groups_folder_is_the_groups(tmp_path):
    for mode, expected in ((0o775, 0o664), (0o700, 0o600), (0o777, 0o666)):
        out = tmp_path / oct(mode)
        out.mkdir()
        out.chmod(mode)
        before = os.umask(0o077)
        try:
            folder.claim(out)
        finally:
            os.umask(before)
        assert (out / ".lock").stat().st_mode & 0o777 == expected


# ---- F75: schedules -----------------------------------------------------------------------------

DEFAULTS = resolve(read_settings(ROOT / "train.py"), [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_iters": 300}, "ends at 15% of its peak; use --warmup_iters=15$"),
        ({"max_iters": 300, "lr_decay_iters": 9000}, "use --warmup_iters=15 --lr_decay_iters=0$"),
        ({"max_iters": 300, "decay_lr": False}, "takes 2000 .* ends at 300: .* at 15% of its"),
        ({"max_iters": 10}, "ends at 0.5% of its peak"),
        ({"max_iters": 300, "lr_schedule": "wsd", "lr_decay_iters": 0}, "ends at 15% of its peak"),
        ({"max_iters": 9000, "lr_decay_iters": 5000}, "the schedule at 5000, but the run at 9000"),
        ({"max_iters": 9000, "lr_decay_iters": 90000}, "at 90000, but .* ends at 9.% of"),
        ({"max_iters": 9000, "lr_decay_iters": 1000}, "at iteration 2000 .* at 1000, but"),
        ({"max_iters": 9000, "lr_decay_iters": 0}, None),
        ({"max_iters": 9000, "lr_decay_iters": 9000}, None),
        ({"max_iters": 9000, "decay_lr": False}, None),
        ({"max_iters": 300, "decay_lr": False, "learning_rate": 0.0}, None),
    ],
)  # fmt: skip
def test_f75_a_schedule_that_does_not_fit_its_run_gets_a_note(change, words):
    import re

    note = schedule_note(DEFAULTS | {"warmup_iters": 2000} | change)
    assert note is None if words is None else re.search(words, note), note


# ---- F76: plots of runs with the same name ------------------------------------------------------


def test_f76_runs_are_told_apart_by_the_shortest_names(run, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    entry = {"iter": 0, "loss": 1.0, "lr": 1e-3, "ms": 1.0, "tokens_per_s": 1.0}
    for name in ("a/one", "a/two", "b/one"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(entry) + "\n")

    def labels(*paths):
        run("plot.py", *paths, f"--png={tmp_path / 'a.png'}")
        lines = pyplot.gcf().axes[0].lines
        assert len({line.get_color() for line in lines}) == len(lines)
        return [line.get_label().partition(":")[0] for line in lines]

    assert labels(tmp_path / "a/one", tmp_path / "a/two") == ["one", "two"]
    assert labels(tmp_path / "a/one", tmp_path / "b/one", tmp_path / "a/two") == [
        "a/one", "b/one", "two"]  # fmt: skip
    monkeypatch.chdir(tmp_path / "a" / "one")
    assert labels(".") == ["one"]


# ---- F77: srun and mpirun -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
         "srun or mpirun has started 2 .*torchrun --standalone --nproc_per_node=2"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}, "has started 4 processes"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2"},
         "torchrun .*docs/several-gpus.md: several machines"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 processes"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "PMI_SIZE": "2"}, "mpirun has"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # the batch script itself
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4"},
         None),  # the shell of salloc -n 4
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "RANK": "0", "LOCAL_RANK": "0",
          "WORLD_SIZE": "1"}, None),  # torchrun within srun
    ],
)  # fmt: skip
def test_f77_without_torchrun_the_command_to_use_is_named(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if words is None:
        assert distributed.this_process().world_size == 1
        return
    with pytest.raises(UserError, match=words):
        distributed.this_process()


def test_f79_the_sbatch_script_trains_resumes_and_requeues(sums, tmp_path):
    """Runs the script from the docs with SLURM's variables and stubs for its commands."""
    page = (ROOT / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    script = textwrap.dedent(page[page.index("    #!/bin/bash") :].partition("\n\n")[0])
    commands = {
        "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi',
        "srun": 'exec "$@"',
        "torchrun": 'echo "$@" >> started; [ -n "$ONLY" ] && exit; '
        'rest=$(echo " $@" | sed \'s/ --nproc_per_node=8//; s| config/train_gpt2.py||; '
        f"s| train.py| {ROOT}/train.py|; s/:29500/:{free_port()}/'); "
        f"exec {sys.executable} -m torch.distributed.run $rest {' '.join(TINY)} "
        f"--dataset={sums} --max_iters=1",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script)
    for only, left in (("", 3600), ("1", 100)):
        slurm = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n[1-1]",
                 "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0",
                 "SLURM_JOB_END_TIME": str(int(time.time()) + left), "ONLY": only,
                 "PATH": f"{tmp_path}:{os.environ['PATH']}"}  # fmt: skip
        done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=os.environ | slurm,
                              capture_output=True, text=True, timeout=50)  # fmt: skip
        assert "rror" not in done.stderr, done.stderr
        assert (tmp_path / "requeued").exists() is (left == 100)
    assert checkpoint.load(tmp_path / "out-gpt2" / "ckpt.pt")["iter_num"] == 1
    first, second = (tmp_path / "started").read_text().splitlines()
    assert "--init_from=resume" in second and "--init_from=resume" not in first
    assert "--rdzv_id=17 --rdzv_endpoint=127.0.0.1:29500 train.py" in first
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


# ---- F78: configs in the style that people write ------------------------------------------------


def test_f78_a_star_import_and_carriage_returns(run, sums, tmp_path, monkeypatch):
    (tmp_path / "base.py").write_text(
        "import time\nfrom math import sqrt\nmax_iters = 2\nclass Helper: pass\n"
    )
    (tmp_path / "star.py").write_bytes(b"from math import *\r\nfrom base import *\r\nseed = 8\r\n")
    run("train.py", *TINY, f"{tmp_path / 'star.py'}\r", f"--dataset={sums}\r", "--eval_iters=1\r",
        f"--out_dir={tmp_path / 'out'}\r")  # fmt: skip
    saved = checkpoint.load(tmp_path / "out" / "ckpt.pt")
    assert (saved["iter_num"], saved["config"]["seed"]) == (2, 8)
    (tmp_path / "base.py").write_text("max_itres = 2\n")
    with pytest.raises(ValueError, match="unknown setting 'max_itres' in"):
        run("train.py", str(tmp_path / "star.py"))
    (tmp_path / "bases").mkdir()  # on sys.path, as the project's root is
    (tmp_path / "bases" / "far_base.py").write_text("max_itres = 2\n")
    monkeypatch.syspath_prepend(tmp_path / "bases")
    (tmp_path / "far.py").write_text("from far_base import *\n")
    with pytest.raises(ValueError, match="unknown setting 'max_itres' in"):
        run("train.py", str(tmp_path / "far.py"))
    (tmp_path / "base.py").write_text("seed = 1\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "base.py").write_text("max_iters = 7\n")
    (tmp_path / "other" / "c.py").write_text("from base import *\n")
    two = resolve(read_settings(ROOT / "train.py"), [
        str(tmp_path / "star.py"), str(tmp_path / "other" / "c.py")])  # fmt: skip
    assert two["max_iters"] == 7
    # a base with the name of a module that is loaded already
    model = sys.modules["model"]
    (tmp_path / "other" / "model.py").write_text("max_iters = 9\n")
    (tmp_path / "other" / "c.py").write_text("from model import *\n")
    found = resolve(read_settings(ROOT / "train.py"), [str(tmp_path / "other" / "c.py")])
    assert found["max_iters"] == 9 and sys.modules["model"] is model


def test_f78_a_script_may_be_executed_in_a_notebook(fork, sums, tmp_path):
    code = (
        "import sys, types\n"
        "sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n"
        "sys.argv = ['ipykernel_launcher.py', '-f', '/tmp/kernel.json']\n"
        "source = open('train.py').read()\n"
        f"paths = {(str(sums), str(tmp_path / 'out'))!r}\n"
        "source = source.replace('dataset = \"openwebtext\"', f'dataset = {paths[0]!r}')\n"
        "source = source.replace('out_dir = \"out\"', f'out_dir = {paths[1]!r}')\n"
        "for old, new in ("
        "('max_iters = 600000', 'max_iters = 2'), ('n_embd = 768', 'n_embd = 16'),"
        "('n_layer = 12', 'n_layer = 1'), ('n_head = 12', 'n_head = 2'),"
        "('block_size = 1024', 'block_size = 8'), ('eval_iters = 200', 'eval_iters = 1'),"
        "('compile = True', 'compile = False'), ('steps = 40', 'steps = 1')):\n"
        "    source = source.replace(old, new)\n"
        "namespace = {}\n"
        "exec(source, namespace)\n"
        "print(namespace['__file__'])\n"
    )
    process = fork("", code=code)
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    assert shown.strip().endswith("train.py")
    assert (tmp_path / "out" / "ckpt.pt").exists()
    (tmp_path / "study.py").write_text("n_layer = 1\nexec(open('train.py').read())\n")
    process = fork(str(tmp_path / "study.py"), "--help")  # from a file of your own
    shown = process.stdout.read()
    assert process.wait() == 0 and "--max_iters=600000" in shown, shown


# ---- F79: models larger than one machine's memory -----------------------------------------------


class ZeroLinear(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class Shifted(nn.LayerNorm):
    def __init__(self, size):
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size).add_(0.3))


def for_blocks(change):
    return lambda model: [change(block) for block in model.blocks]


CHANGES = {  # a change to GPT.__init__, and the error under fsdp (None: it works)
    "nothing": (lambda model: None, None),
    "layernorm": (lambda model: setattr(model, "final_norm", nn.LayerNorm(16)), None),
    "bias": (for_blocks(lambda b: setattr(b.mlp, "down_proj", nn.Linear(64, 16))), None),
    "conv": (for_blocks(lambda b: setattr(b, "conv", nn.Conv1d(16, 16, 3))), None),
    "reset": (for_blocks(lambda b: setattr(b.mlp, "down_proj", ZeroLinear(64, 16, False))), None),
    "counter": (lambda model: model.register_buffer("n", torch.zeros((1,), dtype=int)), None),
    "full": (for_blocks(lambda b: setattr(b, "scale", nn.Parameter(torch.full((4,), 0.5)))),
             "blocks.0.scale, blocks.1.scale: set their initial values in"),
    "numbers": (for_blocks(lambda b: setattr(b, "mix", nn.Parameter(torch.tensor([0.7, 0.3])))),
                "blocks.0.mix, blocks.1.mix:"),
    "another third block": (lambda model: setattr(model.blocks[2], "more", Shifted(16)),
                            "cannot use blocks.2.more.bias:"),
    "positions": (lambda model: model.register_buffer("pos", torch.arange(8)), "use pos:"),
    "mask": (lambda model: model.register_buffer("mask", torch.ones(4, 4).tril().bool()), "mask"),
    "freqs": (lambda model: model.register_buffer("f", torch.polar(torch.ones(4), torch.ones(4))),
              "use f:"),
    "early zeros in the last block": (
        lambda model: nn.init.zeros_(model.blocks[-1].mlp.up_proj.weight),
        "cannot use blocks.2.mlp.up_proj.weight:"),
    "zeros in the last block": (lambda model: nn.init.zeros_(model.blocks[-1].mlp.up_proj.weight),
                                "cannot use blocks.2.mlp.up_proj.weight:"),
    "zeros": (for_blocks(lambda b: nn.init.zeros_(b.attention.o_proj.weight)),
              "blocks.0.attention.o_proj.weight"),
    "apply": (lambda model: model.apply(lambda m: isinstance(m, nn.Linear)
                                        and m.weight.data.normal_(0, 0.3)), "q_proj.weight"),
    "data": (lambda model: model.token_embedding.weight.data.mul_(0.1), "token_embedding.weight"),
    "norm": (for_blocks(lambda b: b.mlp_norm.weight.data.fill_(0.1)), "blocks.0.mlp_norm.weight"),
    "shifted": (lambda model: setattr(model, "final_norm", Shifted(16)), "final_norm.bias"),
    "tied across": (lambda model: setattr(
        model.blocks[2].mlp.up_proj, "weight", model.blocks[0].mlp.up_proj.weight),
        "cannot use blocks.0.mlp.up_proj.weight: do not share parameters across blocks"),
    "norm of a block": (lambda model: setattr(
        model.final_norm, "weight", model.blocks[0].mlp_norm.weight), "cannot use"),
    "one mlp": (lambda model: setattr(model.blocks[1], "mlp", model.blocks[0].mlp),
                "cannot use blocks.0.mlp.gate_proj.weight, blocks.0.mlp.up_proj"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_f79_values_that_fsdp_does_not_know_are_refused_by_name(name):
    change, message = CHANGES[name]
    early = message is None or name.startswith("early")

    class Student(GPT):
        def compute_rope_tables(self):  # in the middle of GPT.__init__
            super().compute_rope_tables()
            if early and not self.initial.draws:  # change layers
                change(self)

        def init_weights(self):  # at its end
            super().init_weights()
            if not early:  # change values
                change(self)

    config = GPTConfig(block_size=8, vocab_size=64, n_layer=3, n_head=2, n_embd=16)
    with torch.device("meta"):
        model = Student(config)
    state = torch.get_rng_state()
    if message is None:
        distributed.require_initial_values(model)
        assert torch.equal(state, torch.get_rng_state())
        for _ in distributed.initialized_groups(model, torch.device("cpu")):
            pass
        assert not any(t.isnan().any() for t in model.state_dict().values())
    else:
        with pytest.raises(UserError, match=message):
            distributed.require_initial_values(model)


def test_f79_values_may_be_rounded_differently(monkeypatch):
    tables, calls = model_file.rope_tables, itertools.count()

    def rounded(*args):
        factor = 1 + next(calls) * 1.2e-7
        return [table * factor for table in tables(*args)]

    monkeypatch.setattr(model_file, "rope_tables", rounded)
    config = GPTConfig(block_size=8, vocab_size=64, n_layer=3, n_head=2, n_embd=16)
    with torch.device("meta"):
        model = GPT(config)
    distributed.require_initial_values(model)
    other = torch.ones(3)
    counted = torch.arange(16384.0)
    assert not distributed.equal_up_to_rounding(counted, counted + 1)
    assert not distributed.equal_up_to_rounding(other, other * torch.nan)
    assert not distributed.equal_up_to_rounding(other, other[:2])
    mask = torch.full((3,), torch.finfo(torch.float32).min)  # its norm would be infinite
    assert not distributed.equal_up_to_rounding(mask * 0, mask)
    half = torch.linspace(0.1, 1.0, 9, dtype=torch.float16)
    next_half = torch.nextafter(half, half + 1)
    assert distributed.equal_up_to_rounding(half, next_half)


def test_f79_meta_weights_are_drawn_as_others_are(monkeypatch):
    config = GPTConfig(block_size=8, vocab_size=64, n_layer=3, n_head=2, n_embd=16)
    torch.manual_seed(5)
    expected = GPT(config)
    torch.manual_seed(5)
    with torch.device("meta"):
        model = GPT(config)
    groups = [[model.blocks[2]], [model.blocks[0]], [model]]  # in any order
    monkeypatch.setattr(distributed, "fsdp_groups", lambda model: groups)
    for _ in distributed.initialized_groups(model, torch.device("cpu")):
        pass
    assert model.lm_head.weight is model.token_embedding.weight
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        found = model.get_parameter(name) if "rope" not in name else model.get_buffer(name)
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize("sizes", [(9,), (5, 1, 0), (3 * 2**20, 2**20 + 7, 2**20, 11)])
def test_f79_checksums_of_parts_make_that_of_the_whole(tmp_path, sizes):
    path, found, before = tmp_path / "file", 0, 0
    path.touch()
    whole = os.urandom(sum(sizes))
    for size in sizes:
        part = torch.tensor([*whole[before : before + size]], dtype=torch.uint8)
        found ^= checkpoint.write_data(path, part, 7, before, len(whole) - before - size)
        before += size
    assert found == zlib.crc32(whole) and path.read_bytes() == bytes(7) + whole
