"""Run sample.py the way a user does."""

import os
import shutil
import sys

import pytest
import torch
from conftest import ROOT, SUMS, TINY

from steady import UserError, checkpoint
from steady.prepare import write_dataset
from steady.tokenizer import ByteTokenizer, CharTokenizer, HFTokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sums):
    """An out_dir without its data set: the checkpoint must be enough."""
    import runpy
    import sys

    from conftest import ROOT

    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(sums, folder / "data")
    sys.argv = ["train.py", *TINY, f"--dataset={folder / 'data'}", f"--out_dir={folder / 'out'}",
                "--max_iters=100", "--lr_decay_iters=100"]  # fmt: skip
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    shutil.rmtree(folder / "data")
    return folder / "out"


def sample(run, out, *arguments):
    return run("sample.py", f"--out_dir={out}", "--device=cpu", "--max_new_tokens=12", *arguments)


def test_another_model_py_than_the_runs_is_noted(run, sums, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MODEL_CODE", 1)
    train = ["train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--max_iters=1"]
    run(*train)
    sample = ["sample.py", f"--out_dir={tmp_path}", "--max_new_tokens=1", "--device=cpu"]
    assert "note:" not in run(*sample)
    monkeypatch.undo()
    assert "was saved with another version of model.py" in run(*sample)
    assert run(*train, "--init_from=resume").count("another version of model.py") == 1


def test_f40_the_checkpoint_carries_its_tokenizer(run, trained):
    shown = sample(run, trained, "--start=12+34=", "--num_samples=3")
    parts = shown.split("---------------\n")[:-1]
    assert len(parts) == 3
    for part in parts:
        assert part.startswith("12+34=") and set(part) <= set(SUMS)
        assert len(part.removesuffix("\n")) >= len("12+34=") + 11


def test_f78_it_may_be_executed_in_a_notebook(trained, monkeypatch, capsys):
    arguments = [f"--out_dir={trained}", "--device=cpu", "--max_new_tokens=3", "--start=1"]
    monkeypatch.setattr(sys, "argv", ["sample.py", *arguments, "--num_samples=1"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    exec((ROOT / "sample.py").read_text(encoding="utf-8"), {})
    assert capsys.readouterr().out.startswith("1")


def test_f33_prompt_may_hold_equals_signs(run, trained):
    assert sample(run, trained, "--start=1+1=", "--num_samples=1").startswith("1+1=")


def test_prompt_from_a_file(run, trained, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("7+8=", encoding="utf-8")
    assert sample(run, trained, f"--start=FILE:{tmp_path / 'prompt.txt'}").startswith("7+8=")
    monkeypatch.setenv("HOME", str(tmp_path))  # the shell does not expand FILE:~/
    assert sample(run, trained, "--start=FILE:~/prompt.txt").startswith("7+8=")
    with pytest.raises(ValueError, match="cannot read --start=FILE:nowhere.txt"):
        sample(run, trained, "--start=FILE:nowhere.txt")


def test_same_seed_same_samples(run, trained):
    first = sample(run, trained, "--seed=3")
    assert sample(run, trained, "--seed=3") == first != sample(run, trained, "--seed=4")


def test_f42_samples_differ_from_their_first_token_on(run, trained):
    shown = sample(run, trained, "--start=1", "--num_samples=40", "--temperature=1.5")
    assert len({part[:2] for part in shown.split("---------------\n")[:-1]}) > 3


def test_f43_greedy_no_top_k_and_a_prompt_longer_than_the_context(run, trained):
    greedy = sample(run, trained, "--temperature=0", "--num_samples=2", "--top_k=0")
    first, second = greedy.split("---------------\n")[:2]
    assert first == second
    long = "1+2=3\n" * 20
    assert sample(run, trained, f"--start={long}", "--top_k=0").startswith(long)
    assert sample(run, trained, "--top_p=0.5", "--max_new_tokens=40")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--start=hello", "does not know 'ehlo'"),
        ("--start=", "--start: it is empty"),
        ("--start=\udcff", "is not UTF-8"),
        ("--top_k=-1", "top_k=-1 must be at least 0"),
        ("--temperature=-0.5", "temperature=-0.5 must be at least 0"),
        ("--top_p=0", "top_p=0.0 must be above 0"),
        ("--seed=99999999999999999999", "seed=99999999999999999999 must be a 64-bit integer"),
        ("--num_samples=0", "num_samples=0 must be at least 1"),
        ("--max_new_tokens=0", "max_new_tokens=0 must be at least 1"),
        ("--num_samples=1000000 --max_new_tokens=2147483647", "GiB, but cpu has .* reduce one"),
        ("--out_dir=nowhere", "no checkpoint at nowhere"),
        ("--ckpt=other.pt", "no checkpoint at .*other.pt"),
    ],
)
def test_bad_input_is_one_clear_line(run, trained, argument, message):
    with pytest.raises(ValueError, match=message) as error:
        sample(run, trained, *argument.split(" "))
    assert type(error.value) is UserError  # printed without a traceback


def test_one_sample_streams_and_equals_the_same_sample_in_one_piece(fork, run, trained):
    process = fork("sample.py", f"--out_dir={trained}", "--device=cpu", "--num_samples=1",
                   "--start=1", "--max_new_tokens=4000")  # fmt: skip
    assert process.stdout.readline().startswith("#")
    early = process.stdout.read(40)  # arrives long before the sample is complete
    assert len(early) == 40
    process.kill()
    whole = sample(run, trained, "--num_samples=1", "--start=1", "--max_new_tokens=60")
    assert whole.startswith(early) and len(whole.removesuffix("\n")) == 61


IN_TURN = """
import json, runpy, sys
from pathlib import Path
root, folder = map(Path, sys.argv[1:])
sys.path.insert(0, str(root))
def run(script, *arguments):
    sys.argv = [script, *arguments]
    runpy.run_path(str(root / script), run_name="__main__")
run("data/text/prepare.py", f"--input={folder / 'text.txt'}", "--tokenizer=char",
    f"--out={folder / 'data'}")
meta = folder / "data" / "meta.json"  # not ASCII, like other programs write it
content = json.loads(meta.read_text(encoding="utf-8"))
meta.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
run("train.py", *TINY, f"--dataset={folder / 'data'}", f"--out_dir={folder}", "--max_iters=1")
run("sample.py", f"--out_dir={folder}", "--device=cpu", f"--start=FILE:{folder / 'prompt.txt'}",
    "--max_new_tokens=20")
print("all have ended")
"""


def test_f39_characters_of_several_bytes_in_any_locale(start, tmp_path):
    """Text is read and written as UTF-8 even if the locale has another encoding."""
    (tmp_path / "text.txt").write_text("naïve 你好 🙂\n" * 60, encoding="utf-8")
    (tmp_path / "prompt.txt").write_text("你", encoding="utf-8")
    (tmp_path / "in_turn.py").write_text(f"TINY = {TINY}{IN_TURN}", encoding="utf-8")
    old = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONIOENCODING": ""}
    process = start(tmp_path / "in_turn.py", ROOT, tmp_path, **old)
    shown = process.stdout.read()
    assert process.wait() == 0 and shown.endswith("all have ended\n"), shown


def test_bytes_of_one_character_are_shown_together(run, tmp_path):
    text = "你好" * 200
    splits = {"train": [text], "val": [text]}
    write_dataset(tmp_path / "data", ByteTokenizer(), splits)
    run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path}",
        "--max_iters=80", "--lr_decay_iters=80")  # fmt: skip
    (tmp_path / "marked.txt").write_text("你", encoding="utf-8-sig")
    for prompt in "你", f"FILE:{tmp_path / 'marked.txt'}":
        shown = sample(run, tmp_path, f"--start={prompt}", "--num_samples=1", "--temperature=0")
        assert shown == "你好你好你\n"


