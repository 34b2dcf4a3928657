"""The prepare scripts, and the writer they share."""

import json

import numpy as np
import pytest

from dataloader import TokenFile, read_meta
from tokenizer import ByteTokenizer, CharTokenizer, from_meta
from writer import split_text, write_dataset


def read(folder, split):
    meta = read_meta(folder)
    return np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"]).tolist()


def test_written_files_and_meta_agree(tmp_path):
    write_dataset(tmp_path, ByteTokenizer(), {"train": ["ab", "c"], "val": ["d"]})
    meta = read_meta(tmp_path)
    assert read(tmp_path, "train") == [97, 98, 256, 99, 256]
    assert read(tmp_path, "val") == [100, 256]
    assert meta["tokens"] == {"train": 5, "val": 2}
    assert (meta["dtype"], meta["vocab_size"]) == ("uint16", 257)
    assert meta["unigram_entropy"] == pytest.approx(np.log(2))
    assert from_meta(meta).decode(read(tmp_path, "train")) == "abc"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.json", "train.bin", "val.bin"]


class LargeTokenizer:
    vocab_size, end_of_text = 70000, 69999

    def encode(self, text):
        return [65536 + ord(c) for c in text]

    def meta(self):
        return {"tokenizer": "large"}


def test_f37_vocabularies_above_65536_are_written_as_uint32_without_wrapping(tmp_path):
    write_dataset(tmp_path, LargeTokenizer(), {"train": ["abc"] * 9, "val": ["a"]})
    assert read_meta(tmp_path)["dtype"] == "uint32"
    assert read(tmp_path, "train")[0] == 65536 + ord("a")
    assert TokenFile(tmp_path / "train.bin", 8, 70000, "uint32")
    assert np.array([65536 + 97]).astype(np.uint16)[0] == 97  # the naive way wraps


def test_empty_split_is_refused_and_nothing_appears(tmp_path):
    with pytest.raises(ValueError, match="val split .* would be empty"):
        write_dataset(tmp_path, ByteTokenizer(), {"train": ["ab"], "val": []})
    assert not (tmp_path / "train.bin").exists() and not (tmp_path / "meta.json").exists()


def test_split_keeps_every_character():
    assert split_text("0123456789") == {"train": ["012345678"], "val": ["9"]}


def prepare(start, script, *arguments):
    process = start(script, *arguments)
    return process.wait(), process.stdout.read()


def test_f29_stdlib_char_is_real_text_with_json_metadata(start, tmp_path):
    code, shown = prepare(start, "data/stdlib_char/prepare.py", f"--out={tmp_path}")
    assert code == 0, shown
    meta = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    assert meta["tokens"]["train"] > 1_000_000 and meta["tokens"]["val"] > 100_000
    text = from_meta(meta).decode(read(tmp_path, "val"))
    assert "import " in text and "def __init__(self" in text
    assert not list(tmp_path.glob("*.pkl"))


def test_shakespeare_char_takes_a_local_copy(start, tmp_path):
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 20
    (tmp_path / "input.txt").write_text(text, encoding="utf-8")
    code, shown = prepare(start, "data/shakespeare_char/prepare.py",
                          f"--input={tmp_path / 'input.txt'}", f"--out={tmp_path}")  # fmt: skip
    assert code == 0, shown
    tokenizer = from_meta(read_meta(tmp_path))
    assert tokenizer.decode(read(tmp_path, "train") + read(tmp_path, "val")) == text
    assert len(read(tmp_path, "train")) == int(len(text) * 0.9)  # nanoGPT's split


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare"])
def test_download_failure_is_one_line_that_says_what_to_do(start, tmp_path, name, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    code, shown = prepare(start, f"data/{name}/prepare.py", f"--out={tmp_path}")
    assert code == 1 and shown.count("\n") == 1
    assert shown.startswith("error: cannot download") and "--input=FILE" in shown


def test_text_takes_files_and_globs(start, tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_text(f"text of {name} ü\n" * 20, encoding="utf-8")
    pattern = f"{tmp_path}/*.txt,{tmp_path / 'c.md'}"
    for kind in ("byte", "char"):
        code, shown = prepare(start, "data/text/prepare.py", f"--input={pattern}",
                              f"--tokenizer={kind}", f"--out={tmp_path / kind}")  # fmt: skip
        assert code == 0, shown
        tokenizer = from_meta(read_meta(tmp_path / kind))
        train = tokenizer.decode(read(tmp_path / kind, "train"))
        val = tokenizer.decode(read(tmp_path / kind, "val"))
        for name in ("a.txt", "b.txt", "c.md"):
            assert f"text of {name} ü" in train
        assert "c.md" in val and len(val) < len(train) / 5
    assert read(tmp_path / "byte", "train").count(256) == 3  # one end of text per document


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no input: pass --input=FILE"),
        (["--input=nowhere.txt"], "no file matches --input=nowhere.txt"),
        (["--input={binary}", "--tokenizer=byte"], "cannot read .* as UTF-8 text"),
        (["--input={binary}", "--tokenizer=bpe"], "unknown tokenizer='bpe'"),
        (["--input={binary}", "--val_fraction=1"], "val_fraction=1.0 must be above 0"),
    ],
)
def test_bad_input_of_text_is_one_clear_line(run, tmp_path, arguments, message):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa" * 10)
    arguments = [argument.format(binary=tmp_path / "binary") for argument in arguments]
    with pytest.raises(ValueError, match=message):
        run("data/text/prepare.py", *arguments, f"--out={tmp_path}")


def test_gpt2_data_sets_go_through_tiktoken(run, tmp_path, monkeypatch):
    import tiktoken

    small = tiktoken.Encoding(
        "small",
        pat_str=r"[a-z]+|.",
        mergeable_ranks={bytes([i]): i for i in range(256)} | {b"he": 256},
        special_tokens={},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: small)
    (tmp_path / "input.txt").write_text("hehe!" * 20, encoding="utf-8")
    run("data/shakespeare/prepare.py", f"--input={tmp_path / 'input.txt'}", f"--out={tmp_path}")
    meta = read_meta(tmp_path)
    assert (meta["tokenizer"], meta["vocab_size"]) == ("gpt2", 50257)
    assert read(tmp_path, "train")[:3] == [256, 256, ord("!")]
    assert read(tmp_path, "train")[-1] == 50256


def test_prepare_scripts_do_not_overwrite_a_good_data_set_when_they_fail(tmp_path):
    write_dataset(tmp_path, CharTokenizer.train("ab"), {"train": ["ab"], "val": ["b"]})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="does not know 'c'"):
        write_dataset(tmp_path, CharTokenizer.train("ab"), {"train": ["abc"], "val": ["b"]})
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
