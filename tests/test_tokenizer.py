import json
import time

import numpy as np
import pytest
from tokenizers import AddedToken, ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers

from steady import UserError
from steady.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    HFTokenizer,
    encode_prompt,
    from_meta,
    hf_tokenizer_meta,
    load_tokenizer,
    write_hf_tokenizer,
)


def test_char_round_trip_and_meta():
    chars = CharTokenizer.train("hello wörld")
    assert chars.vocab_size == len(set("hello wörld"))
    assert chars.decode(chars.encode("hello wörld")) == "hello wörld"
    assert from_meta(chars.meta()).encode("wö") == chars.encode("wö")


def test_f40_unknown_character_is_named():
    with pytest.raises(ValueError, match="does not know 'xy'"):
        CharTokenizer.train("abc").encode("ayxa")
    with pytest.raises(ValueError, match="does not know '!🙂'"):  # outside of its code points
        CharTokenizer("cab").encode_between("", "a🙂b!", "")


TEXT = "naïve 你好 🙂\n" * 100_000


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("".join(set(TEXT)))])
def test_arrays_hold_the_same_ids_and_take_less_time(tokenizer):
    """With lists of integers, preparing bytes took 1.3 times as long."""

    def encode_array(text):
        return tokenizer.encode_between("", text, "")

    assert encode_array(TEXT).tolist() == tokenizer.encode(TEXT)
    assert encode_array("").tolist() == tokenizer.encode("") == []

    def seconds(function):
        began = time.process_time()
        function(TEXT)
        return time.process_time() - began

    quick = min(seconds(encode_array) for _ in range(5))
    slow = min(seconds(lambda text: np.array(tokenizer.encode(text))) for _ in range(5))
    assert quick < slow / 3, (quick, slow)


def test_bytes_know_every_character_and_decode_torn_ones():
    text = "naïve 你好 🙂"
    ids = ByteTokenizer().encode(text)
    assert ByteTokenizer().decode(ids) == text
    assert ByteTokenizer().decode(ids[:-1]).endswith("\ufffd")
    assert ByteTokenizer().decode([ByteTokenizer.end_of_text]) == ""
    assert from_meta({"tokenizer": "byte"}).vocab_size == 257


def test_unknown_tokenizer_is_named():
    with pytest.raises(ValueError, match="unknown tokenizer 'bpe9000'"):
        from_meta({"tokenizer": "bpe9000"})


def test_gpt2_without_its_files_says_what_to_do(monkeypatch, tmp_path):
    import tiktoken

    def offline(name):
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR"):
        GPT2Tokenizer()


def test_gpt2_encodes_through_tiktoken(gpt2_files):
    gpt2 = from_meta({"tokenizer": "gpt2"})
    assert gpt2.encode("hello world") == [31373, 995]
    assert 50256 not in gpt2.encode("<|endoftext|>")  # text never becomes a control token
    assert gpt2.decode(gpt2.encode("naïve 🙂!")) == "naïve 🙂!"


def test_f29_no_source_file_unpickles():
    from conftest import ROOT

    patterns = ("*.py", "steady/*.py", "config/*.py", "data/**/*.py")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    assert ROOT / "steady" / "checkpoint.py" in paths
    for path in paths:
        source = path.read_text(encoding="utf-8")
        assert "pickle.load" not in source, path
        assert "weights_only=False" not in source, path


