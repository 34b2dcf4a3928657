import os
import pickle
import subprocess
import sys

from steady import checkpoint

import pytest
import torch
from conftest import ROOT


def test_round_trip(tmp_path):
    path = tmp_path / "ckpt.pt"
    content = {"model": {"w": torch.randn(3, 3)}, "iter_num": 7, "config": {"a": 1.5, "b": "x"}}
    checkpoint.save(path, content)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["model"]["w"], content["model"]["w"])
    assert loaded["iter_num"] == 7 and loaded["config"] == content["config"]
    assert os.listdir(tmp_path) == ["ckpt.pt"]


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
    torch.load(path, weights_only=False)  # the naive way runs it
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
    with pytest.raises(ValueError, match="no checkpoint at .*--out_dir"):
        checkpoint.load(path)
    torch.save({"model": {}, "model_args": {}}, path)
    with pytest.raises(ValueError, match="no steadyGPT checkpoint"):
        checkpoint.load(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="no steadyGPT checkpoint of format 1 .found list"):
        checkpoint.load(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="damaged or not a checkpoint: no complete zip archive"):
        checkpoint.load(path)


FULL_DISK = """
import resource, signal, sys, torch
from steady import checkpoint
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    {save}
except (OSError, RuntimeError) as error:
    sys.exit(3)
"""


def save_with_full_disk(folder, save):
    script = FULL_DISK.format(save=save)
    return subprocess.run([sys.executable, "-c", script, str(folder / "ckpt.pt")], cwd=ROOT,
                          stderr=subprocess.DEVNULL).returncode  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="limits the file size as Linux does")
def test_f30_full_disk_keeps_the_old_checkpoint(tmp_path):
    path = tmp_path / "ckpt.pt"
    checkpoint.save(path, {"iter_num": 1})
    big = "{'iter_num': 2, 'w': torch.randn(100_000)}"
    assert save_with_full_disk(tmp_path, f"checkpoint.save(Path(sys.argv[1]), {big})") == 3
    assert checkpoint.load(path)["iter_num"] == 1
    assert os.listdir(tmp_path) == ["ckpt.pt"]
    assert save_with_full_disk(tmp_path, f"torch.save({big}, sys.argv[1])") != 0
    with pytest.raises(ValueError, match="damaged"):  # the naive way destroyed it
        checkpoint.load(path)


def test_f30_kill_while_saving_keeps_a_whole_checkpoint(tmp_path):
    path = tmp_path / "ckpt.pt"
    checkpoint.save(path, {"iter_num": 0, "w": torch.zeros(2_000_000)})
    script = (
        "import sys, itertools, torch; from pathlib import Path; from steady import checkpoint\n"
        "w = torch.zeros(2_000_000)\n"
        "for i in itertools.count(1):\n"
        "    checkpoint.save(Path(sys.argv[1]), {'iter_num': i, 'w': w}); print(i, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    for _ in range(5):
        process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    assert checkpoint.load(path)["iter_num"] >= 5


def test_differing_architecture_names_the_keys(tmp_path):
    saved, current = {"n_layer": 2, "n_head": 4, "dropout": 0.0}, {"n_layer": 3, "n_head": 4}
    with pytest.raises(ValueError, match=r"differs in n_layer \(checkpoint 2, now 3\);"):
        checkpoint.check_same_model(saved, current, tmp_path)
    checkpoint.check_same_model(saved, {"n_layer": 2, "n_head": 4, "dropout": 0.5}, tmp_path)


def test_earlier_run_is_moved_aside_not_overwritten(tmp_path, capsys):
    checkpoint.set_aside(tmp_path)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())
    (tmp_path / "ckpt.pt").write_text("old")
    checkpoint.set_aside(tmp_path)
    assert (tmp_path / "previous" / "ckpt.pt").read_text() == "old"
    assert "previous" in capsys.readouterr().out
