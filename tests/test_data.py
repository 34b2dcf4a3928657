"""The prepare scripts and the writer they share."""

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from configurator import read_settings
from steady import UserError, folder, textfiles
from steady import prepare as hub
from steady import tokenizer as tokenizers_
from steady.dataloader import TokenFile, read_meta
from steady.prepare import prepare_from_files, split_text, write_dataset
from steady.tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer, from_meta


def read(folder, split):
    meta = read_meta(folder)
    return np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"]).tolist()


def test_a_tokenizer_of_your_own_needs_no_more_than_encode(tmp_path):
    class Yours(ByteTokenizer):
        encode_between = property()  # raises AttributeError

        def encode(self, text):
            return list(text.encode())

    write_dataset(tmp_path, Yours(), {"train": ["ab", "c"], "val": ["d"]})
    assert read(tmp_path, "train") == [97, 98, 256, 99, 256]


def test_written_files_and_meta_agree(tmp_path, capsys):
    write_dataset(tmp_path, ByteTokenizer(), {"train": ["ab", "c", "d"], "val": ["ef"]})
    assert "replacing" not in capsys.readouterr().out
    write_dataset(tmp_path, ByteTokenizer(), {"train": ["ab", "c"], "val": ["d"]})
    assert "train.bin: 5 tokens, replacing an earlier data set" in capsys.readouterr().out
    meta = read_meta(tmp_path)
    assert read(tmp_path, "train") == [97, 98, 256, 99, 256]
    assert read(tmp_path, "val") == [100, 256]
    assert meta["tokens"] == {"train": 5, "val": 2}
    assert (meta["dtype"], meta["vocab_size"]) == ("uint16", 257)
    assert meta["unigram_entropy"] == pytest.approx(np.log(2))
    assert from_meta(meta).decode(read(tmp_path, "train")) == "abc"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.json", "train.bin", "val.bin"]


class LargeTokenizer:
    vocab_size, end_of_text, begin_of_text = 70000, 69999, None

    def encode_between(self, before, text, after):
        return [65536 + ord(c) for c in text]

    def meta(self):
        return {"tokenizer": "hf", "json": "x" * 70000}


def test_f37_vocabularies_above_65536_are_written_as_uint32_without_wrapping(tmp_path):
    write_dataset(tmp_path, LargeTokenizer(), {"train": ["abc"] * 9, "val": ["a"]})
    assert read_meta(tmp_path)["dtype"] == "uint32"
    assert read(tmp_path, "train")[0] == 65536 + ord("a")
    assert TokenFile(tmp_path / "train.bin", 8, 70000, "uint32")
    assert np.array([65536 + 97]).astype(np.uint16)[0] == 97  # a plain cast wraps around


def test_a_file_without_spaces_is_not_held_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(textfiles, "READ_SIZE", 100)
    monkeypatch.setattr(tokenizers_, "PIECE", 5000)
    path, text = tmp_path / "dna.txt", "ACGT" * 10_000
    path.write_text(text)
    pieces = list(textfiles.pieces_of(path, 0, "text", 0.1, ByteTokenizer()))
    assert max(len(piece.text) for piece in pieces) < 8000
    for split, expected in (("train", text[:36_000]), ("val", text[36_000:])):
        assert "".join(piece.text for piece in pieces if piece.split == split) == expected


def test_many_documents_without_tokens_are_not_all_held(monkeypatch):
    monkeypatch.setattr(hub, "BATCH", 1000)
    found = list(hub.batches(textfiles.Piece("train", "", "") for _ in range(600)))
    assert sum(map(len, found)) == 600 and len(found) == 60