def test_characters_without_a_line_break_have_another_default_prompt(run, tmp_path):
    for ends in (True, False):
        tokenizer = CharTokenizer("ab", ends=ends)
        write_dataset(tmp_path / "data", tokenizer, {"train": ["ab"] * 20, "val": ["ab"] * 20})
        run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path}",
            "--max_iters=1")  # fmt: skip
        shown = sample(run, tmp_path, "--num_samples=1", "--stop_at_end=False")
        assert {*shown} <= {*"ab\n"} and shown.startswith("a" * (not ends))


def test_empty_prompt_starts_from_the_end_of_text_token(run, tmp_path):
    write_dataset(tmp_path / "data", ByteTokenizer(), {"train": ["ab"] * 20, "val": ["ab"] * 20})
    run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path}",
        "--max_iters=120", "--lr_decay_iters=120")  # fmt: skip
    arguments = tmp_path, "--start=", "--temperature=0", "--num_samples=2"
    assert sample(run, *arguments) == "ab\n---------------\n" * 2  # stops at the end of the text
    assert sample(run, *arguments, "--num_samples=1") == "ab\n"
    assert sample(run, *arguments, "--stop_at_end=False").startswith("ababab")


def test_a_tokenizer_that_drops_the_first_space_keeps_the_one_after_the_prompt(run, tmp_path):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    text = ["a b " * 200]
    write_dataset(tmp_path / "data", HFTokenizer(made.to_str(), None), {"train": text, "val": text})
    run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path}",
        "--max_iters=100", "--lr_decay_iters=100")  # fmt: skip
    arguments = tmp_path, "--start=a b", "--temperature=0", "--max_new_tokens=3"
    assert sample(run, *arguments, "--num_samples=1") == "a b a b a\n"
    assert sample(run, *arguments, "--num_samples=2") == "a b a b a\n---------------\n" * 2


