import collections
import contextlib
import errno
import os
import pickle
import random
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY

from steady import UserError, checkpoint, distributed, memory
from steady.distributed import Process
from steady.stop import Saving, StopRequest


def test_f71_only_a_restart_of_the_launch_that_saved_goes_on(tmp_path, monkeypatch):
    path, process = tmp_path / "ckpt.pt", Process()
    checkpoint.save(path, {})
    assert checkpoint.resolve_init_from("scratch", path, process) == "scratch"  # no restart
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(distributed, "launch_id", lambda: "this one")
    assert (
        checkpoint.resolve_init_from("scratch", path, process) == "scratch"
    )  # saved by another launch
    checkpoint.save(path, {})
    assert checkpoint.resolve_init_from("scratch", path, process) == "resume"
    path.unlink()
    assert checkpoint.resolve_init_from("scratch", path, process) == "scratch"


def test_round_trip(tmp_path):
    path = tmp_path / "ckpt.pt"
    content = {"model": {"w": torch.randn(3, 3)}, "iter_num": 7, "config": {"a": 1.5, "b": "x"}}
    checkpoint.save(path, content)
    loaded = checkpoint.read(path)
    assert torch.equal(loaded["model"]["w"], content["model"]["w"])
    assert loaded["iter_num"] == 7 and loaded["config"] == content["config"]
    assert os.listdir(tmp_path) == ["ckpt.pt"]


def test_a_loss_may_be_a_tensor_and_the_model_one_that_you_have_compiled(tmp_path):
    layer = torch.nn.Linear(1, 1)
    layer.mask = torch.nn.Parameter(torch.tensor(-torch.inf), requires_grad=False)
    compiled = torch.compile(layer)
    content = {"model": compiled, "best_val_loss": torch.tensor(2.5)}
    checkpoint.save(tmp_path / "best.pt", content)
    loaded = checkpoint.read(tmp_path / "best.pt")
    assert loaded["best_val_loss"] == 2.5 and type(loaded["best_val_loss"]) is float
    assert loaded["model"].keys() == {"weight", "bias", "mask"}  # not _orig_mod.weight (F28)
    checkpoint.load_weights(compiled, loaded["model"], Path("best.pt"))


def test_hooks_on_loading_see_all_weights():
    layer, seen = torch.nn.Linear(1, 1), []
    layer.register_load_state_dict_post_hook(lambda layer, _: seen.append(layer.weight.item()))
    layer.register_load_state_dict_pre_hook(lambda layer, state, *_: seen.append(len(state)))
    weights = {"weight": torch.full((1, 1), 7.0), "bias": torch.zeros(1)}
    checkpoint.load_weights(layer, weights, Path("best.pt"))
    assert seen == [2, 7.0]


