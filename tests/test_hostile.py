"""Untrusted files, and files of the user that must not be lost (F82 to F88)."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SUMS, TINY

from model import GPT, GPTConfig
from steady import checkpoint, output, visible
from steady.dataloader import DataSet
from steady.prepare import prepare_from_files, write_dataset
from steady.tokenizer import ByteTokenizer, CharTokenizer, HFTokenizer, hf_tokenizer_meta

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def content(**changes):
    """The content of a tiny model's best.pt."""
    config = GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=2, n_embd=32)
    return {
        "model": dict(GPT(config).state_dict()), "model_config": config.settings(), "config": {},
        "tokenizer": CharTokenizer.train(SUMS).meta(), "iter_num": 3, "best_val_loss": 1.5,
    } | changes  # fmt: skip


def save(path, saved):
    """Like checkpoint.save, but without its checks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"format": checkpoint.FORMAT} | saved, path)


def weights(change):
    saved = content()
    saved["model"]["blocks.0.attention.q_proj.weight"] = change(torch.ones(32, 32))
    return saved


def config(**changes):
    return content(model_config=content()["model_config"] | changes)


def nested(depth=40):
    """A few bytes in a file, but 2**40 lists when printed."""
    value = []
    for _ in range(depth):
        value = [value, value]
    return value


NO_FIT = "does not fit model.py and its model_config in"
FAULTS = {  # F84 and F86: content, and its error message
    "block_size": (lambda: config(block_size=2**25), "block_size=33554432 is too large"),
    "vocab_size": (lambda: config(vocab_size=2**31), NO_FIT),
    "n_layer": (lambda: config(n_layer=10**4), "n_layer=10000, but the file has 12 weights"),
    "stride 0": (
        lambda: config(n_embd=2**16, n_hidden=2**16) | {"model": {
            name: torch.zeros(1).expand(2**16, 2**16) for name in content()["model"]}},
        "is larger than its data in the file"),
    "meta": (lambda: weights(lambda w: w.to("meta")), "dense numeric tensors .*meta"),
    "sparse": (lambda: weights(lambda w: w.to_sparse()), "dense numeric tensors .*sparse"),
    "complex": (lambda: weights(lambda w: w.cfloat()), NO_FIT),
    "bool": (lambda: weights(lambda w: w.bool()), "model_config in blocks.0.attention.q_proj"),
    "int": (lambda: weights(lambda w: w.int()), "model_config in blocks.0.attention.q_proj"),
    "a list": (lambda: weights(lambda w: w.tolist()), "model_config in blocks.0.attention.q_proj"),
    "dtype": (lambda: content(pretrained={"dtype": "int8"}), "is not valid metadata .*'int8'"),
    "no dtype": (lambda: content(pretrained={"dtype": "nn"}), "is not valid metadata .*'nn'"),
    "nested tensor": (
        lambda: weights(lambda w: torch.nested.nested_tensor([w, w])), "dense numeric|damaged"),
    "nan": (lambda: weights(lambda w: w * torch.nan), "q_proj.weight has values that are not"),
    "too large for float32": (
        lambda: weights(lambda w: w.double() * 1e300), "q_proj.weight has values that are not"),
    "bytes": (lambda: content(pretrained={"dtype": "float32", "generation_config": {"a": b"x"}}),
              "is not valid metadata of a pretrained model"),
    "context": (lambda: content(pretrained={
        "dtype": "float32", "config": {"max_position_embeddings": None}}),
        "is not valid metadata of a pretrained model"),
    "nested metadata": (
        lambda: content(pretrained={"dtype": "float32", "config": {"a": nested()}}),
        "is not valid metadata of a pretrained model"),
    "nested": (lambda: content(iter_num=nested()), "iter_num is \\[\\[\\["),
    "nested size": (lambda: config(n_layer=nested()), "n_layer=\\[\\[.* is not of type int"),
    "huge": (lambda: content(iter_num=10**30), "iter_num is 1000"),
    "names": (lambda: config(**{ESCAPE: 1}), r"argument '\\x1b\]0;owned\\x07"),
    "many": (lambda: config(**{f"k{i}": 1 for i in range(10**4)}), "unexpected .*argument .k0"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_f84_f86_what_a_checkpoint_declares_is_checked_before_it_is_allocated(run, tmp_path, name):
    make, message = FAULTS[name]
    save(tmp_path / "out" / "best.pt", make())
    for command in (["sample.py", "--num_samples=1", "--max_new_tokens=2", "--device=cpu"],
                    ["convert.py", f"--to={tmp_path / 'to'}"]):  # fmt: skip
        with pytest.raises(ValueError, match=message) as error:
            run(command[0], f"--out_dir={tmp_path / 'out'}", *command[1:])
        assert "best.pt" in str(error.value) and len(str(error.value)) < 1000
        assert "\n" not in str(error.value) and "\x1b" not in str(error.value)
    assert not list(tmp_path.glob("to/*"))


def test_a_prompt_with_a_token_that_the_model_does_not_have_is_one_line(run, tmp_path):
    save(tmp_path / "best.pt", content(tokenizer={"tokenizer": "byte"}))
    with pytest.raises(ValueError, match="--start: token 120 is not among the model's 64"):
        run("sample.py", f"--out_dir={tmp_path}", "--start=x", "--device=cpu")
    run("sample.py", f"--out_dir={tmp_path}", "--start=!", "--max_new_tokens=40", "--device=cpu")


def test_f86_weights_that_are_not_finite_are_not_exported(run, tmp_path):
    save(tmp_path / "out" / "best.pt", weights(lambda w: w * torch.nan))
    with pytest.raises(ValueError, match="q_proj.weight has values that are not finite"):
        run("convert.py", f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'to'}")
    assert not list(tmp_path.glob("to/*"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer", [1], "optimizer is .1. .expected a valid dict"),
        ("sequences", 10**30, "sequences is 1000"),
    ],
)
def test_f86_state_of_another_kind_is_one_line(run, sums, tmp_path, key, value, message):
    arguments = [*TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--max_iters=1"]
    run("train.py", *arguments)
    saved = checkpoint.load(tmp_path / "ckpt.pt")
    (tmp_path / "ckpt.pt").unlink()  # the old file is memory-mapped
    torch.save(saved | {key: value}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=message):
        run("train.py", *arguments, "--init_from=resume")


@pytest.mark.parametrize("dtype", ["torch.\x1b[31mred", nested()])
def test_f84_a_dtype_in_a_checkpoint_is_printed_as_text_or_not_at_all(run, sums, tmp_path, dtype):
    arguments = [*TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--max_iters=1"]
    run("train.py", *arguments)
    saved = checkpoint.load(tmp_path / "ckpt.pt")
    (tmp_path / "ckpt.pt").unlink()  # the old file is memory-mapped
    torch.save(saved | {"dtype": dtype}, tmp_path / "ckpt.pt")
    shown = run("train.py", *arguments, "--init_from=resume")
    assert "\x1b" not in shown and ("changed from \\x1b[31mred to" in shown) == (type(dtype) is str)


def test_f84_a_tokenizer_with_an_id_beyond_all_measure_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    content = made.to_str().replace('"b":1', f'"b":{2**30}')
    with pytest.raises(ValueError, match="has id 1073741824, but 2 tokens"):
        HFTokenizer(content)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json: .*has id 1073741824"):
        hf_tokenizer_meta(tmp_path)


def test_f84_a_row_of_many_keys_is_shown_in_a_line(tmp_path):
    row = json.dumps({f"key {i} {ESCAPE}": 1 for i in range(100_000)})
    (tmp_path / "a.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match=r"no 'text', only key 0 \\x1b") as error:
        prepare_from_files(tmp_path / "out", "byte", [tmp_path / "a.jsonl"])
    assert len(str(error.value)) < 1000 and "\x1b" not in str(error.value)


def test_f84_more_vocabulary_than_the_tokenizer_has_is_refused(tmp_path):
    write_dataset(tmp_path, ByteTokenizer(), {"train": ["abc" * 99], "val": ["abc" * 99]})
    meta = json.loads((tmp_path / "meta.json").read_text()) | {"vocab_size": 2**32}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match='"vocab_size" is 4294967296, but .* 1 to 257 ids'):
        DataSet(str(tmp_path))


# ---- F82: links -------------------------------------------------------------------------------


@pytest.fixture
def notes(tmp_path):
    """A file of the user's outside of the untrusted folder."""
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    return path