def test_empty_split_is_refused_and_nothing_appears(tmp_path):
    with pytest.raises(ValueError, match="val split .* would be empty"):
        write_dataset(tmp_path, ByteTokenizer(), {"train": ["ab"], "val": []})
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_is_full_of_tokens_is_told_as_such(tmp_path, monkeypatch):
    """Errors of numpy's tofile have no errno, so the user would see a traceback."""
    monkeypatch.setattr(folder, "open", lambda _, mode: open("/dev/full", mode), raising=False)
    with pytest.raises(OSError) as error:
        write_dataset(tmp_path, ByteTokenizer(), {"train": ["ab" * 9999], "val": ["ef"]})
    assert error.value.errno == errno.ENOSPC and str(tmp_path) in error.value.filename


def test_split_keeps_every_character():
    assert split_text("0123456789") == {"train": ["012345678"], "val": ["9"]}


@pytest.mark.parametrize("name", sorted(p.parent.name for p in ROOT.glob("data/*/prepare.py")))
def test_a_prepare_script_finds_the_project_from_another_data_folder(name):
    """Typed as ../NAME/prepare.py, which leaves ".." in the middle of __file__."""
    script, path = ROOT / "data" / "text" / ".." / name / "prepare.py", ["elsewhere"]
    line = "sys.path" + script.read_text().partition("sys.path")[2].partition("\n")[0]
    names = {"__file__": str(script), "os": os, "Path": Path, "sys": SimpleNamespace(path=path)}
    exec(line, names)
    assert str(ROOT) in path


def prepare(fork, script, *arguments):
    process = fork(script, *arguments)
    shown = process.stdout.read()
    return process.wait(), shown


def test_f29_stdlib_char_is_real_text_with_json_metadata(fork, tmp_path):
    code, shown = prepare(fork, "data/stdlib_char/prepare.py", f"--out={tmp_path}")
    assert code == 0, shown
    meta = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    assert meta["tokens"]["train"] > 1_000_000 and meta["tokens"]["val"] > 100_000
    text = from_meta(meta).decode(read(tmp_path, "val"))
    assert "import " in text and "def __init__(self" in text
    assert not list(tmp_path.glob("*.pkl"))


def test_shakespeare_char_takes_a_local_copy(fork, tmp_path):
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 20
    (tmp_path / "input.txt").write_text(text, encoding="utf-8")
    code, shown = prepare(fork, "data/shakespeare_char/prepare.py",
                          f"--input={tmp_path / 'input.txt'}", f"--out={tmp_path}")  # fmt: skip
    assert code == 0, shown
    tokenizer = from_meta(read_meta(tmp_path))
    assert tokenizer.decode(read(tmp_path, "train") + read(tmp_path, "val")) == text
    assert len(read(tmp_path, "train")) == int(len(text) * 0.9)  # nanoGPT's split


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare"])
def test_download_failure_is_one_line_that_says_what_to_do(fork, tmp_path, name, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens there
    code, shown = prepare(fork, f"data/{name}/prepare.py", f"--out={tmp_path}")
    assert code == 1 and shown.count("\n") == 1
    assert shown.startswith("error: cannot download") and "--input=FILE" in shown


def test_text_takes_files_and_globs(run, tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_text(f"text of {name} ü\n" * 20, encoding="utf-8")
    pattern = f"{tmp_path}/*.txt,{tmp_path / 'c.md'}"
    for kind in ("byte", "char"):
        run("data/text/prepare.py", f"--input={pattern}", f"--tokenizer={kind}",
            f"--out={tmp_path / kind}")  # fmt: skip
        tokenizer = from_meta(read_meta(tmp_path / kind))
        train = tokenizer.decode(read(tmp_path / kind, "train"))
        val = tokenizer.decode(read(tmp_path / kind, "val"))
        for name in ("a.txt", "b.txt", "c.md"):
            assert f"text of {name} ü" in train
        assert "c.md" in val and len(val) < len(train) / 5
    assert read(tmp_path / "byte", "train").count(256) == 3  # one end-of-text token per document


def test_what_an_earlier_run_has_written_is_no_text(run, tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 20, encoding="utf-8")
    for _ in range(2):  # ASCII is text, even in a .bin
        run("data/text/prepare.py", f"--input={tmp_path}/*", "--tokenizer=byte",
            f"--out={tmp_path}")  # fmt: skip
        assert len(read(tmp_path, "train")) + len(read(tmp_path, "val")) == 202


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no input: pass --input=FILE"),
        (["--input={binary.parent}"], r"no file matches .*: name its files, such as .*/\*.txt"),
        (["--input={odd}"], r"such as --input='[^']*it'\"'\"'s \[\[\]1\]/\*\*/\*.txt'"),
        (["--input=nowhere.txt"], "no file matches --input=nowhere.txt"),
        (["--input={binary},"], "has an empty name between its commas, or at either end"),
        (["--input={text}", "--tokenizer=hf:"], "unknown tokenizer='hf:'"),
        (
            ["--input={binary}", "--tokenizer=byte"],
            "cannot read .*binary as UTF-8 text: invalid start byte. Use",
        ),
        (["--input={text}", "--tokenizer=bpe"], "unknown tokenizer='bpe'"),
        (["--input={text}", "--tokenizer=bpe:²"], "unknown tokenizer='bpe:²'.*bpe:SIZE"),
        (["--input={text}", "--val_fraction=1"], "val_fraction=1.0 must be above 0"),
    ],
)
def test_bad_input_of_text_is_one_clear_line(run, tmp_path, arguments, message):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa" * 10)
    (tmp_path / "a.txt").write_text("text " * 99)
    (tmp_path / "it's [1]").mkdir()
    paths = {"binary": tmp_path / "binary", "text": tmp_path / "a.txt",
             "odd": tmp_path / "it's [1]"}  # fmt: skip
    arguments = [argument.format(**paths) for argument in arguments]
    with pytest.raises(ValueError, match=message):
        run("data/text/prepare.py", *arguments, f"--out={tmp_path}")