def test_weights_that_were_untied_do_not_fit_a_model_that_ties_them():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model["b"].weight = model["a"].weight
    with pytest.raises(ValueError, match="two values for a.weight and b.weight, which model.py"):
        checkpoint.load_weights(model, weights, Path("best.pt"))
    checkpoint.load_weights(model, weights | {"b.weight": weights["a.weight"]}, Path("best.pt"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_f19_weights_that_are_not_finite_replace_no_good_ones(tmp_path, value):
    path = tmp_path / "ckpt.pt"
    checkpoint.save(path, {"model": {"v": torch.ones(3), "w": torch.ones(3)}, "iter_num": 7})
    weights = {"v": torch.ones(3), "w": torch.tensor([1.0, value])}
    with pytest.raises(ValueError, match="ckpt.pt: w has values that are not finite"):
        checkpoint.save(path, {"model": weights, "iter_num": 8})
    assert checkpoint.read(path)["iter_num"] == 7


def test_f19_only_frozen_parameters_may_be_infinite_and_none_nan(tmp_path):
    model, path = torch.nn.Linear(2, 2), tmp_path / "ckpt.pt"
    model.mask = torch.nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    checkpoint.save(path, {"model": model, "iter_num": 7})
    checkpoint.load_weights(model, checkpoint.read(path)["model"], path)
    with torch.no_grad():
        model.mask[0] = torch.nan
    with pytest.raises(ValueError, match="ckpt.pt: mask has values that are not finite"):
        checkpoint.save(path, {"model": model, "iter_num": 8})
    weights = checkpoint.read(path)["model"] | {"weight": torch.full((2, 2), torch.nan)}
    with pytest.raises(ValueError, match="ckpt.pt: weight has values that are not finite"):
        checkpoint.load_weights(model.requires_grad_(False), weights, path)


class Malicious:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("zipped", [True, False])
def test_f29_malicious_checkpoint_is_refused_and_not_executed(tmp_path, zipped):
    path, proof = tmp_path / "ckpt.pt", tmp_path / "executed"
    torch.save(
        {"format": 1, "model": Malicious(f"touch {proof}")},
        path,
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(ValueError, match="ckpt.pt"):
        checkpoint.load(path)
    assert not proof.exists()
    torch.load(path, weights_only=False)  # a plain torch.load runs the code
    assert proof.exists()


def test_plain_pickle_is_refused_and_not_executed(tmp_path):
    path, proof = tmp_path / "ckpt.pt", tmp_path / "executed"
    path.write_bytes(pickle.dumps(Malicious(f"touch {proof}")))
    with pytest.raises(ValueError, match="ckpt.pt"):
        checkpoint.load(path)
    assert not proof.exists()


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_truncated_checkpoint_is_one_line(tmp_path, keep):
    path = tmp_path / "ckpt.pt"
    checkpoint.save(path, {"model": {"w": torch.randn(100, 100)}})
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(ValueError, match="damaged or not a checkpoint") as error:
        checkpoint.load(path)
    assert "\n" not in str(error.value)


def test_foreign_and_missing_checkpoints_are_named(tmp_path):
    path = tmp_path / "ckpt.pt"
    with pytest.raises(ValueError, match="no checkpoint at .*check the folder"):
        checkpoint.load(path)
    torch.save({"model": {}, "model_args": {}}, path)
    with pytest.raises(ValueError, match="not a steadyGPT checkpoint"):
        checkpoint.load(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="not a steadyGPT checkpoint of format 1;"):
        checkpoint.load(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="damaged or not a checkpoint: File is not a zip"):
        checkpoint.load(path)


FULL_DISK = """
import resource, signal, sys, torch
from steady import checkpoint
from pathlib import Path
path = Path({path!r})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    {save}
except (OSError, RuntimeError) as error:
    sys.exit(3)
"""


def test_what_a_checkpoint_of_ones_own_may_hold(tmp_path):
    lazy = torch.polar(torch.ones(4), torch.arange(4.0)).conj()
    checkpoint.save(tmp_path / "a.pt", {"model": {}, "lazy": lazy, "negative": lazy.imag})
    found = checkpoint.read(tmp_path / "a.pt")
    assert torch.equal(found["lazy"], lazy) and torch.equal(found["negative"], lazy.imag)
    for key in ("format", "launch", "model_code"):
        saving = Saving(
            tmp_path / "ckpt.pt", lambda key=key: {key: "v2"}, Process(), True, "", print,
            StopRequest(Process(), saves=False),
        )  # fmt: skip
        with pytest.raises(UserError, match=f"their own '{key}': rename yours"):
            saving.__enter__()


@pytest.mark.skipif(sys.platform != "linux", reason="uses the file size limit of Linux")
def test_f30_full_disk_keeps_the_old_checkpoint(fork, tmp_path):
    path = tmp_path / "ckpt.pt"

    def save_with_full_disk(save):
        return fork("", code=FULL_DISK.format(path=str(path), save=save)).wait()

    checkpoint.save(path, {"iter_num": 1})
    big = "{'iter_num': 2, 'w': torch.randn(100_000)}"
    assert save_with_full_disk(f"checkpoint.save(path, {big})") == 3
    assert checkpoint.read(path)["iter_num"] == 1
    assert os.listdir(tmp_path) == ["ckpt.pt"]
    assert save_with_full_disk(f"torch.save({big}, path)") != 0
    with pytest.raises(ValueError, match="damaged"):  # a plain torch.save destroyed it
        checkpoint.load(path)


def test_f30_kill_while_saving_keeps_a_whole_checkpoint(fork, tmp_path):
    """The kills are spread over the duration of a save."""
    path = tmp_path / "ckpt.pt"
    code = (
        "import itertools, torch; from pathlib import Path; from steady import checkpoint\n"
        "w = torch.zeros(2_000_000)\n"
        "for i in itertools.count(1):\n"
        f"    checkpoint.save(Path({str(path)!r}), {{'iter_num': i, 'w': w}})\n"
        "    print(i, flush=True)\n"
    )
    for part in range(8):
        process = fork("", code=code)
        process.stdout.readline()
        began = time.perf_counter()
        process.stdout.readline()
        time.sleep((time.perf_counter() - began) * part / 8)
        process.kill()
        process.wait()
        assert checkpoint.read(path)["iter_num"] >= 2


# ---- flipped bits and wrong content --------------------------------------------------------------


def flipped(path, place):
    """A copy of the file `path` with one bit flipped."""
    content = bytearray(path.read_bytes())
    content[place // 8] ^= 1 << place % 8
    path.with_name("flipped.pt").write_bytes(content)
    return path.with_name("flipped.pt")


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def test_f46_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    """STEADY_FLIPS=500 tries 500 bits."""
    path, draw = tmp_path / "ckpt.pt", random.Random(1)
    content = {"model": {"w": torch.randn(40, 40)}, "iter_num": 7, "config": {"a": 1.5, "b": "x"}}
    checkpoint.save(path, content)
    bits = 8 * path.stat().st_size
    loaded, naive = checkpoint.read(path), 0
    for place in draw.sample(range(bits), int(os.environ.get("STEADY_FLIPS", 60))):
        damaged = flipped(path, place)
        try:
            assert same(checkpoint.read(damaged), loaded), f"bit {place}"
        except ValueError as error:
            assert "\n" not in str(error) and "flipped.pt" in str(error)
        with contextlib.suppress(Exception):
            naive += not same(torch.load(damaged), loaded)
    assert naive > 10  # how often torch.load silently returns wrong content


def test_f46_a_disk_that_gives_back_something_else_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path, sync = tmp_path / "ckpt.pt", os.fsync
    checkpoint.save(path, {"iter_num": 1})

    def turn_a_bit(descriptor):
        sync(descriptor)
        (written,) = tmp_path.glob("*.tmp")
        written.write_bytes(flipped(written, 8 * 80).read_bytes())
        (tmp_path / "flipped.pt").unlink()

    monkeypatch.setattr("steady.folder.os.fsync", turn_a_bit)
    said = []
    assert not checkpoint.try_save(path, {"iter_num": 2}, Process(), said.append)
    assert "the last good one is kept" in said[0] and "checksum" in said[0]
    assert os.listdir(tmp_path) == ["ckpt.pt"] and checkpoint.read(path)["iter_num"] == 1


@pytest.mark.parametrize(("reached", "read"), [(7, 0), (9, 1)])
def test_f79_a_run_stopped_by_a_signal_saves_without_reading_back(
    tmp_path, monkeypatch, reached, read
):
    """Reading back doubles the time, and torchrun kills its workers 30 s after SIGTERM."""
    calls, path = [], tmp_path / "ckpt.pt"
    monkeypatch.setattr(checkpoint, "check_sums", lambda *_: calls.append(1))
    state = {"iter_num": reached, "config": {"max_iters": 9}}
    with Saving(path, lambda: state, Process(), True, "", print, StopRequest(Process(), False)):
        pass
    assert len(calls) == read
    monkeypatch.undo()
    assert checkpoint.read(path)["iter_num"] == reached


@pytest.mark.parametrize("same_name", [False, True])
def test_f81_parts_that_torch_would_not_read_as_they_are_checked_are_refused(tmp_path, same_name):
    """Compressed parts pass their checksums, but torch maps the compressed bytes as weights. If two
    parts have the same name, torch may read the other one."""
    path, packed = tmp_path / "ckpt.pt", tmp_path / "packed.pt"
    checkpoint.save(path, {"model": {"w": torch.zeros(1000)}})
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w") as target:
        for part in source.infolist():
            kind = zipfile.ZIP_STORED if same_name else zipfile.ZIP_DEFLATED
            target.writestr(part.filename, source.read(part), kind)
        if same_name:
            with pytest.warns(UserWarning, match="Duplicate"):
                target.writestr(part.filename, source.read(part))
    with zipfile.ZipFile(packed) as archive:
        assert archive.testzip() is None
    with pytest.raises(ValueError, match="the same name" if same_name else "is compressed"):
        checkpoint.read(packed)


def rewritten(path, other, change):
    """A copy of a checkpoint with changed parts, aligned as torch aligns them."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for part in source.infolist():
            info = zipfile.ZipInfo(part.filename)
            beginning = target.start_dir + 30 + len(part.filename) + 4
            info.extra = b"FB" + (-beginning % 64).to_bytes(2, "little") + b"Z" * (-beginning % 64)
            target.writestr(info, change(part.filename, source.read(part)))


def test_f81_a_part_that_is_shorter_than_its_tensor_is_refused(tmp_path):
    """The bytes that follow the part in the file would become weights."""
    checkpoint.save(tmp_path / "a.pt", {"model": {"v": torch.ones(99), "w": torch.ones(99)}})
    rewritten(tmp_path / "a.pt", tmp_path / "b.pt", lambda name, data: data)
    assert checkpoint.read(tmp_path / "b.pt")["model"]["v"].eq(1).all()
    for cut in (64, 396):
        rewritten(
            tmp_path / "a.pt",
            tmp_path / "b.pt",
            lambda name, data, n=cut: data[:-n] if name.endswith("data/0") else data,
        )
        with pytest.raises(ValueError, match="differ in length"):
            checkpoint.read(tmp_path / "b.pt")


def test_f81_names_that_point_elsewhere_are_refused(tmp_path):
    checkpoint.save(tmp_path / "a.pt", {"model": {"v": torch.zeros(99), "w": torch.ones(99)}})
    content = (tmp_path / "a.pt").read_bytes()
    begin = content.index(b"PK\x01\x02")  # swap two names in the zip directory
    swapped = content[begin:].replace(b"data/0", b"data/x").replace(b"data/1", b"data/0")
    (tmp_path / "a.pt").write_bytes(content[:begin] + swapped.replace(b"data/x", b"data/1"))
    with pytest.raises(ValueError, match="damaged or not a checkpoint"):
        checkpoint.read(tmp_path / "a.pt")


def weights(iteration):
    return {
        "model": {"w": torch.zeros(2, 2)}, "model_config": {}, "tokenizer": {"tokenizer": "byte"},
        "iter_num": iteration, "best_val_loss": 1.5,
    }  # fmt: skip


def test_a_block_for_many_layers_is_loaded_again(tmp_path):
    shared = torch.ones(100, 100)
    saved = weights(1) | {"model": {f"blocks.{i}.weight": shared for i in range(12)}}
    checkpoint.save(tmp_path / "best.pt", saved)
    assert len(checkpoint.load(tmp_path / "best.pt")["model"]) == 12


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(path, *arguments, **more):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    checkpoint.save(tmp_path / "ckpt.pt", weights(1))
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("io.open", refuse)
    with pytest.raises(PermissionError):
        checkpoint.read(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("kind", [IndexError, AttributeError, TypeError, AssertionError])
def test_f46_whatever_the_unpickler_raises_is_one_line(tmp_path, monkeypatch, kind):
    path = tmp_path / "ckpt.pt"
    checkpoint.save(path, {"iter_num": 1})

    def fails(*arguments, **options):
        raise kind("pop from empty list\nand more")

    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(ValueError, match="damaged or not a checkpoint: pop from empty list$"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "model is None .expected a valid dict"),
        ({"model": ...}, "model is missing .expected a valid dict"),
        ({"iter_num": "7"}, "iter_num is '7' .expected a valid int"),
        ({"iter_num": True}, "iter_num is True"),
        ({"iter_num": -1}, "iter_num is -1"),
        ({"best_val_loss": float("nan")}, "best_val_loss is nan"),
        ({"tokenizer": {"tokenizer": "char"}}, 'tokenizer: "alphabet" is missing'),
    ],
)
def test_a_key_that_is_missing_or_mistyped_is_named(tmp_path, changed, message):
    path = tmp_path / "ckpt.pt"
    content = {k: v for k, v in (weights(3) | changed).items() if v is not ...}
    checkpoint.save(path, content)
    with pytest.raises(ValueError, match=f"ckpt.pt.*{message}"):
        checkpoint.load(path)


def without(content, key):
    return {name: value for name, value in content.items() if name != key}


def reshaped(content):
    """The content with its last tensor one element shorter."""
    name, tensor = list(content.items())[-1]
    return content | {name: tensor[:-1]}


WRONG_CONTENT = [  # key, change, message of sample.py and convert.py, message of train.py
    (
        "model",
        lambda model: {},
        "does not fit model.py and its model_config in blocks.0.*and 16 more",
    ),
    ("model", reshaped, "model_config in lm_head.weight .float .*is not float"),
    ("model", lambda model: model | {"lm_head.weight": "x"}, "model_config in lm_head.weight"),
    ("model", lambda model: without(model, "final_norm.weight"), "model_config in final_norm.wei"),
    ("model_config", lambda config: config | {"heads": 2}, "model_config: .*argument .heads"),
    ("model_config", lambda config: config | {"n_layer": "2"}, "n_layer='2' is not of type int"),
    ("model_config", lambda config: config | {"n_layer": -2}, "n_layer=-2 must be at least 1"),
    ("pretrained", lambda metadata: 5, "pretrained is not valid metadata"),
]
WRONG_STATE = [
    ("sequences", lambda n: None, "sequences is None .expected a valid int"),
    ("optimizer", lambda state: {}, "optimizer state of parameter 0 is missing"),
    ("optimizer", lambda state: state | {"state": {0: 1}}, "optimizer state of parameter 0"),
    ("optimizer", lambda state: state | {"state": without(state["state"], 1)}, "of parameter 1"),
    ("optimizer", lambda state: {"state": state["state"] | {2: reshaped(state["state"][2])}},
     "optimizer state of parameter 2 is missing or has the wrong shape"),
    ("optimizer", lambda state: {"state": state["state"] | {999: {}}}, "state for 21 parameters"),
    ("optimizer", lambda state: state | {"state": []}, "its optimizer state is malformed"),
    ("optimizer", lambda state: state | {"param_groups": [1, 2]}, "its optimizer state is malf"),
    ("scaler", lambda state: {"scale": "x"}, "scaler must contain numbers: scale, growth_factor"),
    ("scaler", lambda state: state | {"growth_interval": None}, "scaler must contain numbers"),
]  # fmt: skip


def test_content_that_does_not_fit_is_named_wherever_a_checkpoint_is_read(run, sums, tmp_path):
    train = ["train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--dtype=float16"]
    resume = [*train, "--init_from=resume"]
    run(*train, "--max_iters=1", "--dtype=float32")
    path = tmp_path / "ckpt.pt"
    good = checkpoint.load(path)
    run(*resume, "--max_iters=2")  # float16 after float32: needs a new scaler
    good["scaler"] = checkpoint.load(path)["scaler"]
    assert good["scaler"]["scale"] == 65536
    named = [f"--out_dir={tmp_path}", "--ckpt=ckpt.pt"]
    others = ["sample.py", *named], ["convert.py", *named, f"--to={tmp_path / 'exported'}"]
    for i, (key, change, message) in enumerate(WRONG_CONTENT + WRONG_STATE):
        checkpoint.save(path, good | {key: change(good.get(key))})
        for command in (resume, others[i % 2]) if i < len(WRONG_CONTENT) else (resume,):
            with pytest.raises(ValueError, match=f"ckpt.pt.*{message}") as error:
                run(*command)
            assert "\n" not in str(error.value), command[0]


@pytest.mark.parametrize(("value", "named"), [
    (collections.deque([1]), "collections.deque"), (Path("x"), "pathlib"),
    ({"teacher": torch.nn.Linear(1, 1)}, "torch.nn.modules.linear.Linear"),
    ([lambda: 1], "something else"),
    ({"mask": torch.eye(4).to_sparse()}, r"something else \(a tensor that is not dense"),
])  # fmt: skip
def test_an_entry_that_could_not_be_loaded_is_refused_before_training(tmp_path, value, named):
    """Before, it was saved, and the checkpoint could never be loaded."""
    state = lambda: {"iter_num": 0, "smooth": value}  # noqa: E731
    saving = Saving(
        tmp_path / "ckpt.pt",
        state,
        distributed.SINGLE_PROCESS,
        True,
        "",
        print,
        StopRequest(Process(), False),
    )
    with pytest.raises(ValueError, match=f"ckpt.pt cannot hold 'smooth', because it has {named}"):
        saving.__enter__()


def test_a_state_dict_may_leave_out_a_part_of_the_model(tmp_path):
    """Such as the teacher of a distillation."""

    class Student(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.teacher = torch.nn.Linear(2, 2)

        def state_dict(self, *arguments, **more):
            state = super().state_dict(*arguments, **more)
            return {name: value for name, value in state.items() if "teacher" not in name}

    checkpoint.save(tmp_path / "ckpt.pt", {"model": Student(), "iter_num": 1})
    assert checkpoint.read(tmp_path / "ckpt.pt")["model"].keys() == {"weight", "bias"}


def test_saving_from_a_cpu_does_not_touch_a_gpu(tmp_path, monkeypatch):
    """Even torch.accelerator.synchronize() would start CUDA, which fails on a GPU in use."""

    def fail():
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    checkpoint.save(tmp_path / "ckpt.pt", {"model": {"w": torch.ones(2)}, "iter_num": 1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fail)
    memory.release()


def test_numpys_numbers_are_saved_as_pythons(tmp_path):
    content = {"model": {}, "smooth": np.float64(0.5), "more": [np.int64(3), (np.bool_(True),)]}
    checkpoint.save(tmp_path / "ckpt.pt", content)
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert (saved["smooth"], saved["more"]) == (0.5, [3, (True,)])


def test_views_of_one_memory_are_saved_apart(tmp_path):
    x = torch.arange(4.0)
    square, complex_ = x.view(2, 2), torch.view_as_complex(x.view(2, 2))
    pairs = [(square, square.t()), (x[:2], x), (x, x.view(torch.int32)), (x, torch._neg_view(x))]
    for a, b in [*pairs, (complex_, complex_.conj())]:
        checkpoint.save(tmp_path / "c.pt", {"a": a, "b": b})
        found = checkpoint.read(tmp_path / "c.pt")["b"]
        assert torch.equal(found, b) and found.dtype == b.dtype


def test_float16_weights_with_a_large_sum_are_finite():
    checkpoint.check_finite({"w": torch.full((4,), 60000.0, dtype=torch.float16)}, Path("x"))


def test_odd_values_in_checkpoints(tmp_path):
    found = checkpoint.as_saved({"best_val_loss": 3})["best_val_loss"]
    assert type(found) is float
    assert checkpoint.tensors_in({"a": {torch.zeros(2)}})
    quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    with pytest.raises(UserError, match="not dense"):
        checkpoint.require_plain({"x": quantized}, Path("x"))
    torch.save({"format": torch.tensor([1, 1])}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="is not a steadyGPT"):
        checkpoint.read(tmp_path / "a.pt")