def word_level(folder):
    """Write a tokenizer.json with three words and a space before each; returns its name for
    --tokenizer."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "▁c": 2}, "▁c"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.enable_truncation(3)
    made.enable_padding(length=5)
    made.save(str(folder / "tokenizer.json"))
    return f"hf:{folder}"


def test_a_tokenizer_that_truncates_and_pads_for_a_model_gives_all_of_a_text(tmp_path):
    assert load_tokenizer(word_level(tmp_path)).encode("a b c a") == [0, 1, 2, 0]
    assert load_tokenizer(word_level(tmp_path)).encode("a") == [0]


def test_text_that_a_vocabulary_without_an_unknown_token_lacks_is_one_line():
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
    with pytest.raises(ValueError, match="tokenizer cannot encode all of 'b'"):
        HFTokenizer(made.to_str(), None).encode("b")


def named_end(folder, template=False):
    """Write a tokenizer.json in which 0 is unknown, 1 begins and 3 ends a text, and a
    tokenizer_config.json that says so."""
    import tokenizers

    words = {"<unk>": 0, "<s>": 1, "!": 2, "</s>": 3, "a": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    if template:  # prepends <s>
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    made.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": "</s>"}, "unk_token": "<unk>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return settings


@pytest.mark.parametrize(("stale", "token"), [(2, "'!'"), (1, "'<s>'"), (0, "'<unk>'")])
def test_an_id_that_ends_no_text_is_not_the_end_of_text(tmp_path, capsys, stale, token):
    """transformers writes eos_token_id=2 into the config.json of any Llama."""
    named_end(tmp_path, template=True)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [stale, 3]}))
    meta = hf_tokenizer_meta(tmp_path)
    assert (meta["begin_of_text"], meta["end_of_text"], meta["stop_tokens"]) == (1, 3, [3])
    assert f"note: eos_token_id={stale} in {tmp_path} is {token}" in capsys.readouterr().out


def test_the_named_token_separates_documents_if_no_other_file_agrees(tmp_path):
    """transformers' default, 2, may be the id of another special token."""
    named_end(tmp_path)
    content = (tmp_path / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(content.replace('"!"', '"<pad>"'))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for ids, ends in ((2, [3, 2]), ([2, 3], [2, 3])):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert hf_tokenizer_meta(tmp_path)["stop_tokens"] == ends


@pytest.mark.parametrize(("stale", "end"), [(2, None), (3, 3)])
def test_a_letter_is_not_the_end_of_text_if_no_file_names_one(tmp_path, capsys, stale, end):
    named_end(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": stale}))
    assert hf_tokenizer_meta(tmp_path)["end_of_text"] == end
    assert ("is '!', which ends no text: ignored" in capsys.readouterr().out) == (end is None)


def test_the_end_of_text_may_begin_a_text_if_no_file_names_one(tmp_path):
    """As in GPT-2 and OPT."""
    named_end(tmp_path, template=True)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    meta = hf_tokenizer_meta(tmp_path)
    assert (meta["begin_of_text"], meta["end_of_text"]) == (1, 1)


def test_an_export_names_an_end_of_text_that_only_config_json_has(tmp_path):
    named_end(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    files = {"tokenizer_config": {"eos_token": None}}
    write_hf_tokenizer(hf_tokenizer_meta(tmp_path), tmp_path, files)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "</s>"


def test_prompts_need_not_spell_the_end_of_text():
    made = Tokenizer(models.WordLevel({"A": 0, "C": 1, "</s>": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = HFTokenizer(made.to_str(), end_of_text=2)
    assert encode_prompt(tokenizer, "AC") == [0, 1]
    assert encode_prompt(tokenizer, "AC</s>A") == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"<|im_start|>": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<|im_start|>"}}}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image": "<|im_start|>"}}),
        ("special_tokens_map.json", {"additional_special_tokens": ["</s>", "<|im_start|>"]}),
        ("special_tokens_map.json", {"eos_token": {"content": "<|im_start|>"}}),
        ("tokenizer_config.json", {"pad_token": "<|im_start|>"}),
        ("special_tokens_map.json", {"mask_token": {"content": "<|im_start|>"}}),
    ],
)
def test_tokens_that_only_other_files_add_are_refused(tmp_path, name, content):
    """transformers adds them; here they were ordinary text."""
    settings = named_end(tmp_path) if name == "tokenizer_config.json" else {}
    named_end(tmp_path)
    (tmp_path / name).write_text(json.dumps(settings | content))
    with pytest.raises(UserError, match=r"tokenizer.json lacks \['<\|im_start\|>'\]"):
        hf_tokenizer_meta(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{oops", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"eos_token_id": 5000}', "eos_token_id=5000 is not one of the tokenizer's 3 ids"),
        ('{"eos_token_id": "</s>"}', "eos_token_id='</s>' is not one of"),
    ],
)
def test_an_odd_config_beside_a_tokenizer_is_one_line(tmp_path, content, message):
    name = word_level(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json.* {message}"):
        load_tokenizer(name)


def test_a_begin_token_in_a_vocabulary_is_no_text():
    names = ["<unk>", "</s>", "<s>", "<", "/", "s", ">", "x"]
    made = Tokenizer(models.Unigram([(name, -float(i > 2)) for i, name in enumerate(names)], 0))
    found = HFTokenizer(made.to_str(), end_of_text=1, begin_of_text=2)
    assert not {1, 2} & {*found.encode("<s>x</s>")}


def test_an_end_that_takes_the_spaces_after_it():
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(["the hen then"], 300, min_frequency=0, show_progress=False)
    made.add_special_tokens([AddedToken("</s>", rstrip=True)])
    found = HFTokenizer(made.to_str(), end_of_text=made.token_to_id("</s>"))
    assert encode_prompt(found, "the</s> hen") == made.encode("the</s> hen").ids


def test_an_added_end_beyond_a_unigrams_vocabulary():
    made = Tokenizer(models.Unigram([("<unk>", 0.0), *((c, -1.0) for c in "</s>")], 0))
    made.add_special_tokens(["</s>"])
    assert HFTokenizer(made.to_str(), end_of_text=5).encode("</s>") == [1, 2, 3, 4]