def test_a_decoder_that_changes_what_it_wrote_loses_no_text(run, tmp_path):
    import tokenizers

    words = {"a": 0, "⏎": 1, "b": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.WordPiece(cleanup=False), tokenizers.decoders.Fuse(),
         tokenizers.decoders.Replace(" ⏎ ", "\n")]
    )  # fmt: skip
    text = ["a ⏎ b ⏎ " * 100]
    write_dataset(tmp_path / "data", HFTokenizer(made.to_str(), None), {"train": text, "val": text})
    run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path}",
        "--max_iters=100", "--lr_decay_iters=100")  # fmt: skip
    arguments = tmp_path, "--start=a ⏎ b ⏎ a", "--temperature=0", "--max_new_tokens=4"
    assert sample(run, *arguments, "--num_samples=2").startswith("a ⏎ b ⏎ a\nb\na\n---")
    assert sample(run, *arguments, "--num_samples=1").endswith("\na ⏎ b ⏎ a\nb\na\n")


def test_nanogpts_two_commands_work_one_after_the_other(run, sums, tmp_path, monkeypatch):
    """The config and sample.py use the same folder, and a config selects the model to sample."""
    config = str(ROOT / "config" / "train_openwebtext.py")
    tiny = [argument for argument in TINY if not argument.startswith(("--eval_int", "--lr_decay"))]
    monkeypatch.chdir(tmp_path)
    run("train.py", config, *tiny, f"--dataset={sums}", "--batch_size=4", "--max_iters=2")
    short = ["--max_new_tokens=3", "--num_samples=1", "--device=cpu"]
    assert run("sample.py", *short, "--start=1").startswith("1")

    (tmp_path / "mine.py").write_text(
        'out_dir = "out-mine"\nmax_iters = 1\nlr_decay_iters = max_iters + warmup_iters\n'
    )
    os.rename("out", "out-mine")
    run("sample.py", "mine.py", *short, "--start=1")  # settings of train.py are ignored
    with pytest.raises(ValueError, match="unknown setting '--max_iters=3'"):
        run("sample.py", "mine.py", "--max_iters=3")
    with pytest.raises(ValueError, match="unknown setting 'lerning_rate' in .*typo.py"):
        (tmp_path / "typo.py").write_text("lerning_rate = 1\n")
        run("sample.py", "typo.py")


def test_what_was_loaded_is_said(fork, trained):
    process = fork("sample.py", f"--out_dir={trained}", "--device=cpu", "--max_new_tokens=1")
    said = process.stdout.readline().rstrip()
    process.wait()
    best = checkpoint.load(trained / "best.pt")
    assert said.startswith(f"# loaded {trained / 'best.pt'}: ")
    assert said.endswith(f"parameters, iteration 100, val loss {best['best_val_loss']:.4f}")


def test_char_vocabulary_is_never_exceeded_by_an_untrained_model(run, tmp_path):
    text = "ab" * 100
    write_dataset(tmp_path / "data", CharTokenizer.train(text), {"train": [text], "val": [text]})
    run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path}",
        "--max_iters=1")  # fmt: skip
    shown = sample(run, tmp_path, "--start=a", "--temperature=5", "--top_k=0")
    assert set(shown) <= set("ab\n-")
    assert torch.is_tensor(checkpoint.load(tmp_path / "ckpt.pt")["model"]["lm_head.weight"])