def test_f82_a_lock_that_is_a_link_is_not_followed(run, sums, tmp_path, notes):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").symlink_to(notes)
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: .*out/.lock"):
        run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={out}", "--max_iters=1")
    assert notes.read_text() == "mine"


def test_f82_no_link_of_a_run_is_followed(run, sums, tmp_path, notes):
    out = tmp_path / "out"
    out.mkdir()
    names = ("ckpt.pt", "best.pt", "metrics.jsonl", "before_decay.pt")
    for name in names:
        (out / name).symlink_to(notes)
    run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={out}", "--max_iters=9",
        "--eval_interval=3")  # fmt: skip
    assert notes.read_text() == "mine"
    assert not any((out / name).is_symlink() for name in ("ckpt.pt", "best.pt", "metrics.jsonl"))


def test_f82_no_link_of_a_data_set_or_an_export_is_followed(run, tmp_path, notes):
    data, to = tmp_path / "data", tmp_path / "to"
    data.mkdir(), to.mkdir()
    for name in ("train.bin", "val.bin", "train.bin.tmp", "meta.json.tmp"):
        (data / name).symlink_to(notes)
    write_dataset(data, ByteTokenizer(), {"train": ["abc" * 99], "val": ["abc" * 99]})
    save(tmp_path / "out" / "best.pt", content())
    for name in ("model.tmp", "config.json.tmp"):
        (to / name).symlink_to(notes)
    run("convert.py", f"--out_dir={tmp_path / 'out'}", f"--to={to}")
    assert notes.read_text() == "mine"


