"""Texts, tokenizers, samples and exports like those of users (F61 to F69)."""

import errno
import gzip
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY

import configurator
import convert
from configurator import read_settings, resolve
from steady import UserError, checkpoint, prepare, textfiles
from steady import tokenizer as tokenizers_
from steady.dataloader import DataSet, read_meta
from steady.prepare import prepare_from_files, write_dataset
from steady.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    HFTokenizer,
    cut_text,
    encode_prompt,
    from_meta,
    load_tokenizer,
    train_bpe,
)

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

STORIES = [f"Story {i} begins here. The end of {i}." for i in range(300)]


def byte_level(special, begin=None):
    """A small byte-level BPE. If `begin` is given, its template prepends that token."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(STORIES, tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet))  # fmt: skip
    if begin:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, special.index(begin))]
        )
    return made


def sentencepiece():
    """Like Llama's: a space before each text, ▁ for spaces, byte fallback; without whole words."""
    model = tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    # only while it learns: no token spans two words
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    made.train_from_iterator(
        STORIES, tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    )
    made.pre_tokenizer = None
    made.add_special_tokens(["<s>", "</s>"])
    made.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)])  # fmt: skip
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made


def save_model(folder, tokenizer, kind="Llama", eos=1, generation_eos=None, template=None, **kw):
    """A model with random weights, saved by `save_pretrained`."""
    torch.manual_seed(0)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kw)
    made.chat_template = template
    made.save_pretrained(folder)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=256, eos_token_id=eos,
        bos_token_id=None if made.bos_token is None else made.bos_token_id)  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    if generation_eos:
        model.generation_config.eos_token_id = generation_eos
    model.save_pretrained(folder)
    return folder


def with_bos(folder):
    tokenizer = byte_level(["<s>", "</s>"], begin="<s>")
    return save_model(folder, tokenizer, bos_token="<s>", eos_token="</s>")


def fallback(folder):
    return save_model(folder, sentencepiece(), eos=2, bos_token="<s>", eos_token="</s>",
                      unk_token="<unk>")  # fmt: skip


def qwen(folder):
    tokenizer = byte_level(["<|endoftext|>", "<|im_end|>"])
    return save_model(folder, tokenizer, "Qwen3", 0, eos_token="<|endoftext|>")


def encode_pieces(tokenizer, chunks):
    return [[*tokenizer.encode_between(*piece)] for piece in cut_text(tokenizer, chunks)]


def read(folder, split):
    return np.fromfile(folder / f"{split}.bin", dtype=read_meta(folder)["dtype"]).tolist()


def rows_file(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def greedy(folder, prompt, n=12):
    """Greedy text from transformers, called the usual way."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.max_length = None
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=n, do_sample=False)[0].tolist()
    return inputs["input_ids"][0].tolist(), ids[inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("make", [with_bos, fallback, qwen])
def test_f61_f66_data_prompts_and_exports_do_as_the_model_was_trained(
    run, tmp_path, make, monkeypatch
):
    """Greedy text stays the same from transformers through prepare, finetune (with a tiny learning
    rate), sample and export, back to transformers."""
    folder = make(tmp_path / "model")
    prompt = "Story 7 begins"
    rows_file(tmp_path / "a.jsonl", STORIES)
    prepare_from_files(tmp_path / "data", f"hf:{folder}", [tmp_path / "a.jsonl"])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    meta = read_meta(tmp_path / "data")
    end = meta["end_of_text"]
    assert read(tmp_path / "data", "train")[: len(theirs(STORIES[0]).input_ids) + 1] == [
        *theirs(STORIES[0]).input_ids, end]  # fmt: skip
    run("train.py", f"--init_from={folder}", f"--dataset={tmp_path / 'data'}",
        f"--out_dir={tmp_path / 'out'}", "--block_size=16", "--batch_size=2", "--max_iters=2",
        "--eval_iters=1", "--eval_interval=2", "--gradient_accumulation_steps=1",
        "--learning_rate=1e-9", "--min_lr=1e-10", "--device=cpu", "--compile=False",
        "--dtype=float32")  # fmt: skip
    run("convert.py", f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'export'}")
    before, after = greedy(folder, prompt), greedy(tmp_path / "export", prompt)
    assert before == after
    shown = run("sample.py", f"--out_dir={tmp_path / 'out'}", f"--start={prompt}", "--top_k=0",
                "--num_samples=1", "--temperature=0", "--max_new_tokens=12", "--device=cpu",
                "--dtype=float32")  # fmt: skip
    ids = [id for id in before[1]]
    ids = ids[: ids.index(end)] if end in ids else ids
    ours = from_meta(meta)
    expected = prompt + ours.decode(before[0] + ids)[len(ours.decode(before[0])) :]
    assert shown.rstrip("\n") == expected.rstrip("\n")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert config["eos_token_id"] == tokenizer.eos_token_id == end
    if meta["begin_of_text"] is not None:
        assert config["bos_token_id"] == tokenizer.bos_token_id == meta["begin_of_text"]
        assert tokenizer("").input_ids == [meta["begin_of_text"]]
    assert config["max_position_embeddings"] == 256  # not the finetune's 16
    saved = checkpoint.load(tmp_path / "out" / "ckpt.pt")
    assert saved["tokenizer"].get("begin_of_text") == meta["begin_of_text"]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("begin", ["<s>", "</s>", ""])
def test_f61_the_template_decides_as_it_does_for_transformers(tmp_path, begin, adds):
    """Also if the same token begins and ends texts."""
    tokenizer = byte_level(["<s>", "</s>"], begin=begin)
    folder = save_model(tmp_path / "model", tokenizer, bos_token=begin or "<s>", eos_token="</s>")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": adds}))
    found = load_tokenizer(f"hf:{folder}")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)("a").input_ids
    assert encode_prompt(found, "a") == theirs and len(theirs) == 1 + bool(begin)
    tokenizers_.write_hf_tokenizer(found.meta(), tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("a").input_ids == theirs


def test_f61_a_line_feed_that_begins_all_texts_is_no_less_text(tmp_path):
    line_feed = byte_level(["</s>"]).token_to_id("Ċ")
    found = HFTokenizer(byte_level(["</s>"]).to_str(), 0, begin_of_text=line_feed)
    assert encode_prompt(found, "a") == [line_feed, *found.encode("a")]
    assert encode_prompt(found, "\na") == [line_feed, line_feed, *found.encode("a")]
    found = HFTokenizer(byte_level(["</s>", "<s>"]).to_str(), 0, begin_of_text=1)
    assert encode_prompt(found, "<s>a") == encode_prompt(found, "a") == [1, *found.encode("a")]


def test_f61_prompts_begin_as_documents_do_if_both_spell_special_tokens():
    content = byte_level(["</s>", "<s>"]).to_str()
    found = HFTokenizer(content, 0, begin_of_text=1, special_tokens=True)
    document, _ = prepare.encode_document(found, textfiles.Piece("train", "<s>a", ""))
    assert encode_prompt(found, "<s>a") == [id for ids in document[:-1] for id in ids]


def test_f61_templates_with_several_tokens_are_refused_and_odd_names_kept(tmp_path):
    special = ["<begin of text>", "<bos:1>", "$A", "</s>"]
    tokenizer = byte_level(special)
    for i, name in enumerate(special[:3]):
        tokenizers_.write_hf_tokenizer(HFTokenizer(tokenizer.to_str(), 3, i).meta(), tmp_path)
        found = load_tokenizer(f"hf:{tmp_path}")
        assert found.begin_of_text == i and found.end_of_text == 3
        ids = transformers.AutoTokenizer.from_pretrained(tmp_path)("a").input_ids
        assert ids[0] == i and len(ids) == 2, name
    content = (tmp_path / "tokenizer.json").read_text()
    two = json.loads(content)
    two["post_processor"]["single"].insert(0, two["post_processor"]["single"][0])
    (tmp_path / "tokenizer.json").write_text(json.dumps(two))
    with pytest.raises(ValueError, match="template that is not supported: 2 tokens before a text"):
        load_tokenizer(f"hf:{tmp_path}")
    twice = json.loads(content)
    twice["post_processor"]["single"] *= 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(twice))
    with pytest.raises(ValueError, match="tokenizer.json has a template that is not supported"):
        load_tokenizer(f"hf:{tmp_path}")


def test_f61_a_data_set_made_without_the_token_is_no_data_for_such_a_model(tmp_path):
    folder = with_bos(tmp_path / "model")
    tokenizer = from_meta(load_tokenizer(f"hf:{folder}").meta() | {"begin_of_text": None})
    write_dataset(tmp_path / "data", tokenizer, {"train": STORIES, "val": STORIES[:9]})
    with pytest.raises(ValueError, match="was not made with .*'s tokenizer: make one with"):
        convert.load_pretrained(str(folder), DataSet(str(tmp_path / "data")), 16, 0.0)


def test_f37_a_tokenizer_of_ones_own_gives_no_ids_outside_of_its_vocabulary(tmp_path):
    for wrong in (2**16 + 1, -(2**16) + 1):  # as 16 bits they would be 1
        tokenizer = CharTokenizer("ab")
        tokenizer.encode_between = lambda *_, wrong=wrong: np.array([0, wrong])
        with pytest.raises(ValueError, match="the tokenizer gives ids outside of its 2"):
            write_dataset(tmp_path, tokenizer, {"train": ["ab"], "val": ["ab"]})


def test_f61_a_run_on_bare_files_has_gpt2s_tokenizer(run, sums, gpt2_files, tmp_path):
    ids = np.arange(600) % 50257
    for name in ("bare", "named"):
        (tmp_path / name).mkdir()
        for split in ("train", "val"):
            ids.astype("uint16").tofile(tmp_path / name / f"{split}.bin")
    (tmp_path / "named" / "meta.json").write_text(
        '{"tokenizer": "gpt2", "vocab_size": 50257, "dtype": "uint16"}'
    )
    tiny = ["train.py", *TINY, "--n_layer=1", "--n_embd=4", f"--out_dir={tmp_path / 'run'}"]
    run(*tiny, f"--dataset={tmp_path / 'bare'}", "--max_iters=1")
    run(*tiny, f"--dataset={tmp_path / 'named'}", "--max_iters=2", "--init_from=resume")
    for dataset in (tmp_path / "bare", tmp_path / "named"):
        convert.load_pretrained(str(tmp_path / "run"), DataSet(str(dataset)), 16, 0.0)
    with pytest.raises(ValueError, match="was not made with .*/run's tokenizer: make one with"):
        convert.load_pretrained(str(tmp_path / "run"), DataSet(str(sums)), 16, 0.0)


def test_f61_an_export_without_the_token_does_not_prepend_it(tmp_path):
    folder = with_bos(tmp_path / "model")
    meta = load_tokenizer(f"hf:{folder}").meta() | {"begin_of_text": None}
    tokenizers_.write_hf_tokenizer(meta, tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("a").input_ids == [
        load_tokenizer(f"hf:{folder}").encode("a")[0]
    ]


def test_f62_end_of_text_is_found_where_tokenizers_keep_it(tmp_path, capsys):
    tokenizer = byte_level(["<|endoftext|>", "<|im_end|>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    ).save_pretrained(tmp_path)
    assert load_tokenizer(f"hf:{tmp_path}").end_of_text == 0  # tokenizer_config.json
    settings = (tmp_path / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").unlink()
    assert capsys.readouterr().out == ""
    assert load_tokenizer(f"hf:{tmp_path}").end_of_text is None
    shown = capsys.readouterr().out
    assert "has an end-of-text token: documents will not be separated, and samples" in shown
    special = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    assert load_tokenizer(f"hf:{tmp_path}").end_of_text == 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    assert load_tokenizer(f"hf:{tmp_path}").stop_tokens == [0, 1]
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    (tmp_path / "tokenizer_config.json").write_text(settings)
    assert load_tokenizer(f"hf:{tmp_path}").end_of_text == 0


@pytest.mark.parametrize("stale", [0, 2, 3, 4, [1, 2]])
def test_f62_a_stale_id_in_config_json_ends_no_document(tmp_path, stale):
    """transformers' default is 2, which was <pad> here: each document ended with it."""
    tokenizer = byte_level(["<s>", "</s>", "<pad>", "<unk>", "[MASK]"])
    save_model(tmp_path, tokenizer, eos=stale, generation_eos=1, bos_token="<s>", eos_token="</s>",
               pad_token="<pad>", mask_token="[MASK]")  # fmt: skip
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<unk>"}')
    found = load_tokenizer(f"hf:{tmp_path}")
    assert found.end_of_text == 1 and found.stop_tokens == [1]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert load_tokenizer(f"hf:{tmp_path}").stop_tokens in ([1, 2], [2, 1])  # as Qwen's
    made = json.loads((tmp_path / "tokenizer.json").read_text())  # names its unknown token alone
    made["model"]["unk_token"] = "<unk>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    assert load_tokenizer(f"hf:{tmp_path}").end_of_text == 1


@pytest.mark.parametrize(
    ("settings", "files", "stops"),
    [
        # as in Phi-4-mini: generation_config.json lists the end of a chat's turn first
        ({"eos_token": "</s>"}, {"config": 1, "generation_config": [0, 1]}, [1, 0]),
        # an id of another tokenizer's in generation_config.json
        ({}, {"config": 1, "generation_config": 9}, [1, 9]),
        ({"eos_token": "</s>", "pad_token": "<pad>"}, {"config": [2, 1]}, [1]),
        # as in CodeLlama: a token that transformers adds when it is needed
        ({"eos_token": "</s>", "fill_token": "<FILL>"}, {}, [1]),
    ],
)
def test_f62_the_files_of_a_family_name_its_end_of_text(tmp_path, settings, files, stops):
    byte_level(["<|end|>", "</s>", "<pad>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, ids in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": ids}))
    found = load_tokenizer(f"hf:{tmp_path}")
    assert found.end_of_text == 1 and found.stop_tokens == stops


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_f62_rows_of_characters_and_bytes_are_separated(tmp_path, kind):
    rows_file(tmp_path / "a.jsonl", ["ab", "cd"] * 20)
    prepare_from_files(tmp_path / "out", kind, [tmp_path / "a.jsonl"])
    meta = read_meta(tmp_path / "out")
    tokenizer = from_meta(meta)
    assert meta["vocab_size"] == (5 if kind == "char" else 257)
    assert read(tmp_path / "out", "train")[:6] == [
        *tokenizer.encode("ab"), tokenizer.end_of_text, *tokenizer.encode("cd"),
        tokenizer.end_of_text]  # fmt: skip
    assert tokenizer.decode(read(tmp_path / "out", "train")).startswith("abcdab")
    (tmp_path / "a.txt").write_text("abcd" * 20)  # a single text needs no separator
    prepare_from_files(tmp_path / "one", "char", [tmp_path / "a.txt"])
    assert read_meta(tmp_path / "one")["vocab_size"] == 4