def test_a_file_may_have_a_comma_in_its_name(run, tmp_path):
    (tmp_path / "a,b [1].txt").write_text("some text\n" * 20, encoding="utf-8")
    run("data/text/prepare.py", f"--input={tmp_path / 'a,b [1].txt'}", "--tokenizer=byte",
        f"--out={tmp_path / 'out'}")  # fmt: skip
    assert sum(read_meta(tmp_path / "out")["tokens"].values()) == 202
    names = ",".join(f"nowhere_{i}.txt" for i in range(40))  # longer than a file name may be
    with pytest.raises(ValueError, match="no file matches --input=nowhere_0.txt$"):
        run("data/text/prepare.py", f"--input={names}", f"--out={tmp_path / 'out'}")


def test_gpt2_data_sets_go_through_tiktoken(run, tmp_path, gpt2_files):
    (tmp_path / "input.txt").write_text("hello world" * 20, encoding="utf-8")
    run("data/shakespeare/prepare.py", f"--input={tmp_path / 'input.txt'}", f"--out={tmp_path}")
    meta = read_meta(tmp_path)
    assert (meta["tokenizer"], meta["vocab_size"]) == ("gpt2", 50257)
    assert read(tmp_path, "train")[:2] == [31373, 995]  # hello, world
    assert read(tmp_path, "train")[-1] == 50256