def test_f82_no_other_file_has_the_name_of_a_lock(run, sums, tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("notes")
    precious.chmod(0o600)
    for out in (tmp_path / "out", tmp_path / "data"):
        out.mkdir(parents=True)
        os.link(precious, out / ".lock")
    with pytest.raises(ValueError, match="lock is a hard link or not a regular file: delete"):
        run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}")
    with pytest.raises(ValueError, match="lock is a hard link or not a regular file: delete"):
        write_dataset(tmp_path / "data", ByteTokenizer(), {"train": ["abc"], "val": ["abc"]})
    assert precious.read_text() == "notes" and precious.stat().st_mode & 0o777 == 0o600


# ---- F83: the user's own files ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json",
     "tokenizer.model"],
)  # fmt: skip
def test_f83_an_export_replaces_no_file_of_another(run, tmp_path, name):
    save(tmp_path / "out" / "best.pt", content())
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / name).write_text("mine")
    arguments = "convert.py", f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'to'}"
    with pytest.raises(ValueError, match="holds another model or tokenizer"):
        run(*arguments)
    assert (tmp_path / "to" / name).read_text() == "mine"
    (tmp_path / "to" / name).unlink()
    for _ in range(2):  # it may replace its own files
        run(*arguments)


def test_f83_a_tokenizer_of_ones_own_is_not_replaced_by_a_trained_one(run, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 99)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("mine")
    arguments = ["data/text/prepare.py", f"--input={tmp_path / 'a.txt'}", "--tokenizer=bpe:270",
                 f"--out={tmp_path / 'out'}"]  # fmt: skip
    for _ in range(2):
        run(*arguments)
        assert (tmp_path / "out" / "tokenizer.json").read_text() == "mine"