def test_f62_characters_with_an_end_are_exported_too(tmp_path):
    meta = CharTokenizer("abc", ends=True).meta()
    tokenizers_.write_hf_tokenizer(meta, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("cab").input_ids == [2, 0, 1] and theirs.eos_token_id == 3


BAD = b'{"text": "x \xed\xa0\xbd\xed\xb8\x80"}\n'  # bytes of two surrogates


@pytest.mark.parametrize("num_proc", [1, 2])
def test_f63_a_row_that_the_tokenizer_fails_on_is_named_and_left_out_if_asked(
    tmp_path, monkeypatch, capsys, gpt2_files, num_proc
):
    class Panic(BaseException):
        """Like a panic in Rust: not an Exception."""

    def encode(self, before, text, after):
        if "poison" in text:
            raise Panic("stack overflow")
        return list(text.encode())

    monkeypatch.setattr(GPT2Tokenizer, "encode_between", encode)
    monkeypatch.setattr(prepare, "BATCH", 300)
    rows = [f"text {i}" for i in range(60)]
    path = rows_file(tmp_path / "a.jsonl", rows[:30] + ["poison"] + rows[30:])
    with pytest.raises(ValueError, match=r"a.jsonl, line 31: the tokenizer failed \(Panic: stack"):
        prepare_from_files(tmp_path / "out", "gpt2", [path], num_proc=num_proc)
    prepare_from_files(tmp_path / "out", "gpt2", [path], num_proc=num_proc, skip_bad_rows=True)
    assert "skipped 1 bad rows" in capsys.readouterr().out
    ids = read(tmp_path / "out", "train") + read(tmp_path / "out", "val")
    assert ids.count(50256) == 60


def test_f63_bytes_of_surrogates_are_a_bad_row(run, tmp_path):
    rows = b'{"text": "first"}\n' * 20
    (tmp_path / "a.jsonl").write_bytes(rows + BAD + rows)
    arguments = f"--input={tmp_path / 'a.jsonl'}", "--tokenizer=byte", f"--out={tmp_path / 'out'}"
    with pytest.raises(ValueError, match=r"a.jsonl, line 21: not JSON \('utf-8'"):
        run("data/text/prepare.py", *arguments)
    assert "1 bad rows" in run("data/text/prepare.py", *arguments, "--skip_bad_rows=True")


def test_f63_a_bad_row_of_parquet_is_no_bad_file(run, tmp_path):
    import pyarrow
    import pyarrow.parquet

    values = [b"first"] * 20 + [b"\xff\xfe"] + [b"last"] * 20
    table = pyarrow.table({"text": pyarrow.array(values, pyarrow.binary())})
    table = table.set_column(0, "a.b", table["text"].combine_chunks().view(pyarrow.string()))
    table = table.add_column(0, "a", pyarrow.array([{"b": "of a struct"}] * 41))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    arguments = (f"--input={tmp_path / 'a.parquet'}", "--column=a.b", "--tokenizer=byte",
                 f"--out={tmp_path / 'o'}")  # fmt: skip
    with pytest.raises(ValueError, match=r"a.parquet, row 21: not UTF-8"):
        run("data/text/prepare.py", *arguments)
    run("data/text/prepare.py", *arguments, "--skip_bad_rows=True")
    assert (read(tmp_path / "o", "train") + read(tmp_path / "o", "val")).count(256) == 40


@pytest.mark.parametrize(
    ("name", "rows", "problem"),
    [
        ("a.csv", b"text\ngood\nHello, world\n", "line 3: 2 fields, not 1: check the quotes"),
        ("a.tsv", b"id\ttext\n1\tgood\n2\ta\tb\n", "line 3: 3 fields, not 2"),
        ("a.csv", b"text\ngood\nna\xefve\n", r"line 3: not UTF-8 at character 3"),
        ("a.json", b'[{"text": "good"}, {"text": "na\xefve"}]', r"row 2: not UTF-8 at character 3"),
    ],
)
def test_f63_rows_that_would_lose_text_are_bad_rows(run, tmp_path, name, rows, problem):
    (tmp_path / name).write_bytes(rows)
    found = list(textfiles.pieces_of(tmp_path / name, 0, "text", 0.1, ByteTokenizer()))
    assert (found[0].text, found[0].problem) == ("good", None) and len(found) == 2
    assert re.search(problem, f"{found[1].where}: {found[1].problem}")


def test_f63_a_list_takes_control_characters_and_names_what_it_cannot_read(tmp_path):
    for rows, error in (
        (b'[{"text": "a\tb"}]', None),
        (b'[{"text": "a"}, {"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]", "cannot read"),
        (b'[{"text": "a"}, {"text": b}]', r"cannot read .*a.json.*\(char 25\)"),
    ):
        (tmp_path / "a.json").write_bytes(rows)
        pieces = textfiles.pieces_of(tmp_path / "a.json", 0, "text", 0.1, ByteTokenizer())
        if error is None:
            assert [piece.text for piece in pieces] == ["a\tb"]
            continue
        with pytest.raises(ValueError, match=error):
            list(pieces)


def test_f63_a_long_row_takes_linear_time():
    """Each cut copied the rest of the text: 95 MB took 45 s in place of 2 s."""

    class Text(str):
        sliced = 0

        def __getitem__(self, index):
            part = super().__getitem__(index)
            Text.sliced += len(part)
            return Text(part)

        def __add__(self, other):
            return Text(super().__add__(other))

        __radd__ = lambda self, other: Text(other + str(self))  # noqa: E731

    text = Text("word " * 400_000)
    pieces = [piece for _, piece, _ in cut_text(ByteTokenizer(), [text])]
    assert "".join(pieces) == text and len(pieces) > 6 and Text.sliced < 1.2 * len(text)


@pytest.mark.parametrize("line", ["123\r\n", "a\tb\n", "一。"])
def test_a_text_without_spaces_is_cut_at_its_lines(line):
    tokenizer = HFTokenizer(byte_level(["</s>"]).to_str())
    pieces = [piece for _, piece, _ in cut_text(tokenizer, [line * (10**6 // len(line))])]
    assert max(map(len, pieces)) < 2 * 2**18


@pytest.mark.parametrize("run_of", [" ", "\n ", "word ", "a"])
def test_f63_long_rows_are_tokenized_in_pieces_as_in_one(gpt2_files, run_of, monkeypatch):
    """A million spaces make tiktoken panic (tiktoken#15). The test uses smaller pieces."""
    text = "a" + "x y " * 9000 + run_of * 100_000 + "b c." * 9000
    tokenizer = GPT2Tokenizer()
    expected = tokenizer.encoding.encode_ordinary(text)
    monkeypatch.setattr(tokenizers_, "PIECE", 5000)
    pieces = encode_pieces(tokenizer, [text])
    assert sum(pieces, []) == expected and len(pieces) > 5


def test_f63_tokens_that_depend_on_their_place_are_not_cut_apart(monkeypatch):
    monkeypatch.setattr(tokenizers_, "PIECE", 5000)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a b": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.FixedLength(3)
    assert encode_pieces(HFTokenizer(made.to_str()), ["a b" * 9000]) == [[1] * 9000]


def test_f63_a_million_spaces(gpt2_files, tmp_path):
    path = rows_file(tmp_path / "a.jsonl", ["first", "a" + " " * 1_200_000 + "b", *["third"] * 20])
    prepare_from_files(tmp_path / "out", "gpt2", [path])
    ids = read(tmp_path / "out", "train") + read(tmp_path / "out", "val")
    assert ids.count(50256) == 22 and ids.count(220) == 1_199_999


def byte_runs():
    rng = random.Random(0)
    text = "naïve 你好 🙂 e\u0301 \U0001f468\u200d\U0001f469"
    return [text, "🙂" * 9, "".join(chr(rng.randrange(0x80, 0x3000)) for _ in range(40))]


@pytest.mark.parametrize("name", ["byte", "gpt2", "byte-level", "fallback"])
def test_f64_a_text_that_ends_within_a_character_loses_only_that(name, gpt2_files):
    tokenizer = {
        "byte": ByteTokenizer, "gpt2": GPT2Tokenizer,
        "byte-level": lambda: HFTokenizer(byte_level(["</s>"]).to_str()),
        "fallback": lambda: HFTokenizer(sentencepiece().to_str()),
    }[name]()  # fmt: skip
    for text in byte_runs():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        for n in range(1, len(ids)):
            shown = tokenizer.decode(ids[:n])
            whole = shown.rstrip("\ufffd")
            assert text.startswith(whole), (n, shown)
            if shown != whole:  # only the bytes of one incomplete character
                missing = len(text[: len(whole) + 1].encode()) - len(whole.encode())
                assert len(shown) - len(whole) <= missing
            # only the incomplete character is missing
            rest = tokenizer.decode(ids[:n] + ids[n:])
            assert rest == text


def test_f65_tokens_of_chats_keep_the_spaces_that_they_take(tmp_path):
    """As Phi-3's, which take the line feed after them."""
    made = byte_level(["</s>"])
    names = "<|user|>", "<|end|>"
    tokens = [tokenizers.AddedToken(name, rstrip=True, special=True) for name in names]
    made.add_special_tokens(tokens)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    ends = [1, made.token_to_id("<|end|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    chat = "<|user|>\nHello<|end|>\n<|user|>\n"
    found = load_tokenizer(f"hf:{tmp_path}", special_tokens=True)
    assert found.encode(chat) == encode_prompt(found, chat) == made.encode(chat).ids


def test_f65_a_byte_that_ends_samples_stays_text_if_other_bytes_have_no_token(tmp_path):
    content = json.loads(sentencepiece().to_str())
    del content["model"]["vocab"]["<0x09>"]
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are in the vocabulary alone
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    line_feed = content["model"]["vocab"]["<0x0A>"]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [2, {line_feed}]}}')
    assert line_feed in load_tokenizer(f"hf:{tmp_path}").encode("a\nb")


CONTROL = "Price: <s>1 dollars</s> now 0. <|endoftext|> is a word here."


@pytest.mark.parametrize("make", [with_bos, fallback, qwen])
def test_f65_text_is_text_unless_asked(tmp_path, make):
    folder = make(tmp_path / "model")
    tokenizer = load_tokenizer(f"hf:{folder}")
    ids = tokenizer.encode(CONTROL)
    special = set(tokenizer.stop_tokens) | {tokenizer.begin_of_text}
    assert not special & set(ids)
    assert tokenizer.decode(ids) == CONTROL
    chat = load_tokenizer(f"hf:{folder}", special_tokens=True)
    assert special & set(chat.encode(CONTROL)) and from_meta(chat.meta()).special_tokens


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel"])
def test_f65_models_that_have_special_tokens_in_their_vocabulary(tmp_path, kind):
    special = ["<unk>", "<s>", "</s>"]
    if kind == "Unigram":
        pieces = [(name, 0.0) for name in special] + [(c, -5.0) for c in "</s>x y"]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
    else:
        words = {name: i for i, name in enumerate([*special, "x", "y"])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    found = load_tokenizer(f"hf:{tmp_path}")
    assert not {1, 2} & set(found.encode("x </s> <s> y")) and found.end_of_text == 2
    assert [id for id in encode_prompt(found, "x </s> y") if id in (1, 2)] == [2]
    chat = load_tokenizer(f"hf:{tmp_path}", special_tokens=True)
    assert [id for id in chat.encode("x </s> <s> y") if id in (1, 2)] == [2, 1]


def test_f65_a_stop_token_that_is_ordinary_text_stays_text(tmp_path):
    """A line feed that ends samples was lost from the text, or failed if it had been merged."""
    made = json.loads(byte_level(["</s>"]).to_str())
    line_feed, merged = made["model"]["vocab"]["Ċ"], made["model"]["vocab"]["he"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, line_feed, merged]})
    )
    found = load_tokenizer(f"hf:{tmp_path}")
    assert found.stop_tokens == [0, line_feed, merged]
    ids = found.encode("the\n\nhen</s>\n")
    assert (
        ids == found.tokenizer.encode("the\n\nhen<", add_special_tokens=False).ids[:-1] + ids[-5:]
    )
    assert found.decode(ids) == "the\n\nhen</s>\n" and ids.count(line_feed) == 3 and 0 not in ids


@pytest.mark.parametrize("name", ["\n\n", "END"])
def test_f65_a_stop_token_of_several_ordinary_characters_stays_text(name):
    made = byte_level(["</s>"])
    made.add_tokens([name])
    id = made.token_to_id(name)
    found = HFTokenizer(made.to_str(), 0, stop_tokens=[0, id])
    text = f"a{name}b</s>"
    assert found.encode(text)[1] == id and 0 not in found.encode(text)
    assert encode_prompt(found, text) == made.encode(text).ids


def test_f65_a_stop_token_that_is_an_ordinary_word_stays_text():
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "END": 1, "?": 2, "[END]": 3}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found = HFTokenizer(made.to_str(), stop_tokens=[1, 3])
    assert found.encode("a END [END]") == [0, 1, 2]


@pytest.mark.parametrize("special", [False, True])
def test_f65_a_line_feed_that_was_added_as_a_token_stays_text(tmp_path, special):
    words = {"[UNK]": 0, "line": 1}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    (made.add_special_tokens if special else made.add_tokens)(["\n"])
    made.add_special_tokens(["[SEP]"])
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    found = load_tokenizer(f"hf:{tmp_path}")
    assert found.encode("line\nline") == [1, 2, 1] == encode_prompt(found, "line\nline")
    assert 3 not in found.encode("line [SEP]")


def test_f65_bpe_dropout_is_switched_off(tmp_path):
    """Otherwise a text has other ids each time, and an interrupted preparation loses text."""
    made = byte_level(["</s>"])
    made.model.dropout = 0.5
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    assert made.encode(STORIES[0]).ids != made.encode(STORIES[0]).ids
    for special_tokens in (False, True):
        found = load_tokenizer(f"hf:{tmp_path}", special_tokens)
        ids = found.encode(STORIES[0])
        assert all(found.encode(STORIES[0]) == ids for _ in range(9))
        assert encode_prompt(found, STORIES[0]) == ids
    tokenizers_.write_hf_tokenizer(found.meta(), tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None


def test_a_tokenizer_that_does_not_know_the_text_is_noticed(tmp_path, capsys):
    words = {"[UNK]": 0, "known": 1}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    for other, share in ("known", None), ("new", "25%"):
        path = rows_file(tmp_path / "a.jsonl", [f"known known known {other}"] * 40)
        prepare_from_files(tmp_path / "out", f"hf:{tmp_path}", [path])
        shown = capsys.readouterr().out
        assert ("unknown token" in shown) is bool(share)
        assert share is None or f"warning: {share} of val.bin's tokens are the unknown" in shown


def test_a_bpe_that_lacks_bytes_is_noticed(tmp_path, capsys):
    """By default `tokenizers` trains one that knows only the bytes of its texts."""

    def warns(**model):
        made = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
        if not model:
            made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.train_from_iterator(STORIES, tokenizers.trainers.BpeTrainer(vocab_size=400))
        made.save(str(tmp_path / "tokenizer.json"))
        load_tokenizer(f"hf:{tmp_path}")
        return "drops characters that are not in its" in capsys.readouterr().out

    assert warns() and warns(byte_fallback=True)
    byte_level(["</s>"]).save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(f"hf:{tmp_path}")
    sentencepiece().save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(f"hf:{tmp_path}")
    assert "drops characters" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_empty_documents_are_left_out(tmp_path, kind):
    """Otherwise the data has runs of end-of-text tokens, which are easy to predict."""
    texts = ["", "abc", "", "", "def"] * 40
    prepare_from_files(tmp_path / "a", kind, [rows_file(tmp_path / "a.jsonl", texts)], "text", 0.3)
    for split in ("train", "val"):
        ids = read(tmp_path / "a", split)
        end = {"byte": 256, "char": 6}[kind]
        assert ids.count(end) * 4 == len(ids) and ids[3::4] == [end] * (len(ids) // 4)
    with pytest.raises(ValueError, match="the train split of .* would be empty"):
        prepare_from_files(tmp_path / "b", kind, [rows_file(tmp_path / "b.jsonl", [""] * 40)])


def test_f65_an_added_token_that_merges_spell_is_text_too(tmp_path):
    made = json.loads(byte_level(["</s>"]).to_str())
    merged = made["model"]["vocab"]["he"]
    made["added_tokens"].append(made["added_tokens"][0] | {"id": merged, "content": "he"})
    found = HFTokenizer(json.dumps(made), end_of_text=0)
    assert merged not in found.encode("the hen") and found.decode(found.encode("hen")) == "hen"


def test_f65_a_number_in_a_text_is_no_end_of_text():
    """The normalizer drops the NULs around the name that stands for the hidden token."""
    words = {"[UNK]": 0, "in": 1, "1": 2, "5": 3, "[EOS]": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_tokens([tokenizers.AddedToken("[EOS]", normalized=True)])
    found = HFTokenizer(made.to_str(), end_of_text=4)
    assert 4 not in found.encode("in 4 in [EOS] \x004\x00") and found.encode("in 5 in") == [1, 3, 1]


@pytest.mark.parametrize("end", ["ab", "a", "ab</w>", "##b"])
def test_f65_a_prompt_and_a_text_agree_on_an_end_that_is_ordinary_text(end):
    if end == "##b":
        names = ["[UNK]", "a", "##b", "##c", "b"]
        model = tokenizers.models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]")
    else:
        suffix = "</w>" if "<" in end else None
        names = ["x", "a", "b", "c", "ab", "ca", "cab"]
        merges = [("c", "a"), ("a", "b"), ("ca", "b")]
        if suffix:
            names, merges = ["x", "a", "b", "b</w>", "c</w>", "ab</w>"], [("a", "b</w>")]
        model = tokenizers.models.BPE(
            {n: i for i, n in enumerate(names)}, merges,
            **{"end_of_word_suffix": suffix} if suffix else {},
        )  # fmt: skip
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found = HFTokenizer(made.to_str(), end_of_text=names.index(end))
    for text in ("cab ab", "ab b", "abc"):
        expected = made.encode(text).ids
        assert found.encode(text) == expected and encode_prompt(found, text) == expected


def test_f65_a_prompt_knows_an_end_of_text_with_id_0():
    words = tokenizers.models.WordLevel({"</s>": 0, "a": 1, "[UNK]": 2}, "[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    assert HFTokenizer(made.to_str(), end_of_text=0).encode_prompt("a</s>") == [1, 0]


def test_f65_a_run_with_bytes_has_no_special_tokens(run, tmp_path):
    rows_file(tmp_path / "rows.jsonl", ["text"] * 200)
    text = f"--input={tmp_path / 'rows.jsonl'}", f"--out={tmp_path / 'data'}"
    run("data/text/prepare.py", *text, "--tokenizer=byte")
    out = tmp_path / "out"
    run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={out}", "--max_iters=1")
    with pytest.raises(ValueError, match="needs a gpt2 or hf: tokenizer, not byte"):
        run("data/text/prepare.py", *text, f"--tokenizer=run:{out}", "--special_tokens=True")


def test_f65_a_prompt_of_a_chat_has_all_its_special_tokens(tmp_path):
    found = load_tokenizer(f"hf:{qwen(tmp_path / 'model')}")
    text = "<|im_end|>a<|endoftext|>"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")(text).input_ids
    assert encode_prompt(found, text) == theirs and len(theirs) == 3


def test_f65_the_switch_is_recorded_and_no_token_is_doubled(run, tmp_path, gpt2_files):
    rows_file(tmp_path / "a.jsonl", ["one<|endoftext|>", "two"] * 20)
    arguments = f"--input={tmp_path / 'a.jsonl'}", f"--out={tmp_path / 'out'}"
    run("data/text/prepare.py", *arguments)
    assert read(tmp_path / "out", "train").count(50256) == 36
    assert "special_tokens" not in read_meta(tmp_path / "out")
    run("data/text/prepare.py", *arguments, "--special_tokens=True")
    assert read(tmp_path / "out", "train")[:4] == [505, 50256, 11545, 50256]
    assert read_meta(tmp_path / "out")["special_tokens"] is True
    with pytest.raises(ValueError, match="needs a gpt2 or hf: tokenizer, not byte"):
        run("data/text/prepare.py", *arguments, "--tokenizer=byte", "--special_tokens=True")


def test_f65_in_a_prompt_the_end_of_text_is_the_token(tmp_path, gpt2_files):
    gpt2, byte = GPT2Tokenizer(), ByteTokenizer()
    assert encode_prompt(gpt2, "<|endoftext|>") == encode_prompt(gpt2, "") == [50256]
    assert encode_prompt(gpt2, "one<|endoftext|>two") == [505, 50256, 11545]
    assert encode_prompt(byte, "<|endoftext|>a") == [256, 97]
    bos = load_tokenizer(f"hf:{with_bos(tmp_path / 'model')}")
    assert encode_prompt(bos, "") == [0] and encode_prompt(bos, "</s>") == [0, 1]
    with pytest.raises(ValueError, match="it is empty"):
        encode_prompt(CharTokenizer("ab"), "")


@pytest.fixture(scope="module")
def template_model(tmp_path_factory):
    tokenizer = byte_level(["<unk>", "</s>", "<|im_end|>"])
    return save_model(
        tmp_path_factory.mktemp("template"), tokenizer, generation_eos=[1, 2], unk_token="<unk>",
        eos_token="</s>", additional_special_tokens=["<|im_end|>"],
        template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n"
        "{% endfor %}")  # fmt: skip


@pytest.mark.parametrize("where", ["tokenizer_config", "special_tokens_map"])
def test_f66_an_export_ends_where_samples_end(tmp_path, where):
    folder = with_bos(tmp_path / "model")
    for name in ("config", "generation_config"):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    path = folder / f"{where}.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"eos_token": "</s>"}))
    pretrained = convert.read_pretrained(str(folder))
    saved = {
        "model": pretrained.weights, "model_config": pretrained.model_config,
        "tokenizer": pretrained.tokenizer, "pretrained": pretrained.metadata,
    }  # fmt: skip
    convert.write_pretrained(saved, tmp_path / "to", torch.float32)
    for name in ("config", "generation_config"):
        assert json.loads((tmp_path / "to" / f"{name}.json").read_text())["eos_token_id"] == 1


def test_f66_named_chat_templates_and_the_space_before_a_text_are_kept(tmp_path):
    tokenizer = byte_level(["<s>", "</s>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    folder = save_model(tmp_path / "model", tokenizer, eos_token="</s>", template="a")
    (folder / tokenizers_.TEMPLATES).mkdir()
    (folder / tokenizers_.TEMPLATES / "tool_use.jinja").write_text("b")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["split_special_tokens"] = True  # sample.py never splits those of a prompt
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    pretrained = convert.read_pretrained(str(folder))
    checkpoint.check_metadata(pretrained.metadata, "it")
    tokenizers_.write_hf_tokenizer(pretrained.tokenizer, tmp_path, pretrained.metadata)
    assert (tmp_path / "chat_template.jinja").read_text() == "a"
    assert (tmp_path / tokenizers_.TEMPLATES / "tool_use.jinja").read_text() == "b"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["add_prefix_space"] is True and "split_special_tokens" not in settings
    wrong = pretrained.metadata | {tokenizers_.TEMPLATES: {"../../x": "a"}}
    with pytest.raises(ValueError, match="it is not valid metadata"):
        checkpoint.check_metadata(wrong, "it")


def test_f66_exports_keep_what_the_pretrained_model_came_with(tmp_path, template_model):
    pretrained = convert.read_pretrained(str(template_model))
    saved = {
        "model": pretrained.weights, "model_config": pretrained.model_config | {"block_size": 16},
        "tokenizer": pretrained.tokenizer, "pretrained": pretrained.metadata,
    }  # fmt: skip
    convert.write_pretrained(saved, tmp_path, torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(template_model)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "user: hi<|im_end|>\n"
    assert ours.unk_token == theirs.unk_token == "<unk>"
    assert set(theirs.all_special_tokens) <= set(ours.all_special_tokens)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 2]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert set(ours("a")) == {"input_ids", "attention_mask"}  # generate rejects token_type_ids
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "extra_special_tokens" not in settings  # transformers 4 rejects a list here
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 has this class
    assert ours.decode(ours("a<|im_end|>").input_ids, skip_special_tokens=True) == "a"


TEXTS = [f"text {i}, with a comma" for i in range(20)]


def json_rows():
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


def zst(content):
    import pyarrow

    return pyarrow.compress(content, codec="zstd", asbytes=True)


def csv_rows(separator):
    quoted = (f'{i}{separator}"{text}\nsecond ""line"""\n' for i, text in enumerate(TEXTS))
    return f"id{separator}text\n" + "".join(quoted)


FILES = {
    "a.jsonl": json_rows, "a.ndjson": json_rows, "a.json": json_rows,
    "a.JSON.GZ": lambda: gzip.compress(json_rows().encode()),
    "a.ndjson.zst": lambda: zst(json_rows().encode()),
    "list.json": lambda: json.dumps([{"text": t} for t in TEXTS], indent=2),
    "list.json.gz": lambda: gzip.compress(json.dumps([{"text": t} for t in TEXTS]).encode()),
    "a.csv": lambda: csv_rows(","), "a.tsv": lambda: csv_rows("\t"),
    "a.csv.gz": lambda: gzip.compress(csv_rows(",").encode()),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_f67_rows_are_rows_under_all_their_names(run, tmp_path, name, monkeypatch):
    monkeypatch.setattr(textfiles, "READ_SIZE", 100)
    content = FILES[name]()
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    run("data/text/prepare.py", f"--input={tmp_path / name}", "--tokenizer=byte",
        f"--out={tmp_path / 'out'}")  # fmt: skip
    ids = read(tmp_path / "out", "train") + read(tmp_path / "out", "val")
    texts = bytes(10 if i == 256 else i for i in ids).decode().splitlines()
    more = ['second "line"'] * 20 if "sv" in name else []
    assert sorted(texts) == sorted(TEXTS + more) and ids.count(256) == 20


def test_f67_a_text_packed_as_zst(run, tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zst("ä text\n".encode() * 50))
    run("data/text/prepare.py", f"--input={tmp_path / 'a.txt.zst'}", "--tokenizer=char",
        f"--out={tmp_path / 'out'}")  # fmt: skip
    tokenizer = from_meta(read_meta(tmp_path / "out"))
    ids = read(tmp_path / "out", "train") + read(tmp_path / "out", "val")
    assert tokenizer.decode(ids) == "ä text\n" * 50


def tar_gz():
    import io
    import tarfile

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as box:
        info = tarfile.TarInfo("a.txt")
        info.size = 10
        box.addfile(info, io.BytesIO(b"some text."))
    return packed.getvalue()


def damaged_page():
    """A Parquet file with page checksums, and another letter in a page."""
    import io

    import pyarrow.parquet

    file, table = io.BytesIO(), pyarrow.table({"text": ["some words"] * 9})
    pyarrow.parquet.write_table(table, file, use_dictionary=False, compression="none",
                                write_statistics=False, write_page_checksum=True)  # fmt: skip
    return file.getvalue().replace(b"some words", b"some wordy", 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("box.tar.gz", tar_gz, "a NUL character.*unpack archives"),
        ("a.zip", lambda: b"PK\x03\x04" + b"\0" * 99, "as UTF-8 text: a NUL character"),
        ("utf16.txt", lambda: "text".encode("utf-16"), "invalid start byte.*iconv"),
        (
            "latin1.txt",
            lambda: "tëxt".encode("latin-1"),
            "invalid continuation byte.*iconv",
        ),
        (
            "late.txt",
            lambda: b"text " * 20_000 + b"\0" * 9 + b"text",
            "cannot read.*a NUL character",
        ),
        ("a.csv", lambda: "text,b\nhello,1\n".encode("utf-16"), "cannot read.*a NUL .*iconv"),
        ("rows.jsonl.bak", lambda: b'{"text": "a"}\n' * 9, "holds rows of JSON: name it .jsonl"),
        (
            "list.dat",
            lambda: json.dumps([{"text": "a"}] * 9, indent=2).encode(),
            "holds rows of JSON",
        ),
        ("blank.jl", lambda: b'\n{"text": "a"}\n' * 9, "holds rows of JSON"),
        ("wide.rows", lambda: b'{"text": "' + b"x" * 70_000 + b'"}\n' * 9, "holds rows of JSON"),
        ("a.csv", lambda: b"text,text\n1,x\n", "2 columns named 'text'"),
        ("b.csv", lambda: b"", "b.csv has no columns named 'text' among .*: pass"),
        (
            "b.csv",
            lambda: b"id;text\n1;x\n",
            "among .'id;text'.: pass .* or separate columns by commas",
        ),
        ("rows.gz", lambda: gzip.compress(b'{"text": "a"}\n'), "name it .jsonl.gz, or .txt.gz"),
        (
            "a.csv",
            lambda: b"id,body\n1,x\n",
            "no columns named 'text' among .'id', 'body'.: pass --column",
        ),
        ("list.json", lambda: b'[{"text": "a"}, {"tex', "cannot read.*list.json"),
        ("a.csv~", lambda: b"id,text\n1,x\n", "a.csv~ holds a table: name it .csv, or .txt"),
        ("a.csv.bak", lambda: b"id,text\n1,x\n", "a.csv.bak holds a table: name it .csv, or .txt"),
        (
            "a.tsv.bak",
            lambda: b'{"text": "a"}\n',
            "a.tsv.bak holds rows of JSON: name it .jsonl, or",
        ),
        ("a.tab", lambda: b"id\ttext\n1\tx\n", "a.tab holds a table: name it .tsv, or .txt"),
        ("a.tsv?dl=1.gz", lambda: gzip.compress(b"id\ttext\n"), "a table: name it .tsv.gz, or"),
        ("b.parquet", damaged_page, "cannot read .*CRC"),
    ],
)
def test_f67_files_that_are_not_text_are_refused_by_name(run, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content())
    with pytest.raises(ValueError, match=message) as error:
        run("data/text/prepare.py", f"--input={tmp_path / name}", "--tokenizer=byte",
            f"--out={tmp_path / 'out'}")  # fmt: skip
    assert name in str(error.value)


def test_f68_a_token_beyond_the_vocabulary_has_a_remedy_that_works(tmp_path, run):
    ids = np.arange(60_000, dtype=np.uint16)
    for split in ("train", "val"):
        ids.tofile(tmp_path / f"{split}.bin")
    arguments = [*TINY, f"--dataset={tmp_path}", f"--out_dir={tmp_path / 'out'}", "--max_iters=1"]
    with pytest.raises(ValueError, match=r"holds token id 59999.*--vocab_size=60032") as error:
        run("train.py", *arguments)
    remedy = str(error.value).rsplit(" ", 1)[1]
    run("train.py", *arguments, remedy)
    np.full(9999, 65_000, np.uint16).tofile(tmp_path / "train.bin")  # one size for both files
    with pytest.raises(ValueError, match=r"val.bin holds token id 59999.*--vocab_size=65024$"):
        run("train.py", *arguments)
    # if meta.json has the vocabulary, --vocab_size would not help
    write_dataset(tmp_path / "b", ByteTokenizer(), {"train": ["abc" * 99], "val": ["abc" * 99]})
    meta = json.loads((tmp_path / "b" / "meta.json").read_text()) | {"vocab_size": 98}
    (tmp_path / "b" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="in its meta.json has 98: prepare the data again"):
        run("train.py", *arguments[:-3], f"--dataset={tmp_path / 'b'}", *arguments[-2:])


def test_f67_quotes_that_swallow_rows_are_noticed(tmp_path):
    """Most .tsv files have no quoting; a quote that begins one cell ends in a later row."""
    rows = ['1\t"Come in', "2\tplain line", '3\tas you like"']
    (tmp_path / "a.tsv").write_text("id\ttext\n" + "\n".join(rows * 9) + "\n")
    (tmp_path / "b.tsv").write_text("text\n" + '"Come in\nas you like"\n' * 9)
    for name in ("a.tsv", "b.tsv"):
        with pytest.raises(ValueError, match="line breaks in the row that starts at line 2: check"):
            prepare_from_files(tmp_path / "out", "byte", [tmp_path / name], skip_bad_rows=True)


def test_f68_folders_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    """Shells do not expand the ~ of --tokenizer=hf:~/FOLDER."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_text(byte_level(["</s>"]).to_str())
    whole = load_tokenizer(f"hf:{tmp_path}/own")
    assert load_tokenizer("hf:~/own").encode("a story") == whole.encode("a story")
    with pytest.raises(ValueError, match=f"no checkpoint at {tmp_path}/own/"):
        prepare.tokenizer_named("run:~/own", False)


def test_f68_hf_may_name_the_file_itself(tmp_path, monkeypatch):
    byte_level(["</s>"]).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(f"hf:{tmp_path / 'tokenizer.json'}").vocab_size == 320
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("hf:tokenizer.json").vocab_size == 320


def test_f68_other_kinds_of_tokenizers_and_weights_say_how_to_convert(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(
        ValueError, match="no tokenizer.json: load an older format.*save_pretrained"
    ):
        load_tokenizer(f"hf:{tmp_path}")
    folder = qwen(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \*.safetensors file, only other.*save_pretrained"):
        convert.read_pretrained(str(folder))


def test_f68_a_remedy_for_weights_of_another_kind_works(tmp_path):
    """Runs the message's command on a model saved as pytorch_model.bin."""
    folder = qwen(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        convert.read_pretrained(str(folder))
    code = str(error.value).split("python -c '")[1].split("'")[0]
    code = code.replace("NEW_FOLDER", str(tmp_path / "new"))
    exec(code, {})
    weights = convert.read_pretrained(str(tmp_path / "new")).weights
    assert torch.equal(weights["token_embedding.weight"], state["model.embed_tokens.weight"])


@pytest.mark.parametrize("tokenizer", ["char", "bpe:300"])
def test_f68_a_runs_own_tokenizer_prepares_more_text(run, tmp_path, tokenizer):
    for name, text in (("a", "ба дa, 1 2 3 да\n"), ("b", "да да 3\n")):
        (tmp_path / f"{name}.txt").write_text(text * 200)

    def prepare(name, out, tokenizer):
        run("data/text/prepare.py", f"--input={tmp_path / name}.txt", f"--out={tmp_path / out}",
            f"--tokenizer={tokenizer}")  # fmt: skip

    def train(out, data, *more):
        return run("train.py", *TINY, f"--dataset={tmp_path / data}", f"--out_dir={tmp_path / out}",
                   "--max_iters=1", *more)  # fmt: skip

    prepare("a", "a", tokenizer)
    prepare("b", "other", "byte")
    train("out", "a")
    with pytest.raises(ValueError, match="make one with") as error:
        train("more", "other", f"--init_from={tmp_path / 'out'}")
    prepare("b", "b", re.search(r"--tokenizer=(\S+)", str(error.value))[1])
    assert "finished" in train("more", "b", f"--init_from={tmp_path / 'out'}")


def test_f83_a_tokenizer_of_the_users_own_stays_in_the_data_folder(tmp_path):
    path = rows_file(tmp_path / "a.jsonl", STORIES)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / file).write_text(byte_level(["</s>"]).to_str())
    content = (tmp_path / "out" / "tokenizer.json").read_text()
    for tokenizer in (f"hf:{tmp_path / 'out'}", "byte", "bpe:300"):
        prepare_from_files(tmp_path / "out", tokenizer, [path])
        assert (tmp_path / "out" / "tokenizer.json").read_text() == content
        assert (tmp_path / "out" / "tokenizer_config.json").exists()


def test_f68_an_export_of_an_alphabet_without_english_letters_is_finetuned(tmp_path):
    tokenizer = CharTokenizer("абв\n")
    tokenizers_.write_hf_tokenizer(tokenizer.meta(), tmp_path)
    assert load_tokenizer(f"hf:{tmp_path}").encode("баб") == [1, 0, 1]


def test_f68_a_missing_shard_of_a_model_is_named(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen(tmp_path / "model"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    gone = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"lacks {gone.name}: download the model again"):
        convert.read_pretrained(str(tmp_path / "shards"))


@pytest.mark.parametrize("name", ["gpt2", "byte-level", "fallback", "byte", "char", "bpe"])
def test_f69_pieces_have_the_ids_of_the_whole(name, gpt2_files, monkeypatch):
    text = "".join(STORIES) + "".join(byte_runs()) * 20 + "    def f(x):\n\n\n\treturn  x\n" * 300
    text += "z" * 7000 + " " * 7000 + "".join(STORIES[:99]).replace(" ", "")
    tokenizer = {
        "gpt2": GPT2Tokenizer, "byte": ByteTokenizer, "char": lambda: CharTokenizer.train(text),
        "byte-level": lambda: HFTokenizer(byte_level(["</s>"]).to_str()),
        "fallback": lambda: HFTokenizer(sentencepiece().to_str()),
        "bpe": lambda: train_bpe([text], 600),
    }[name]()  # fmt: skip
    expected = tokenizer.encode(text)
    monkeypatch.setattr(tokenizers_, "PIECE", 3000)
    chunks = [text[i : i + 777] for i in range(0, len(text), 777)]
    pieces = encode_pieces(tokenizer, chunks)
    assert sum(pieces, []) == expected and len(pieces) > 5
    assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("name", ["byte-level", "fallback"])
def test_f69_a_text_file_in_parts_has_the_ids_of_the_whole(tmp_path, name, monkeypatch):
    made = byte_level(["</s>"]) if name == "byte-level" else sentencepiece()
    made.save(str(tmp_path / "tokenizer.json"))
    text = "".join(STORIES * 12)
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(tokenizers_, "PIECE", 10_000)
    monkeypatch.setattr(prepare, "BATCH", 30_000)
    prepare_from_files(tmp_path / "out", f"hf:{tmp_path}", [tmp_path / "a.txt"], num_proc=2)
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    assert len(list(textfiles.pieces_of(tmp_path / "a.txt", 0, "text", 0.1, tokenizer))) > 9
    cut = int(len(text) * 0.9)
    begin = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
    assert read(tmp_path / "out", "train") == begin + tokenizer.encode(text[:cut])
    assert read(tmp_path / "out", "val") == begin + tokenizer.encode(text[cut:])


@pytest.mark.parametrize(
    ("name", "size", "gpu", "command"),
    [
        ("notes", 257, True, "train_shakespeare_char.py --dataset=notes --out_dir=out-notes"),
        ("notes", 257, False, "train_shakespeare_char_cpu.py --dataset=notes --out_dir=out-notes"),
        ("notes", 50257, True, "train_gpt2_muon.py --dataset=notes --out_dir=out-notes"),
        (
            "notes",
            50257,
            False,
            "train_shakespeare_char_cpu.py --dataset=notes --out_dir=out-notes",
        ),
        ("openwebtext", 50257, True, "train_openwebtext.py"),
        ("gpt2", 50257, True, "train_gpt2_muon.py --dataset=gpt2 --out_dir=out-gpt2"),
        ("fineweb_edu", 50257, True, "train_gpt2_muon.py"),
        ("stdlib_char", 257, False, "train_stdlib_char.py"),
        ("shakespeare_char", 257, True, "train_shakespeare_char.py"),
        ("shakespeare_char", 257, False, "train_shakespeare_char_cpu.py"),
        ("shakespeare_smollm2", 49152, True, "finetune_shakespeare.py"),
        ("smollm2", 49152, True, "train_gpt2_muon.py --dataset=smollm2 --out_dir=out-smollm2"),
    ],
)
def test_the_last_line_is_a_command_that_trains(
    tmp_path, monkeypatch, capsys, name, size, gpu, command
):
    """Where a config trains on this data set, it is that config, without flags."""
    monkeypatch.setattr(prepare.shutil, "which", lambda _: "/bin/nvidia-smi" if gpu else None)
    monkeypatch.setattr(ByteTokenizer, "vocab_size", size)
    (tmp_path / "config").symlink_to(ROOT / "config")
    for module in (prepare, configurator):
        monkeypatch.setattr(module, "CONFIGS", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    splits = {split: ["some text"] for split in ("train", "val")}
    write_dataset(tmp_path / "data" / name, ByteTokenizer(), splits)
    assert capsys.readouterr().out.endswith(f"train on it with: python train.py config/{command}\n")
    config, *flags = command.split()
    read = resolve(read_settings(ROOT / "train.py"), [str(ROOT / "config" / config), *flags])
    assert read["dataset"] == name


@pytest.mark.parametrize("out", ["data/stdlib_char", "stdlib_char"])
def test_a_data_set_elsewhere_is_named_by_its_path(tmp_path, monkeypatch, capsys, out):
    """data/ means the repository's: another data set may have the same name there."""
    monkeypatch.chdir(tmp_path)
    write_dataset(out, ByteTokenizer(), {split: ["some text"] for split in ("train", "val")})
    shown = capsys.readouterr().out.splitlines()[-1]
    script, config, *flags = shlex.split(shown.partition("train on it with: python ")[2])
    assert Path(script).resolve() == ROOT / "train.py" and Path(config).exists()
    read = resolve(read_settings(ROOT / "train.py"), [config, *flags])
    assert read["dataset"] == str(tmp_path / out) and read["out_dir"] == "out-stdlib_char"


def test_a_run_without_a_checkpoint_has_no_tokenizer():
    with pytest.raises(ValueError, match="no checkpoint at nowhere/ckpt.pt"):
        prepare.tokenizer_named("run:nowhere", False)


def test_ones_own_bpe_is_trained_kept_and_exported(run, tmp_path):
    rows_file(tmp_path / "a.jsonl", STORIES)
    shown = run("data/text/prepare.py", f"--input={tmp_path / 'a.jsonl'}", "--tokenizer=bpe:300",
                f"--out={tmp_path / 'data'}")  # fmt: skip
    command = re.search(r"size 300; train on it with: python train.py (\S+) --dataset=", shown)
    assert (ROOT / command[1]).exists() and "shakespeare_char" in command[1]
    meta = read_meta(tmp_path / "data")
    tokenizer = from_meta(meta)
    assert (meta["vocab_size"], tokenizer.end_of_text) == (300, 0)
    kept = load_tokenizer(f"hf:{tmp_path / 'data'}")  # usable for other texts
    assert kept.encode(STORIES[3]) == tokenizer.encode(STORIES[3])
    assert kept.end_of_text == 0 and len(kept.encode(STORIES[3])) < len(STORIES[3]) / 2
    run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}",
        "--max_iters=1")  # fmt: skip
    run("convert.py", f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'to'}")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "to")
    assert theirs(STORIES[3]).input_ids == kept.encode(STORIES[3]) and theirs.eos_token_id == 0
    # the export's tokenizer.json has other spaces
    run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", f"--init_from={tmp_path / 'to'}",
        f"--out_dir={tmp_path / 'again'}", "--max_iters=1")  # fmt: skip
    with pytest.raises(ValueError, match="unknown tokenizer='bpe:many'.*bpe:SIZE"):
        run("data/text/prepare.py", f"--input={tmp_path / 'a.jsonl'}", "--tokenizer=bpe:many",
            f"--out={tmp_path / 'data'}")  # fmt: skip


def test_begin_and_end_tokens_that_a_text_has_already_count_no_bytes(tmp_path):
    """Equal token files had other bits per byte."""
    byte_level(["<s>", "</s>"], begin="<s>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    found = []
    for form in ("{}", "<s>{}</s>"):
        rows_file(tmp_path / "a.jsonl", [form.format(f"{story} </s> ü") for story in STORIES])
        prepare_from_files(tmp_path / "data", f"hf:{tmp_path}", [tmp_path / "a.jsonl"],
                           special_tokens=True)  # fmt: skip
        data = tmp_path / "data"
        files = [(data / f"{split}.bin").read_bytes() for split in ("train", "val")]
        found.append((files, read_meta(data)["bytes"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["byte", "char", "bpe:300"])
def test_bits_per_byte_are_those_of_an_independent_computation(run, tmp_path, kind):
    texts = [f"{story} — ü" for story in STORIES]
    rows_file(tmp_path / "a.jsonl", texts)
    prepare_from_files(tmp_path / "data", kind, [tmp_path / "a.jsonl"])
    shown = run("train.py", *TINY, f"--dataset={tmp_path / 'data'}", "--eval_interval=1",
                f"--out_dir={tmp_path / 'out'}", "--max_iters=1", "--eval_iters=8")  # fmt: skip
    entries = [json.loads(e) for e in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    entry = [e for e in entries if "val_bpb" in e][-1]
    assert f"val bpb {entry['val_bpb']:7.4f}" in shown
    ids = read(tmp_path / "data", "val")
    held_out = from_meta(read_meta(tmp_path / "data")).decode(ids).replace("<|endoftext|>", "")
    # total loss in bits (the size from an ideal compressor) over the text's bytes
    bits = entry["val_loss"] * len(ids) / math.log(2)
    assert entry["val_bpb"] == pytest.approx(bits / len(held_out.encode()))
    assert read_meta(tmp_path / "data")["bytes"]["val"] == len(held_out.encode())
    assert sum(read_meta(tmp_path / "data")["bytes"].values()) == len("".join(texts).encode())


@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_line_ends_stay_as_they_are(tmp_path, tokenizer, gpt2_files):
    text = "one\r\ntwo\rthree\n" * 40
    (tmp_path / "a.txt").write_bytes(text.encode())
    prepare_from_files(tmp_path / "out", tokenizer, [tmp_path / "a.txt"])
    ids = read(tmp_path / "out", "train") + read(tmp_path / "out", "val")
    shown = from_meta(read_meta(tmp_path / "out")).decode(ids)
    assert shown.replace("<|endoftext|>", "") == text


# ---- found in review ----------------------------------------------------------------------------


def test_f62_a_token_spelled_none_is_no_end_of_text(tmp_path):
    """str(None) would look it up if a file or key is missing."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"None": 0, "a": 1, "<s>": 2, "</s>": 3}, unk_token="a")
    )
    made.save(str(tmp_path / "tokenizer.json"))
    for settings, expected in (({}, None), ({"eos_token": None}, None), ({"eos_token": "</s>"}, 3),
                               ({"add_bos_token": True, "eos_token": "</s>"}, 3)):  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = load_tokenizer(f"hf:{tmp_path}")
        assert tokenizer.end_of_text == expected and tokenizer.begin_of_text is None
        assert tokenizer.stop_tokens == ([] if expected is None else [expected])


def test_f61_a_template_that_appends_a_token_prepends_none(tmp_path):
    """T5's template does this."""
    made = byte_level(["<pad>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    assert (tokenizer.begin_of_text, tokenizer.end_of_text) == (None, 1)


@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("name", ["gpt2", "byte", "byte-level"])
def test_f69_a_part_may_begin_within_a_character(tmp_path, monkeypatch, gpt2_files, name, shift):
    text = "x" * shift + "日本語 hello world " * 3000
    (tmp_path / "a.txt").write_text(text)
    byte_level(["</s>"]).save(str(tmp_path / "tokenizer.json"))
    kind = f"hf:{tmp_path}" if name == "byte-level" else name
    monkeypatch.setattr(textfiles, "READ_SIZE", 10_001)
    monkeypatch.setattr(tokenizers_, "PIECE", 10_000)
    prepare_from_files(tmp_path / "out", kind, [tmp_path / "a.txt"])
    tokenizer = from_meta(read_meta(tmp_path / "out"))
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    assert read(tmp_path / "out", "train") == tokenizer.encode(text[: int(len(text) * 0.9)]) + end


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", 'id\ttext\n1\tplain\n2\t"so it goes\n' + "3\tplain\n" * 50,
         "unexpected end of data in the row that starts at line 3: check the quotes"),
        ("a.csv", 'text\ngood\n"A "quoted" title\n"\nok\n', "expected after .* at line 3: check"),
        ("a.csv", '"text"x,b\nok,1\n', "',' expected after .* in the header: check the quotes"),
        ("a.json", '[{"text": "a"}] tail', "cannot read .*a.json: Extra data"),
        ("a.json", '{\n "text": "a"\n}', "a .json file must have one row per line or"),
        ("a.txt", b"a" * 70_000 + b"\xff" + b"a" * 50, "a.txt as UTF-8 text: invalid start byte"),
    ],
)  # fmt: skip
def test_f67_what_is_cut_short_or_follows_is_named(run, tmp_path, name, content, message):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run("data/text/prepare.py", f"--input={tmp_path / name}", "--tokenizer=byte",
            f"--out={tmp_path / 'out'}", "--val_fraction=0.001")  # fmt: skip


def test_f65_no_token_of_a_text_file_is_doubled(tmp_path, gpt2_files):
    (tmp_path / "a.txt").write_text("one<|endoftext|>" * 20)
    prepare_from_files(tmp_path / "out", "gpt2", [tmp_path / "a.txt"], special_tokens=True)
    assert read(tmp_path / "out", "train")[-2:] != [50256, 50256]
    assert read(tmp_path / "out", "val")[-2:] == [505, 50256]
    assert read(tmp_path / "out", "val").count(50256) == 2


def test_f83_other_peoples_token_files_and_tokenizers_stay(run, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 99)
    nano = tmp_path / "nano"
    nano.mkdir()
    (nano / "train.bin").write_bytes(b"precious")
    arguments = ["data/text/prepare.py", f"--input={tmp_path / 'a.txt'}"]
    with pytest.raises(ValueError, match="train.bin belongs to no data set of ours"):
        run(*arguments, "--tokenizer=byte", f"--out={nano}")
    assert (nano / "train.bin").read_bytes() == b"precious"
    model = tmp_path / "model"
    model.mkdir()
    byte_level(["</s>"]).save(str(model / "tokenizer.json"))
    before = (model / "tokenizer.json").read_bytes()
    for tokenizer in (f"hf:{model}", "bpe:300"):
        run(*arguments, f"--tokenizer={tokenizer}", f"--out={model}")
        assert (model / "tokenizer.json").read_bytes() == before


# ---- F80: killed preparations -----------------------------------------------------------------

SLOW = """
import time
from steady import prepare
encode = prepare.encode_document
def slow(tokenizer, piece):
    time.sleep(0.002)
    return encode(tokenizer, piece)
prepare.encode_document = slow
prepare.BATCH = 4000
"""


def start_preparation(folder, path):
    """Start a prepare script that takes seconds, in its own session."""
    code = SLOW + (
        "import sys, runpy\nsys.argv = ['prepare.py', *sys.argv[1:]]\n"
        "runpy.run_path('data/text/prepare.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, f"--input={path}", f"--out={folder}",
               "--tokenizer=byte", "--num_proc=2"]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip


def in_session(leader):
    """The processes of a session that are still running."""
    found = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(leader)], capture_output=True,
                           text=True).stdout.split("\n")  # fmt: skip
    return [line for line in found if line.split() and "Z" not in line.split()[1]]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_f80_a_preparation_that_is_killed_leaves_an_earlier_data_set_alone(tmp_path, sent):
    """Before, its worker processes lived on and wrote into the files of the next preparation."""
    names, out = ("train.bin", "val.bin", "meta.json"), tmp_path / "out"
    path = rows_file(tmp_path / "a.jsonl", [f"text {i} " * 9 for i in range(1500)])
    prepare_from_files(tmp_path / "expected", "byte", [path])
    prepare_from_files(out, "byte", [rows_file(tmp_path / "b.jsonl", ["another text"] * 99)])
    earlier = [(out / name).read_bytes() for name in names]
    process = start_preparation(out, path)
    until = time.monotonic() + 60
    while not any(p.stat().st_size for p in out.glob("train.bin.*.tmp")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    os.kill(process.pid, sent)
    process.wait(timeout=30)
    assert not in_session(process.pid)
    assert [(out / name).read_bytes() for name in names] == earlier
    prepare_from_files(out, "byte", [path])
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    assert {p.name for p in out.iterdir()} == {*names}


def test_f80_a_full_disk_that_only_fsync_reports_leaves_an_earlier_data_set_alone(
    tmp_path, monkeypatch
):
    names, out = ("train.bin", "val.bin", "meta.json"), tmp_path / "out"
    prepare_from_files(out, "byte", [rows_file(tmp_path / "b.jsonl", ["another text"] * 99)])
    earlier, sync = [(out / name).read_bytes() for name in names], os.fsync

    def full(descriptor):
        if "train.bin" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        sync(descriptor)

    monkeypatch.setattr("steady.folder.os.fsync", full)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        prepare_from_files(out, "byte", [rows_file(tmp_path / "a.jsonl", ["one text"] * 99)])
    assert [(out / name).read_bytes() for name in names] == earlier


def test_the_spaces_around_a_files_name_belong_to_it(run, tmp_path, monkeypatch):
    (tmp_path / " a.txt").write_text("with a space " * 9)
    (tmp_path / "a.txt").write_text("without " * 9)
    monkeypatch.chdir(tmp_path)
    run("data/text/prepare.py", "--input= a.txt", "--tokenizer=byte", "--out=out")
    assert ByteTokenizer().decode(read(tmp_path / "out", "train")).startswith("with a")


def test_links_that_form_a_loop_are_refused_in_one_line(run, tmp_path):
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    with pytest.raises(ValueError, match="cannot read .*loop.txt: .*symbolic links"):
        run("data/text/prepare.py", f"--input={tmp_path}/*", f"--out={tmp_path}/out")


def test_a_bpe_of_ones_own_without_tokenizers_is_one_line(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError) as found:
        run("data/text/prepare.py", f"--input={tmp_path / 'a.txt'}", f"--out={tmp_path / 'out'}",
            "--tokenizer=bpe:300")  # fmt: skip
    capsys.readouterr()
    configurator.one_line_errors(found.type, found.value, found.tb)
    assert capsys.readouterr().err == "error: this needs tokenizers: pip install tokenizers\n"


def test_a_bpe_of_ones_own_is_the_same_tokenizer_by_its_folder(tmp_path):
    path = rows_file(tmp_path / "a.jsonl", [f"text {i}" for i in range(300)])
    prepare_from_files(tmp_path / "own", "bpe:300", [path])
    prepare_from_files(tmp_path / "other", f"hf:{tmp_path / 'own'}", [path])
    meta = read_meta(tmp_path / "own")
    assert meta == read_meta(tmp_path / "other") and meta["vocab_size"] == 300
    prepare_from_files(tmp_path / "own", f"hf:{tmp_path / 'own'}", [path])
    assert read_meta(tmp_path / "own") == meta
    (tmp_path / "own" / "meta.json").write_text(json.dumps(meta | {"end_of_text": "x"}))
    with pytest.raises(ValueError, match="own"):
        prepare_from_files(tmp_path / "other", f"hf:{tmp_path / 'own'}", [path])
    (tmp_path / "own" / "meta.json").write_text(json.dumps({"tokenizer": "gpt2", "json": "{}"}))
    with pytest.raises(ValueError, match="own has no tokenizer.json"):
        prepare_from_files(tmp_path / "other", f"hf:{tmp_path / 'own'}", [path])
    (tmp_path / "own" / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "own" / "tokenizer.json").write_text(byte_level(["</s>"]).to_str())
    with pytest.raises(ValueError, match="tokenizer.json and meta.json have two tokenizers"):
        prepare_from_files(tmp_path / "other", f"hf:{tmp_path / 'own'}", [path])


def test_f67_bytes_that_continue_no_character_are_refused_at_once(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 90_000 + b"\x80" * 10_000_000)
    began = time.monotonic()
    with pytest.raises(ValueError, match="invalid start byte"):
        prepare_from_files(tmp_path / "out", "byte", [tmp_path / "a.txt"], val_fraction=0.991)
    assert time.monotonic() - began < 5


def test_f80_files_of_two_data_sets_are_not_one(tmp_path, monkeypatch):
    """This happens when a prepare script is killed between renaming two of its files."""
    for name, text in (("one", "abc"), ("two", "xyz")):
        text = {"train": [text * 99], "val": [text * 99]}
        write_dataset(tmp_path / name, CharTokenizer("abcxyz"), text)
    DataSet(str(tmp_path / "one"))
    os.replace(tmp_path / "two" / "meta.json", tmp_path / "one" / "meta.json")
    with pytest.raises(ValueError, match="train.bin does not belong to its meta.json"):
        DataSet(str(tmp_path / "one"))


def test_f80_two_preparations_do_not_write_at_once(other_run, tmp_path):
    other_run(tmp_path)
    with pytest.raises(ValueError, match="another process is writing to"):
        write_dataset(tmp_path, ByteTokenizer(), {"train": ["abc"], "val": ["abc"]})


@pytest.mark.parametrize("text", ['{"mine": 1}', '{"tokenizer": "sentencepiece"}'])
def test_f83_a_meta_json_of_something_else_is_not_replaced(tmp_path, text):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ValueError, match="meta.json belongs to no data set of ours"):
        write_dataset(tmp_path, ByteTokenizer(), {"train": ["abc"], "val": ["abc"]})
    assert (tmp_path / "meta.json").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["meta.json"]


# ---- F68: doing what each message says ---------------------------------------------------------


def words(n):
    return "some words and lines\n" * n


def foreign_files(folder, prepare, train):
    (folder / "out").mkdir()
    (folder / "out" / "train.bin").write_bytes(b"\1" * 99)
    yield "train.bin belongs to no data set of ours: move it, or use another --out"
    (folder / "out" / "train.bin").rename(folder / "moved")


def another_out(folder, prepare, train):
    yield from foreign_files(folder, prepare, train)
    prepare["--out"] = str(folder / "other")


def little_text(folder, prepare, train):
    (folder / "a.jsonl").write_text('{"text": "some words and lines"}\n' * 3)
    prepare["--input"] = str(folder / "a.jsonl")
    yield "the val split of .* would be empty: use more text, or another --val_fraction"
    prepare["--val_fraction"] = "0.5"


def an_unknown_tokenizer(folder, prepare, train):
    prepare["--tokenizer"] = "characters"
    yield "unknown tokenizer='characters': use gpt2, byte or hf:.* char, bpe:SIZE"
    prepare["--tokenizer"] = "char"


def a_small_bpe(folder, prepare, train):
    prepare["--tokenizer"] = "bpe:256"
    yield "bpe:256 must be from 257 .* to 2"
    prepare["--tokenizer"] = "bpe:257"


def a_wrong_suffix(folder, prepare, train):
    rows = "".join(json.dumps({"text": "some words"}) + "\n" for _ in range(200))
    (folder / "a.dump").write_text(rows)
    prepare["--input"] = str(folder / "a.dump")
    yield "a.dump holds rows of JSON: name it .jsonl, or .txt"
    (folder / "a.dump").rename(folder / "a.jsonl")
    prepare["--input"] = str(folder / "a.jsonl")


def semicolons(folder, prepare, train):
    rows = "id;text\n" + "1;some words\n" * 200
    (folder / "a.csv").write_text(rows)
    prepare["--input"] = str(folder / "a.csv")
    yield "among .'id;text'.: pass .*, or separate columns by commas .by tabs in a .tsv file"
    (folder / "a.tsv").write_text(rows.replace(";", "\t"))
    prepare["--input"] = str(folder / "a.tsv")


def another_column(folder, prepare, train):
    (folder / "a.csv").write_text("id,body\n" + "1,some words\n" * 200)
    prepare["--input"] = str(folder / "a.csv")
    yield "no columns named 'text' among .'id', 'body'.: pass --column=NAME"
    prepare["--column"] = "body"


def another_encoding(folder, prepare, train):
    (folder / "a.txt").write_bytes(words(200).encode("utf-16"))
    yield "as UTF-8 text: .* convert other encodings with iconv"
    subprocess.run(["iconv", "-f", "UTF-16", "-t", "UTF-8", folder / "a.txt", "-o",
                    folder / "b.txt"], check=True)  # fmt: skip
    prepare["--input"] = str(folder / "b.txt")


@pytest.mark.parametrize("case", [
    foreign_files, another_out, little_text, an_unknown_tokenizer, a_small_bpe,
    a_wrong_suffix, semicolons, another_column, another_encoding,
], ids=lambda case: case.__name__)  # fmt: skip
def test_f68_doing_what_prepare_says_works(run, tmp_path, case):
    (tmp_path / "a.txt").write_text(words(200))
    prepare = {"--input": str(tmp_path / "a.txt"), "--out": str(tmp_path / "out"),
               "--tokenizer": "byte"}  # fmt: skip

    def train():
        run("train.py", *TINY, f"--dataset={prepare['--out']}", f"--out_dir={tmp_path / 'run'}",
            "--max_iters=1")  # fmt: skip

    def prepared():
        run("data/text/prepare.py", *(f"{name}={value}" for name, value in prepare.items()))

    steps = case(tmp_path, prepare, train)
    with pytest.raises(ValueError, match=next(steps)):
        prepared()
    assert next(steps, None) is None
    prepared()
    train()


def test_f68_doing_what_train_says_of_data_works(run, tmp_path):
    (tmp_path / "a.txt").write_text(words(20))
    prepare = "data/text/prepare.py", f"--input={tmp_path / 'a.txt'}", f"--out={tmp_path / 'd'}"
    run(*prepare, "--tokenizer=byte")
    command = ["train.py", *TINY, f"--dataset={tmp_path / 'd'}", f"--out_dir={tmp_path / 'run'}",
               "--max_iters=1"]  # fmt: skip
    with pytest.raises(
        ValueError, match="needs at least .*: use more data or --block_size="
    ) as error:
        run(*command, "--block_size=300")
    run(*command, str(error.value).rsplit(" ", 1)[1])
    path, content = tmp_path / "d" / "train.bin", (tmp_path / "d" / "train.bin").read_bytes()
    for damaged in content[:-2], b"", content[:-1]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="prepare .*again"):
            run(*command)
        run(*prepare, "--tokenizer=byte")
        assert path.read_bytes() == content
        run(*command)
    (tmp_path / "d" / "meta.json").unlink()
    (tmp_path / "d" / "meta.pkl").write_bytes(b"nanoGPT's")
    with pytest.raises(ValueError, match="or with data/text/prepare.py$"):
        run(*command)
    run(*prepare, "--tokenizer=byte")
    run(*command)


def test_f68_doing_what_train_and_convert_say_of_a_model_works(run, tmp_path):
    model, (text, data) = qwen(tmp_path / "model"), (tmp_path / "a.txt", tmp_path / "data")
    text.write_text(words(200))
    run("data/text/prepare.py", f"--input={text}", f"--out={data}", "--tokenizer=byte")
    command = ["train.py", f"--init_from={model}", f"--out_dir={tmp_path / 'out'}", "--max_iters=1",
               "--batch_size=2", "--gradient_accumulation_steps=1", "--eval_iters=1",
               "--block_size=100000", "--device=cpu", "--compile=False"]  # fmt: skip
    with pytest.raises(ValueError, match="make one with python data/text/prepare.py") as error:
        run(*command, f"--dataset={data}", "--block_size=16")
    remedy = str(error.value).rpartition("python ")[2].split()
    run(remedy[0], f"--input={text}", remedy[2], f"--out={tmp_path / 'own'}")
    command.append(f"--dataset={tmp_path / 'own'}")
    with pytest.raises(ValueError, match="is longer than .*'s context: use --block_size=") as error:
        run(*command)
    run(*command, re.search(r"--block_size=\d+", str(error.value))[0])
    export = ["convert.py", f"--out_dir={tmp_path / 'out'}"]
    for to, message in (("", "pass --to=FOLDER"), (f"--to={model}", "name another folder"),
                        (f"--to={tmp_path / 'out'}", "own folder: name another")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run(*export, *filter(None, [to]))
    run(*export, f"--to={tmp_path / 'other'}")


def with_merges(merges, pattern):
    """A byte-level BPE with these merges, and words by `pattern` ("": a text is one word)."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {character: i for i, character in enumerate(sorted(alphabet))}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [split, bytes_] if pattern else [bytes_]
    )
    return made


@pytest.mark.parametrize(
    ("merges", "pattern", "unit"),
    [
        ([("-", "-"), ("--", "--"), ("----", "----"), ("-", "Ċ")],  # Qwen's and Llama 3's words
         r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
         "-" * 3001 + "\n"),
        ([("h", "a"), ("ha", "Ġ"), ("haĠ", "haĠ"), ("haĠhaĠ", "haĠhaĠ")], "", "ha "),
    ],
)  # fmt: skip
def test_f69_long_words_and_tokens_of_several_words_survive_seams(
    monkeypatch, merges, pattern, unit
):
    """Windows that begin inside of a word pair its characters in another way than its piece."""
    monkeypatch.setattr(tokenizers_, "PIECE", 10_000)
    tokenizer = HFTokenizer(with_merges(merges, pattern).to_str())
    text = unit * (60_000 // len(unit)) + "end"
    chunks = [text[i : i + 777] for i in range(0, len(text), 777)]
    assert sum(encode_pieces(tokenizer, chunks), []) == tokenizer.encode(text)


def test_f69_tokens_of_several_lines_do_not_keep_a_text_whole(monkeypatch):
    """Real vocabularies have such tokens, which words bound: texts of gigabytes were not cut."""
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    made = with_merges([("č", "Ċ"), ("čĊ", "čĊ")], words)
    text = "so it goes\r\n\r\n" * 3000
    monkeypatch.setattr(tokenizers_, "PIECE", 10_000)
    pieces = encode_pieces(HFTokenizer(made.to_str()), [text])
    assert len(pieces) > 3 and sum(pieces, []) == HFTokenizer(made.to_str()).encode(text)


def test_f66_tokens_that_are_objects_and_their_flags_load_in_transformers(tmp_path):
    """Flags that only tokenizer_config.json has would give transformers other ids than ours."""
    byte_level(["</s>", "<|x|>"]).save(str(tmp_path / "tokenizer.json"))
    meta = load_tokenizer(f"hf:{tmp_path}").meta() | {"end_of_text": 0, "stop_tokens": [0]}
    (tmp_path / "out").mkdir()
    flags = {"content": "</s>", "rstrip": True, "lstrip": True, "special": True,
             "single_word": False, "normalized": False}  # fmt: skip
    tokenizers_.write_hf_tokenizer(meta, tmp_path / "out", {
        "tokenizer_config": {"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"0": flags},
                             "clean_up_tokenization_spaces": True},
        "special_tokens_map": {"additional_special_tokens": [{"content": "<|x|>"}]},
    })  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == "</s>" and theirs.padding_side == "left"
    assert not theirs.clean_up_tokenization_spaces
    prompt = "a </s> b <|x|> don 't ."
    assert theirs(prompt).input_ids == encode_prompt(from_meta(meta), prompt)


@pytest.mark.parametrize("in_tokenizer", [True, False])
@pytest.mark.parametrize("kind", ["GPT2TokenizerFast", "Qwen2Tokenizer", "RobertaTokenizerFast"])
@pytest.mark.parametrize("prefix", [True, False, None])
def test_f61_a_space_that_tokenizer_config_adds_is_added(tmp_path, prefix, kind, in_tokenizer):
    tokenizer = byte_level(["</s>", "<s>", "<unk>", "<pad>", "<mask>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=in_tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "tokenizer_class": kind}
    settings |= {} if prefix is None else {"add_prefix_space": prefix}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = load_tokenizer(f"hf:{tmp_path}")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("begins here", " begins"):
        assert found.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert (found.encode("begins") == found.encode(" begins")) is bool(prefix)


def test_f62_generation_config_may_confirm_a_stop_token_that_is_text(tmp_path):
    byte_level(["<s>", "</s>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    line_feed = load_tokenizer(f"hf:{tmp_path}").encode("\n")[0]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [1, {line_feed}]}}')
    assert load_tokenizer(f"hf:{tmp_path}").stop_tokens == [1, line_feed]
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "model_specific_special_tokens": {"image": "<img>"}}'
    )
    with pytest.raises(UserError, match="lacks .'<img>'."):
        load_tokenizer(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("token", "message"), [({}, "invalid template"), ({"<s>": 9999}, "ids without a token")]
)
def test_f61_a_template_without_its_token_is_one_line(tmp_path, token, message, capfd):
    content = json.loads(byte_level(["<s>"], begin="<s>").to_str())
    for name in content["post_processor"]["special_tokens"]:
        token = {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in token.items()}
    content["post_processor"]["special_tokens"] = token
    (tmp_path / "tokenizer.json").write_text("\ufeff" + json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_tokenizer(f"hf:{tmp_path}")


def test_f67_an_empty_archive_is_an_interrupted_download(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(b"")
    with pytest.raises(UserError, match="a.json.gz is empty: download it again"):
        prepare_from_files(tmp_path / "out", "byte", [path])


def test_f62_a_document_without_ids_leaves_no_separator():
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = HFTokenizer(made.to_str(), end_of_text=1)
    for text, expected in ((" \n ", []), ("a", [0, 1])):
        found, _ = prepare.encode_document(tokenizer, prepare.Piece("train", text, ""))
        assert [id for ids in found for id in ids] == expected