def test_prepare_scripts_do_not_overwrite_a_good_data_set_when_they_fail(tmp_path):
    write_dataset(tmp_path, CharTokenizer.train("ab"), {"train": ["ab"], "val": ["b"]})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="does not know 'c'"):
        write_dataset(tmp_path, CharTokenizer.train("ab"), {"train": ["abc"], "val": ["b"]})
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_rows_of_jsonl_parquet_and_gz_are_documents(run, tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = [f"text {i}" for i in range(20)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(rows, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "c.parquet")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("".join(texts).encode()))
    found = {}
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt.gz"):
        out = tmp_path / f"out-{name}"
        run("data/text/prepare.py", f"--input={tmp_path / name}", "--tokenizer=byte",
            f"--out={out}")  # fmt: skip
        found[name] = read(out, "train"), read(out, "val")
    assert found["a.jsonl"] == found["b.jsonl.gz"] == found["c.parquet"]
    train, val = (ByteTokenizer().decode(ids) for ids in found["a.jsonl"])
    assert val == "text 9text 19" and train.startswith("text 0text 1")
    assert ByteTokenizer().decode(found["d.txt.gz"][0]).startswith("text 0text 1")


BAD_ROWS = {
    '{"body": "x"}': "no 'text', only body: pass --column=NAME",
    '{"text": ': "not JSON",
    "[1]": "a list, not an object with 'text'",
    "{}": "no 'text', only {}: pass --column=NAME",
    '{"text": null}': "'text' is null, not text",
    '{"text": 7}': "'text' is int, not text",
    '{"text": ' + "[" * 100_000: "not JSON",  # deeper than Python's stack
    '{"text": "\\ud83d"}': "not UTF-8",
}


@pytest.mark.parametrize("packed", [False, True])
def test_bad_rows_are_named_by_file_and_line_and_left_out_if_asked(run, tmp_path, packed):
    rows = [json.dumps({"text": f"text {i}"}) for i in range(30)]
    for i, bad in enumerate(BAD_ROWS):
        rows.insert(4 * i + 3, bad)
    rows.insert(1, "")  # blank lines are skipped
    path = tmp_path / f"a.jsonl{'.gz' if packed else ''}"
    content = ("\n".join(rows) + "\n").encode() + b'{"text": "\xff"}\n'
    path.write_bytes(gzip.compress(content) if packed else content)
    arguments = f"--input={path}", "--tokenizer=byte", f"--out={tmp_path / 'out'}"
    with pytest.raises(ValueError) as error:
        run("data/text/prepare.py", *arguments)
    assert type(error.value) is UserError  # printed without a traceback
    first = next(iter(BAD_ROWS.values()))
    hint = "(data/text/prepare.py has --skip_bad_rows=True)"
    assert str(error.value) == f"{path}, line 5: {first} {hint}"
    shown = run("data/text/prepare.py", *arguments, "--skip_bad_rows=True")
    for i, problem in enumerate(BAD_ROWS.values()):
        assert f"{path}, line {4 * i + 5}: {problem}" in shown
    assert f"{path}, line 40: not JSON ('utf-8' codec" in shown
    assert "warning: skipped 9 bad rows" in shown
    text = "".join(ByteTokenizer().decode(read(tmp_path / "out", s)) for s in ("train", "val"))
    assert sorted(text.split("text ")[1:], key=int) == [str(i) for i in range(30)]


def test_broken_files_are_named(run, tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "c.txt.gz").write_bytes(b"not gzip")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 999)[:-9])
    (tmp_path / "e.parquet").write_bytes(b"not parquet")
    damaged = bytearray(gzip.compress(np.random.default_rng(0).bytes(5000).hex().encode()))
    damaged[1000:1400] = b"\xff" * 400  # breaks more than the checksum
    (tmp_path / "i.txt.gz").write_bytes(damaged)
    for name in ("c.txt.gz", "d.jsonl.gz", "e.parquet", "i.txt.gz"):
        with pytest.raises(ValueError, match=f"cannot read .*{name}"):
            run("data/text/prepare.py", f"--input={tmp_path / name}", "--tokenizer=byte",
                f"--out={tmp_path / name}-out")  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "f.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "g.parquet")
    for name, message in (("f", "no columns named 'text' among .'body'.: pass --column=NAME"),
                          ("g", "row 2: 'text' is null, not text")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run("data/text/prepare.py", f"--input={tmp_path / name}.parquet", "--tokenizer=byte",
                f"--out={tmp_path / name}-out")  # fmt: skip


def test_own_files_in_parts_processes_and_after_interruptions_are_the_same(
    tmp_path, monkeypatch, gpt2_files
):
    import pyarrow
    import pyarrow.parquet

    texts = [f"A text, number {i}.\n\n  It's {'long ' * (i % 50)}\n" for i in range(800)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(rows, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=30)
    (tmp_path / "d.txt").write_text("".join(texts), encoding="utf-8")
    (tmp_path / "e.txt").write_text("short", encoding="utf-8")
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt", "e.txt")]
    contents = {}

    def prepare(out, tokenizer="gpt2", **settings):
        prepare_from_files(tmp_path / out, tokenizer, paths, **settings)
        contents[out] = read(tmp_path / out, "train"), read(tmp_path / out, "val")

    prepare("plain")
    prepare("char", "char")
    whole = split_text("".join(texts))  # encoded in one piece
    expected = [*GPT2Tokenizer().encode(whole["train"][0]), 50256]
    assert contents["plain"][0][-len(expected) - 3 : -3] == expected  # before "shor" and an end

    monkeypatch.setattr(textfiles, "READ_SIZE", 700)
    monkeypatch.setattr(tokenizers_, "PIECE", 6000)
    monkeypatch.setattr(hub, "BATCH", 9000)
    pieces = list(textfiles.pieces_of(tmp_path / "d.txt", 3, "text", 0.1, GPT2Tokenizer()))
    assert len(pieces) > 10
    prepare("processes", num_proc=2)
    prepare("char-parts", "char")
    assert contents["char-parts"] == contents["char"]

    prepare("parts")
    with pytest.raises(ValueError, match="no 'body', only text") as error:
        prepare_from_files(tmp_path / "wrong", "gpt2", paths[:1], column="body", num_proc=2)
    assert error.traceback[-1].path.name == "prepare.py"  # our own error, printed as one line

    assert contents["plain"] == contents["parts"] == contents["processes"]


def test_links_are_not_followed_round_and_round_and_no_file_is_read_twice(run, tmp_path):
    notes = tmp_path / "notes"
    (notes / "sub").mkdir(parents=True)
    (notes / "a.md").write_text("some text\n" * 20)
    (notes / "sub" / "b.md").write_text("more text\n" * 20)
    (notes / ".hidden.md").write_text("a draft\n" * 20)
    (notes / "sub" / "up").symlink_to("..")
    (notes / "loop").symlink_to(".")
    os.link(notes / "a.md", notes / "sub" / "c.md")
    inputs = [f"{notes}/**/*.md", f"{notes}/a.md", f"{notes}/**.md"]
    run("data/text/prepare.py", f"--input={','.join(inputs)}", "--tokenizer=byte",
        f"--out={tmp_path / 'out'}")  # fmt: skip
    text = "".join(ByteTokenizer().decode(read(tmp_path / "out", s)) for s in ("train", "val"))
    assert text.count("some text") == text.count("more text") == 20 and "draft" not in text
    names = [notes / "a.md", notes / "sub" / "b.md", notes / "sub" / "c.md"]
    assert textfiles.files_matching(f"{notes}/**") == names
    assert textfiles.files_matching(f"{notes}/.hidden.md") == [notes / ".hidden.md"]
    assert textfiles.files_matching(f"{notes}/.h*") == [notes / ".hidden.md"]
    for name in (".hidden/a.md", ".hidden/.git/b.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = textfiles.files_matching(f"{tmp_path}/.hidden/**/*.md")
    assert found == [tmp_path / ".hidden" / "a.md"]


def test_what_a_glob_would_pass_over_is_named(monkeypatch, tmp_path):
    (tmp_path / "notes" / "sub").mkdir(parents=True)
    (tmp_path / "notes" / "gone.md").symlink_to("elsewhere/a.md")
    for pattern in ("notes/*.md", "notes/gone.md", "**/*.md"):
        with pytest.raises(ValueError, match="cannot read .*gone.md: .*No such file or directory"):
            prepare_from_files(tmp_path, "byte", textfiles.files_matching(f"{tmp_path}/{pattern}"))
    (tmp_path / "notes" / "gone.md").unlink()
    os.mkfifo(tmp_path / "notes" / "pipe.md")
    with pytest.raises(ValueError, match="pipe.md is a device or pipe, not a file"):
        prepare_from_files(tmp_path, "byte", textfiles.files_matching(f"{tmp_path}/notes/*.md"))
    (tmp_path / "notes" / "pipe.md").unlink()
    (tmp_path / "notes" / "lost+found").mkdir()
    found = tmp_path / "notes" / "sub" / "a.md"
    found.write_text("text")
    monkeypatch.setattr(  # may be entered, but not listed
        os, "access", lambda path, mode: Path(path) == tmp_path or mode == os.X_OK
    )
    for pattern in ("notes/**/*.md", "**", "notes/sub/*.md"):
        with pytest.raises(ValueError, match="no permission to read the folder .*notes"):
            textfiles.files_matching(f"{tmp_path}/{pattern}")
    assert textfiles.files_matching(f"{tmp_path}/*/sub/a.md") == [found]


def test_rows_of_many_small_files_are_held_out_too(run, tmp_path):
    rows = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(9))
    for i in range(40):
        (tmp_path / f"{i}.JSONL").write_text(rows)
    run("data/text/prepare.py", f"--input={tmp_path}/*.JSONL", "--tokenizer=byte",
        f"--out={tmp_path / 'out'}")  # fmt: skip
    counts = [read(tmp_path / "out", split).count(256) for split in ("train", "val")]
    assert sum(counts) == 360 and counts[1] == pytest.approx(36, abs=2)


def test_a_folder_of_ones_own_is_kept_whatever_its_name(run, tmp_path):
    own = tmp_path / "corpus" / "shards"
    own.mkdir(parents=True)
    (own / "a.txt").write_text("text " * 100)
    (tmp_path / "empty.txt").write_text("")
    run("data/text/prepare.py", f"--input={own}/*.txt", "--tokenizer=byte", f"--out={own.parent}")
    with pytest.raises(ValueError, match="would be empty: use more text, or another --val_frac"):
        run("data/text/prepare.py", f"--input={tmp_path}/empty.txt", "--tokenizer=byte",
            f"--out={own.parent}")  # fmt: skip
    assert (own / "a.txt").exists()
    assert {path.name for path in own.parent.glob(".*")} == set()


def test_one_preparation_at_a_time_writes_to_a_folder(run, tmp_path, other_run):
    (tmp_path / "a.txt").write_text("text " * 100)
    other_run(tmp_path / "out")
    with pytest.raises(ValueError, match="another process is writing to .*out"):
        run("data/text/prepare.py", f"--input={tmp_path}/a.txt", "--tokenizer=byte",
            f"--out={tmp_path / 'out'}")  # fmt: skip


# ---- data sets from the hub -------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A parquet repository like those on the hub, with a named configuration in its README."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repository"
    (folder / "sample" / "10BT").mkdir(parents=True)
    for i in range(3):
        texts = [f"document {i} {j}" for j in range(100)]
        table = pyarrow.table({"text": texts, "id": [str(j) for j in range(100)]})
        pyarrow.parquet.write_table(table, folder / "sample" / "10BT" / f"{i:03d}_00000.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: sample/10BT/*\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n"
        "    path: sample/10BT/*\n---\n"
    )
    return folder


@pytest.mark.parametrize("name", ["openwebtext", "fineweb_edu", "tinystories", "climbmix"])
def test_f38_hub_data_sets_are_read_as_parquet(run, tmp_path, repository, gpt2_files, name):
    """No dataset script is needed: `datasets` no longer runs them."""
    default = read_settings(ROOT / "data" / name / "prepare.py")["path"].default
    assert "/" in default  # nanoGPT's "openwebtext", with no owner, is a script
    run(f"data/{name}/prepare.py", f"--path={repository}", f"--out={tmp_path / 'out'}",
        "--val_fraction=0.1")  # fmt: skip
    meta = read_meta(tmp_path / "out")
    train, val = (GPT2Tokenizer().decode(read(tmp_path / "out", s)) for s in ("train", "val"))
    documents = (train + val).split("<|endoftext|>")
    assert sorted(documents) == sorted(
        ["", *(f"document {i} {j}" for i in range(3) for j in range(100))]
    )
    assert meta["tokens"]["val"] > 0 and 10 < val.count("<|endoftext|>") < 60
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"train.bin", "val.bin", "meta.json"}


def test_a_damaged_part_of_a_hub_data_set_is_named(run, tmp_path, repository):
    part = repository / "sample" / "10BT" / "001_00000.parquet"
    part.write_bytes(part.read_bytes()[:-8])
    command = ["data/tinystories/prepare.py", f"--path={repository}", "--tokenizer=byte",
               f"--out={tmp_path / 'out'}"]  # fmt: skip
    with pytest.raises(UserError, match=r"cannot read part 2 of 3 of .*Parquet magic bytes"):
        run(*command, "--streaming=True")
    with pytest.raises(UserError, match=r"cannot load .*Parquet magic bytes"):
        run(*command)


def test_files_that_have_changed_in_a_folder_are_read_again(run, tmp_path, repository):
    import pyarrow
    import pyarrow.parquet

    command = ["data/tinystories/prepare.py", f"--path={repository}", "--tokenizer=byte",
               f"--out={tmp_path / 'out'}"]  # fmt: skip
    run(*command)
    part = repository / "sample" / "10BT" / "001_00000.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["new"] * 100}), part)
    (repository / "sample" / "10BT" / "002_00000.parquet").unlink()
    run(*command)
    text = ByteTokenizer().decode(read(tmp_path / "out", "train") + read(tmp_path / "out", "val"))
    assert (text.count("new"), text.count("document")) == (100, 100)  # the copy had 0 and 300


def test_f38_a_repository_with_a_script_is_one_line(run, tmp_path, repository):
    (repository / "repository.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ValueError, match="cannot load .*[Ss]cripts are no longer supported"):
        run("data/tinystories/prepare.py", f"--path={repository}", "--tokenizer=byte",
            f"--out={tmp_path / 'out'}")  # fmt: skip


@pytest.mark.parametrize(
    ("readme", "message"),
    [
        ("configs:\n- config_name: a\n  data_files: sample/10BT/000*\n- config_name: b\n"
         "  data_files: sample/10BT/001*\n", "'a', 'b'.*choose a configuration and a split with"),
        ("configs:\n- config_name: default\n  data_files:\n  - split: test\n"
         "    path: sample/10BT/*\n", "'test'.* and --split=NAME"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streaming", [False, True])
def test_f68_several_configurations_and_other_splits_have_remedies_that_work(
    run, tmp_path, repository, readme, message, streaming
):
    (repository / "README.md").write_text(f"---\n{readme}---\n")
    arguments = ["data/tinystories/prepare.py", f"--path={repository}", "--tokenizer=byte",
                 f"--out={tmp_path / 'out'}", f"--streaming={streaming}"]  # fmt: skip
    with pytest.raises(ValueError, match=message):
        run(*arguments)
    run(*arguments, "--name=a" if "'a'" in message else "--split=test", "--val_fraction=0.2")


def prepare_hub(run, repository, out, **settings):
    settings = {"tokenizer": "byte", "val_fraction": 0.1, "path": repository, "out": out} | settings
    return run("data/tinystories/prepare.py", *(f"--{k}={v}" for k, v in settings.items()))


def test_processes_streaming_and_interruptions_change_nothing(
    run, tmp_path, repository, monkeypatch
):
    monkeypatch.setattr(hub, "DOCUMENTS_PER_SHARD", 100)  # the same as documents per file
    contents = {}

    def prepare(out, **settings):
        prepare_hub(run, repository, tmp_path / out, **settings)
        contents[out] = read(tmp_path / out, "train"), read(tmp_path / out, "val")

    prepare("plain")
    prepare("processes", num_proc=2)
    prepare("streaming", streaming=True)

    monkeypatch.setattr(hub, "BATCH", 4000)
    assert all(content == contents["plain"] for content in contents.values())


def test_a_document_of_the_hub_that_is_no_text_is_left_out_and_named(run, tmp_path, repository):
    import pyarrow
    import pyarrow.parquet

    file = repository / "sample" / "10BT" / "001_00000.parquet"
    table = pyarrow.parquet.read_table(file)
    texts = [None if i == 7 else text for i, text in enumerate(table["text"].to_pylist())]
    pyarrow.parquet.write_table(table.set_column(0, "text", pyarrow.array(texts)), file)
    shown = prepare_hub(run, repository, tmp_path / "out", streaming=True)
    counts = [read(tmp_path / "out", split).count(256) for split in ("train", "val")]
    assert sum(counts) == 299
    assert "document 8 of part 2 of 3: 'text' is null, not text" in shown
    assert "warning: skipped 1 bad rows" in shown


@pytest.mark.parametrize("num_proc", [1, 2])
def test_the_first_tokens_of_a_corpus_can_be_taken(
    run, tmp_path, repository, monkeypatch, num_proc
):
    monkeypatch.setattr(hub, "BATCH", 2000)
    read_parts, scramble = [], hub.scramble
    monkeypatch.setattr(
        hub,
        "scramble",
        lambda rows, key: (read_parts.append(rows[0] >> 32), scramble(rows, key))[1],
    )

    def prepare(out, **settings):
        prepare_hub(run, repository, tmp_path / out, streaming=True, **settings)
        return read(tmp_path / out, "train")

    whole = prepare("whole")
    count = len(whole) // 3
    read_parts.clear()
    assert prepare("first", max_tokens=count, num_proc=num_proc) == whole[:count]
    assert read_meta(tmp_path / "first")["tokens"]["train"] == count
    assert 2 not in read_parts  # two of three parts
    assert prepare("more", max_tokens=10**9) == whole


def test_no_network_is_one_line(run, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot load no-one/nothing .*or pass --path=FOLDER"):
        run("data/tinystories/prepare.py", "--path=no-one/nothing", "--tokenizer=byte",
            f"--out={tmp_path}")  # fmt: skip


def test_texts_are_prepared_without_torch(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    arguments = [f"--input={tmp_path / 'a.txt'}", f"--out={tmp_path}", "--tokenizer=byte"]
    code = f"""
import runpy, sys
sys.modules["torch"] = None  # importing it fails
sys.argv = {["prepare.py", *arguments]}
runpy.run_path("data/text/prepare.py", run_name="__main__")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert read_meta(tmp_path)["vocab_size"] == 257


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "input/output error")])
def test_a_fault_of_the_machine_is_no_bad_row(error):
    class Broken(ByteTokenizer):
        def encode_between(self, before, text, after):
            raise error

    with pytest.raises(type(error)):
        hub.encode_batch(Broken(), [hub.Piece("train", "a", "document 1")])


def test_a_tokenizer_of_ones_own_gets_no_empty_document():
    class Own:
        vocab_size, begin_of_text, end_of_text, stop_tokens = 257, None, None, []

        def encode(self, text):
            return [256, *text.encode()]

    assert hub.encode_document(Own(), hub.Piece("train", "", "document 1")) == ([], 0)


def test_meta_json_of_others_beside_a_pickle_stays(tmp_path):
    (tmp_path / "meta.pkl").touch()
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(UserError, match="belongs to no data set"):
        hub.refuse_foreign_files(tmp_path)