def test_f83_a_picture_stays_when_the_disk_is_full(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    entry = {"iter": 0, "loss": 1.0, "lr": 1e-3, "ms": 1.0, "tokens_per_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    before = b"before, Software plot.py of steadyGPT"
    (tmp_path / "a.png").write_bytes(before)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left.*a.png"):
        run("plot.py", str(tmp_path), f"--png={tmp_path / 'a.png'}")
    assert (tmp_path / "a.png").read_bytes() == before


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_f83_pictures_of_others_stay(run, tmp_path, kind):
    pytest.importorskip("matplotlib")
    entry = {"iter": 0, "loss": 1.0, "lr": 1e-3, "ms": 1.0, "tokens_per_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    picture = tmp_path / f"a.{kind}"
    for _ in range(2):  # it may replace its own
        run("plot.py", str(tmp_path), f"--png={picture}")
    picture.write_bytes(b"my thesis")
    with pytest.raises(ValueError, match="exists and was not made by plot.py"):
        run("plot.py", str(tmp_path), f"--png={picture}")
    assert picture.read_bytes() == b"my thesis"


def test_metrics_of_others_are_drawn_or_named(run, tmp_path):
    pytest.importorskip("matplotlib")
    good = {"iter": 0, "loss": 1.0, "lr": 1e-3, "ms": 1.0, "tokens_per_s": 1.0}
    entries = [good, good | {"iter": 10**12}, good | {"iter": 1, "ms": 1e308}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    run("plot.py", str(tmp_path), f"--png={tmp_path / 'a.png'}")
    for entry in (
        {"recipe": "a", "curve": 5, "kind": "x"},
        {"curve": []},
        {"curve": [{"iter": 1}]},
    ):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(entry))
        with pytest.raises(ValueError, match="has no valid curves from dev/peers.py"):
            run("plot.py", str(tmp_path))


# ---- F85: terminal escapes ----------------------------------------------------------------------


def test_f85_messages_show_control_characters(run, tmp_path):
    path = tmp_path / f"a{ESCAPE}.jsonl"
    path.write_text(json.dumps({"text": 7}) + "\n")
    with pytest.raises(ValueError) as error:
        run("data/text/prepare.py", f"--input={path}", "--tokenizer=byte",
            f"--out={tmp_path / 'out'}")  # fmt: skip
    assert "\x1b" not in str(error.value) and r"\x1b]0;owned\x07" in str(error.value)
    shown = run("data/text/prepare.py", f"--input={path},{rows(tmp_path)}", "--tokenizer=byte",
                f"--out={tmp_path / 'out'}", "--skip_bad_rows=True")  # fmt: skip
    assert "\x1b" not in shown and r"\x1b]0;owned\x07" in shown


def rows(tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text((json.dumps({"text": "text"}) + "\n") * 30)
    return path


@pytest.mark.parametrize("terminal", [True, False])
def test_f85_samples_are_shown_on_a_terminal_without_control_characters(
    run, tmp_path, monkeypatch, terminal
):
    saved = content(tokenizer=CharTokenizer("ab\x1b\n").meta())
    for tensor in saved["model"].values():
        tensor.zero_()
    saved["model"]["lm_head.weight"][2] = 1  # \x1b becomes the likeliest token
    save(tmp_path / "best.pt", saved)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    shown = run("sample.py", f"--out_dir={tmp_path}", "--start=a\x1bb", "--num_samples=1",
                "--max_new_tokens=2", "--device=cpu")  # fmt: skip
    assert ("\x1b" in shown) is not terminal
    assert (r"a\x1bb" in shown) is terminal


def test_f85_line_feeds_and_letters_of_all_scripts_stay():
    text = "naïve 你好 🙂\n\ttab\r"
    assert visible(text) == "naïve 你好 🙂\n\ttab\\r" and visible("plain") == "plain"


# ---- F87: files that are not regular ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("name", ["config", "meta.json", "train.bin", "tokenizer.json", "ckpt.pt"])
def test_f87_irregular_files_are_refused_and_not_waited_for(run, tmp_path, name, kind):
    write_dataset(tmp_path, ByteTokenizer(), {"train": ["abc" * 99], "val": ["abc" * 99]})
    path = tmp_path / ("x.py" if name == "config" else name)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    arguments = {
        "config": ["train.py", str(path)],
        "tokenizer.json": [
            "data/text/prepare.py",
            f"--input={ROOT / 'README.md'}",
            f"--tokenizer=hf:{tmp_path}",
            f"--out={tmp_path / 'out'}",
        ],
        "ckpt.pt": ["sample.py", f"--out_dir={tmp_path}"],
    }.get(name, ["train.py", *TINY, f"--dataset={tmp_path}", f"--out_dir={tmp_path / 'out'}"])
    with pytest.raises(ValueError, match="not a file") as error:
        run(*arguments)
    assert path.name in str(error.value)


@pytest.mark.parametrize("name", ["best.pt", "before_decay.pt", "metrics.jsonl", "start",
                                  "config.json", "model.safetensors"])  # fmt: skip
def test_f87_no_pipe_of_a_folder_is_waited_for(run, sums, tmp_path, name):
    out, train = tmp_path / "out", ["train.py", *TINY, f"--dataset={sums}"]
    run(*train, f"--out_dir={out}", "--max_iters=1")
    run("convert.py", f"--out_dir={out}", f"--to={tmp_path / 'to'}")
    path = (tmp_path / "to" if "." in name and not name.endswith("l") and "pt" not in name
            else out) / name  # fmt: skip
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    command = [*train, f"--out_dir={out}", "--init_from=resume", "--max_iters=2"]
    if name == "start":
        command = ["sample.py", f"--out_dir={out}", f"--start=FILE:{path}", "--device=cpu"]
    elif path.parent != out:
        command = [*train, f"--out_dir={tmp_path / 'new'}", f"--init_from={tmp_path / 'to'}"]
    if name in ("best.pt", "before_decay.pt"):
        run(*command)  # ignored: the run did not write it
        return
    with pytest.raises(ValueError, match="not a file"):
        run(*command)


@pytest.mark.parametrize("name", ["a.txt", "b.parquet", "tokenizer.json", "model.safetensors"])
def test_pointers_of_git_lfs_are_not_taken_for_files(run, sums, tmp_path, name):
    numbers = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
               "num_attention_heads", "max_position_embeddings")  # fmt: skip
    config = dict.fromkeys(numbers, 8) | {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "head_dim": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\n")
    prepare = ["data/text/prepare.py", f"--out={tmp_path / 'out'}", "--skip_bad_rows=True"]
    train = ["train.py", *TINY, f"--out_dir={tmp_path / 'out'}"]
    command = {
        "tokenizer.json": [*prepare, f"--input={ROOT / 'README.md'}", f"--tokenizer=hf:{tmp_path}"],
        "model.safetensors": [*train, f"--init_from={tmp_path}", f"--dataset={sums}"],
    }.get(name, [*prepare, f"--input={tmp_path / name}", "--tokenizer=byte"])
    with pytest.raises(ValueError, match=f"{name} is only a pointer to the file: run `git lfs"):
        run(*command)


# ---- F88: long silent waits ---------------------------------------------------------------------


def test_f88_what_takes_long_shows_progress_and_the_time_that_remains(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    import tqdm

    begun = []

    class Bar(tqdm.tqdm):
        def __init__(self, *args, **options):
            begun.append(options)
            super().__init__(*args, **options | {"delay": 0, "mininterval": 0})

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    assert list(output.waiting(range(3), 3, "evaluating")) == [0, 1, 2]
    shown = capsys.readouterr().err
    assert "evaluating" in shown and "3/3" in shown and "<00:00" in shown
    assert begun[0]["delay"] == 5
    assert list(output.waiting(range(3), 3, "evaluating", quiet=True)) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_f88_evaluations_saves_and_checks_are_waited_for_with_progress(
    run, sums, tmp_path, monkeypatch
):
    seen = []

    def waiting(items, total, what, quiet=False, **options):
        seen.append((what, total))
        return real(items, total, what, quiet=quiet, **options)

    real = output.waiting
    for module in (output, checkpoint):
        monkeypatch.setattr(module, "waiting", waiting)
    arguments = [*TINY, f"--dataset={sums}", f"--out_dir={tmp_path}"]
    shown = run("train.py", *arguments, "--max_iters=1", "--eval_iters=7")
    names = [what for what, _ in seen]
    for what in ("evaluating train_loss", "evaluating val_loss", "saving ckpt.pt"):
        assert what in names
    assert ("evaluating val_loss", 7) in seen
    assert dict(seen)["saving ckpt.pt"] > 30  # one per tensor
    assert (
        f"saved {tmp_path / 'ckpt.pt'}: {(tmp_path / 'ckpt.pt').stat().st_size / 1e6:.1f} MB in"
        in shown
    )
    shown = run("train.py", *arguments, "--max_iters=2", "--init_from=resume")
    assert f"resuming from {tmp_path / 'ckpt.pt'} at iteration 1" in shown


def test_f88_users_do_not_see_torchs_future_warnings():
    code = (
        "import steady, warnings\n{}\nwarnings.warn('later', FutureWarning)\n"
        "warnings.warn('now', UserWarning)"
    )
    for start, seen in (("steady.start_script()", False), ("", True)):
        done = subprocess.run([sys.executable, "-c", code.format(start)], cwd=ROOT,
                              capture_output=True, text=True)  # fmt: skip
        assert ("later" in done.stderr) is seen and "now" in done.stderr


def test_at_most_two_earlier_runs_are_kept(run, sums, tmp_path):
    for seed in range(4):
        run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--max_iters=1",
            f"--seed={seed}")  # fmt: skip
    assert sorted(p.name for p in tmp_path.glob("previous*")) == ["previous-2", "previous-3"]
    seeds = [
        checkpoint.load(tmp_path / f"previous-{n}" / "ckpt.pt")["config"]["seed"] for n in (2, 3)
    ]
    assert seeds == [1, 2]


def test_f83_checkpoints_that_a_user_put_aside_stay(run, sums, tmp_path):
    (tmp_path / "previous").mkdir()
    (tmp_path / "previous" / "ckpt.pt").write_bytes(b"mine")
    for _ in range(4):
        shown = run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}",
                    "--max_iters=1")  # fmt: skip
    assert (tmp_path / "previous" / "ckpt.pt").read_bytes() == b"mine"
    assert f"note: removed {tmp_path / 'previous-2'}: at most 2 previous runs are kept" in shown


@pytest.mark.parametrize(
    ("script", "flag", "hint"),
    [("train.py", "--bias=False", "this model has no biases: leave it out"),
     ("sample.py", "--init_from=resume", "name the run's folder with --out_dir=FOLDER")],
)  # fmt: skip
def test_nanogpts_flags_get_a_hint(run, script, flag, hint):
    with pytest.raises(ValueError, match=hint):
        run(script, flag)
