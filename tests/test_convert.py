"""Import and export of Hugging Face checkpoints, compared with transformers."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from torch.nn import functional as F

import convert
import model as model_file
from model import GPT, GPTConfig
from steady import UserError, checkpoint
from steady.tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer, HFTokenizer, from_meta

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def theirs(kind="Llama", **changes):
    """A transformers model with random weights; `changes` go to its config."""
    torch.manual_seed(0)
    settings = SHAPE | {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": None} | changes
    if kind == "Mistral":
        settings = {"sliding_window": None} | settings
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**settings)
    )
    for parameter in model.parameters():  # norms too: all ones would hide a mix-up
        torch.nn.init.normal_(parameter, mean=0.02, std=0.2)
    return model.eval()


def logits_of(folder, tokens):
    pretrained = convert.read_pretrained(str(folder))
    ours = GPT(GPTConfig(**pretrained.model_config))
    ours.load_state_dict(pretrained.weights)
    with torch.no_grad():
        return ours.eval()(tokens)


KINDS = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "theta-eps": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                            "rms_norm_eps": 1e-3}),
    "head_dim": ("Llama", {"head_dim": 32}),
    "multi-head": ("Llama", {"num_key_value_heads": 4}),
    "mistral": ("Mistral", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_in_and_out(tmp_path, kind):
    name, changes = KINDS[kind]
    model = theirs(name, **changes)
    model.save_pretrained(tmp_path / "in", max_shard_size="50KB" if kind == "llama" else "1GB")
    assert (len(list((tmp_path / "in").glob("*.safetensors"))) > 1) == (kind == "llama")
    tokens = torch.randint(0, 96, (2, 48))
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits_of(tmp_path / "in", tokens), expected, atol=1e-4, rtol=1e-4)
    pretrained = convert.read_pretrained(str(tmp_path / "in"))
    saved = {"model": pretrained.weights, "model_config": pretrained.model_config,
             "tokenizer": {"tokenizer": "byte"}}  # fmt: skip
    convert.write_pretrained(saved, tmp_path / "out", torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, expected, atol=1e-4, rtol=1e-4)


def test_older_config_files_are_understood(tmp_path):
    """Such files exist on the hub: rope_theta at the top, rope_scaling null, no head_dim, SiLU
    by its other name."""
    model = theirs(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["head_dim"]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"rope_theta": 5e5, "rope_scaling": None, "hidden_act": "swish"})
    )
    tokens = torch.randint(0, 96, (1, 32))
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits_of(tmp_path, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "model_type mixtral"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None},
         "rope scaling llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling linear"),
        ({"sliding_window": 8}, "sliding_window 8"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window 4096"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name_before_weights_are_downloaded(
    tmp_path, monkeypatch, change, named
):
    asked = []
    monkeypatch.setattr(convert, "find_folder", lambda _, files: asked.extend(files) or tmp_path)
    theirs().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=f"not supported: {named};"):
        convert.read_pretrained("an/id")
    assert asked == ["*.json"]


@pytest.mark.parametrize(
    "content",
    [
        [1, 2], {"model_type": "llama"}, {"rope_parameters": [1]}, {"vocab_size": None},
        {"num_attention_heads": None, "head_dim": None},
        {"rope_parameters": {"rope_theta": None}, "rope_theta": None},
    ],
)  # fmt: skip
def test_a_config_that_is_none_of_theirs_is_one_line(tmp_path, content):
    theirs().save_pretrained(tmp_path)
    if isinstance(content, dict) and "model_type" not in content:
        content = json.loads((tmp_path / "config.json").read_text()) | content
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"config\.json is not that of a Llama|is not of type int|holds a list"
    ):
        convert.read_pretrained(str(tmp_path))


def test_a_second_copy_of_the_weights_is_left_alone(tmp_path):
    """Mistral's repositories have one, with different tensor names."""
    theirs().save_pretrained(tmp_path)
    other = {"tok_embeddings.weight": torch.zeros(96, 64)}
    safetensors_torch.save_file(other, tmp_path / "consolidated.safetensors")
    convert.read_pretrained(str(tmp_path))


@pytest.mark.parametrize("shards", [False, True])
def test_older_copies_of_the_weights_are_left_alone(tmp_path, shards):
    """As in transformers: model.safetensors, or else exactly the files that the index names."""
    model, tokens = theirs(), torch.randint(0, 96, (1, 32))
    model.save_pretrained(tmp_path, max_shard_size="50KB" if shards else "1GB")
    older = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    for name in ("model-00001-of-00001.safetensors", "model_old.safetensors"):
        safetensors_torch.save_file(older, tmp_path / name)
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits_of(tmp_path, tokens), expected, atol=1e-4, rtol=1e-4)


def test_weights_in_two_files_without_an_index_are_refused(tmp_path):
    """transformers refuses such a folder; the file with the last name won."""
    model = theirs()
    for name in ("model-00001-of-00001.safetensors", "model-old.safetensors"):
        safetensors_torch.save_file(model.state_dict(), tmp_path / name)
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    with pytest.raises(UserError, match="lm_head.weight is in two files"):
        convert.read_pretrained(str(tmp_path))
    (tmp_path / "model-old.safetensors").unlink()
    assert convert.read_pretrained(str(tmp_path)).weights


def test_no_quantization_may_be_written_as_null(tmp_path):
    theirs().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for value in (None, {"quant_method": "fp8"}):
        (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": value}))
        if value is None:
            assert convert.read_pretrained(str(tmp_path)).weights
    with pytest.raises(UserError, match="quantization_config"):
        convert.read_pretrained(str(tmp_path))


def test_an_index_that_is_older_than_the_weights_is_left_alone(tmp_path):
    theirs().save_pretrained(tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert convert.read_pretrained(str(tmp_path)).weights


def test_an_export_leaves_nothing_of_an_earlier_one(run, sums, tmp_path):
    run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}", "--max_iters=2")
    saved = checkpoint.load(tmp_path / "out" / "ckpt.pt")
    pretrained = {"dtype": "float32", "chat_template": "a", "additional_chat_templates": {"b": "c"},
                  "special_tokens_map": {"eos_token": "1"}}  # fmt: skip
    names = []
    for metadata in (pretrained, None):
        convert.write_pretrained(saved | {"pretrained": metadata}, tmp_path / "to", torch.float32)
        names.append({p.name for p in (tmp_path / "to").rglob("*") if p.is_file()})
    gone = {"special_tokens_map.json", "chat_template.jinja", "b.jinja"}
    assert names[0] - names[1] == gone and names[1] - names[0] == {f"{name}.old" for name in gone}
    (tmp_path / "to" / "chat_template.jinja").write_text("yours")
    convert.write_pretrained(saved | {"pretrained": None}, tmp_path / "to", torch.float32)
    assert (tmp_path / "to" / "chat_template.jinja.old").read_text() == "a"
    assert (tmp_path / "to" / "chat_template.jinja.old1").read_text() == "yours"
    generation = json.loads((tmp_path / "to" / "generation_config.json").read_text())
    size, padded = len(saved["tokenizer"]["alphabet"]), saved["model_config"]["vocab_size"]
    assert generation["suppress_tokens"] == list(range(size, padded))
    saved["model"]["final_norm.weight"][0] = 1e5
    with pytest.raises(ValueError, match="norm.weight has values beyond the range of float16"):
        convert.write_pretrained(saved, tmp_path / "half", torch.float16)


def test_a_head_that_is_not_the_embedding_is_not_tied_silently(tmp_path):
    theirs().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="lm_head.weight differs .*set it to false"):
        convert.read_pretrained(str(tmp_path))


def test_a_model_in_8_bits_is_exported_in_bfloat16(tmp_path):
    model = theirs()
    weights = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")
    assert convert.read_pretrained(str(tmp_path)).metadata["dtype"] == "bfloat16"


def test_tied_weights_without_an_embedding_are_named(tmp_path):
    theirs(tie_word_embeddings=True).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    del tensors["model.embed_tokens.weight"]
    safetensors_torch.save_file(tensors, path)
    with pytest.raises(ValueError, match=r"token_embedding\.weight"):
        convert.read_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: x.to(torch.int32), r"model\.norm\.weight \(int32\) is not floating point"),
        (lambda x: x * torch.nan, r"final_norm\.weight has values that are not finite"),
    ],
    ids=["int32", "nan"],
)
def test_weights_that_are_no_finite_numbers_are_named(tmp_path, damage, message):
    theirs().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    safetensors_torch.save_file(
        tensors | {"model.norm.weight": damage(tensors["model.norm.weight"])}, path
    )
    with pytest.raises(ValueError, match=message):
        pretrained = convert.read_pretrained(str(tmp_path))
        model = GPT(GPTConfig(**pretrained.model_config))
        checkpoint.load_weights(model, pretrained.weights, tmp_path)


def test_unexpected_and_missing_weights_are_named(tmp_path):
    theirs().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    safetensors_torch.save_file(
        tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, path
    )
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.q_proj\.bias"):
        convert.read_pretrained(str(tmp_path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot read .*model.safetensors"):
        convert.read_pretrained(str(tmp_path))


def test_an_export_that_does_not_fit_on_the_disk_is_one_line(run, sums, tmp_path, monkeypatch):
    def full(weights, path, **more):
        path.write_bytes(b"a part")
        raise RuntimeError("Error while serializing: I/O error: No space left on device")

    run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--max_iters=1")
    export = "convert.py", f"--out_dir={tmp_path}", f"--to={tmp_path / 'exported'}"
    run(*export)
    modes = {path.stat().st_mode for path in (tmp_path / "exported").iterdir()}
    assert len(modes) == 1, modes
    export = *export[:2], f"--to={tmp_path / 'another'}"
    with monkeypatch.context() as patched:
        patched.setattr(safetensors_torch, "save_file", full)
        with pytest.raises(ValueError, match="cannot write the weights to .*another: .*No space"):
            run(*export)
    run(*export)  # the leftovers do not prevent another try
    before = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--rope_theta=500")
    with monkeypatch.context() as patched:  # the disk is full after the weights
        patched.setattr("steady.tokenizer.write_hf_tokenizer", lambda *_: open(tmp_path / "none"))
        with pytest.raises(FileNotFoundError):
            run(*export[:2], f"--to={tmp_path / 'exported'}")
    after = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert before == after  # no config.json of the new model beside the earlier weights


def test_an_export_replaces_no_other_model(run, sums, tmp_path):
    run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--max_iters=1")
    other = tmp_path / "other"
    theirs("Llama").save_pretrained(other)
    before = (other / "model.safetensors").read_bytes()
    for _ in range(2):
        with pytest.raises(
            ValueError, match="other holds another model or tokenizer: name another folder"
        ):
            run("convert.py", f"--out_dir={tmp_path}", f"--to={other}")
        assert (other / "model.safetensors").read_bytes() == before
        (other / "config.json").unlink(missing_ok=True)


def test_a_name_that_is_nowhere_is_one_line(run, sums, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="^no-one/nothing is neither a folder nor available"):
        run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}",
            "--init_from=no-one/nothing")  # fmt: skip


# ---- tokenizers -------------------------------------------------------------------------------

TEXT = "def f(x):\n    return x + 1  # naïve “quotes” 🙂\n\n\n\ttabs and   spaces\n"


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2"])
def test_tokenizers_travel_to_transformers(tmp_path, kind, gpt2_files):
    ours = {
        "char": lambda: CharTokenizer.train(TEXT),
        "byte": ByteTokenizer,
        "gpt2": GPT2Tokenizer,
    }[kind]()
    from steady.tokenizer import write_hf_tokenizer

    write_hf_tokenizer(ours.meta(), tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == ours.encode(TEXT)
    assert loaded.decode(ours.encode(TEXT)) == TEXT
    assert loaded.eos_token_id == ours.end_of_text
    if kind == "byte":  # a character that ends early does not take the others with it
        assert loaded.decode(ours.encode("Hello café")[:-1]).startswith("Hello caf")
    content = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    again = from_meta(HFTokenizer(content, ours.end_of_text).meta())
    assert again.encode(TEXT) == ours.encode(TEXT) and again.decode(again.encode(TEXT)) == TEXT


# ---- end to end -------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path):
    """A folder like those on the hub: bfloat16 weights and a tokenizer.json."""
    from steady.tokenizer import write_hf_tokenizer

    folder = tmp_path / "foreign"
    model = theirs("Qwen3", vocab_size=264, head_dim=32, eos_token_id=256, bos_token_id=256)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_hf_tokenizer({"tokenizer": "byte"}, folder)
    return folder


def test_finetune_resume_sample_and_export_a_pretrained_model(run, foreign, tmp_path):
    text, data, out = tmp_path / "text.txt", tmp_path / "data", tmp_path / "out"
    text.write_text("one two three four five\n" * 200)
    run("data/text/prepare.py", f"--input={text}", f"--tokenizer=hf:{foreign}", f"--out={data}")
    arguments = [*TINY, f"--dataset={data}", f"--out_dir={out}"]
    run("train.py", *arguments, f"--init_from={foreign}", "--max_iters=0")
    run("convert.py", f"--out_dir={out}", "--ckpt=ckpt.pt", f"--to={tmp_path / 'same'}")
    before = safetensors_torch.load_file(foreign / "model.safetensors")
    after = safetensors_torch.load_file(tmp_path / "same" / "model.safetensors")
    assert before.keys() == after.keys()
    drawn = json.loads((tmp_path / "same" / "generation_config.json").read_text())
    assert drawn["suppress_tokens"] == list(range(257, 264))  # as in sample.py
    for name in before:
        assert before[name].dtype == after[name].dtype == torch.bfloat16
        assert torch.equal(before[name], after[name]), name
    run("train.py", *arguments, f"--init_from={foreign}", "--max_iters=4")
    shown = run("train.py", *arguments, "--init_from=resume", "--max_iters=8")
    assert "finished at iteration 8" in shown
    shown = run("sample.py", f"--out_dir={out}", "--start=one", "--num_samples=1",
                "--max_new_tokens=5", "--device=cpu", "--ckpt=ckpt.pt")  # fmt: skip
    assert shown.startswith("one")


def test_a_data_set_of_another_tokenizer_is_refused_with_the_command(run, foreign, sums, tmp_path):
    with pytest.raises(ValueError, match=r"--input=FILES --tokenizer=hf:.*foreign --out"):
        run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}",
            f"--init_from={foreign}")  # fmt: skip


def test_without_a_tokenizer_a_note_says_that_it_was_not_compared(run, foreign, sums, tmp_path):
    (foreign / "tokenizer.json").unlink()
    shown = run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path / 'out'}",
                f"--init_from={foreign}", "--max_iters=0")  # fmt: skip
    assert f"note: {foreign} has no tokenizer.json" in shown


def test_a_trained_model_loads_in_transformers(run, sums, tmp_path):
    out = tmp_path / "out"
    run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={out}", "--qk_norm=True")
    run("convert.py", f"--out_dir={out}", f"--to={tmp_path / 'hf'}")
    saved = checkpoint.load(checkpoint.find(out))
    ours = GPT(GPTConfig(**saved["model_config"])).eval()
    ours.load_state_dict(saved["model"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokens = tokenizer("12+34=46\n", return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == from_meta(saved["tokenizer"]).encode("12+34=46\n")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, ours(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 300])
def test_attention_in_a_window_is_no_llama(monkeypatch, window):
    """Only the first 256 positions were compared."""

    def attend(q, k, v, is_causal, **more):
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        mask = mask.triu(1 - window) if window else mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)

    ours = SimpleNamespace(rms_norm=F.rms_norm, silu=F.silu, scaled_dot_product_attention=attend)
    monkeypatch.setattr(model_file, "F", ours)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=1024, vocab_size=65, n_layer=2, n_head=2, n_embd=32))
    for parameter in model.parameters():
        parameter.data *= 3.0 if parameter.dim() == 2 else 1.0  # as large as trained weights
    if not window:
        return convert.require_llama(model, 65, Path("ckpt.pt"))
    with pytest.raises(UserError, match="computes something other than a Llama"):
        convert.require_llama(model, 65, Path("ckpt.pt"))


def test_an_untied_head_is_not_exported_as_a_tied_one():
    model = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32))
    model.lm_head.weight = torch.nn.Parameter(torch.randn(65, 32))  # by an edit of model.py
    with pytest.raises(UserError, match="computes something other than a Llama"):
        convert.require_llama(model, 65, Path("ckpt.pt"))


def test_layers_of_different_widths_are_not_exported():
    model = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32))
    convert.require_llama(model, 65, Path("ckpt.pt"))
    mlp = model.blocks[1].mlp
    mlp.gate_proj, mlp.up_proj = torch.nn.Linear(32, 64, False), torch.nn.Linear(32, 64, False)
    mlp.down_proj = torch.nn.Linear(64, 32, False)
    with pytest.raises(UserError, match="computes something other than a Llama"):
        convert.require_llama(model, 65, Path("ckpt.pt"))


def test_shared_weights_and_extra_state_can_be_exported(run, sums, tmp_path):
    out = tmp_path / "out"
    run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={out}")
    saved = checkpoint.load(checkpoint.find(out))
    weights = saved["model"]
    weights["blocks.0.mlp.up_proj.weight"] = weights["blocks.0.mlp.gate_proj.weight"]
    weights["blocks.0.mlp._extra_state"] = {"calls": 3}
    convert.write_pretrained(saved, tmp_path / "hf", torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").model.layers[0].mlp
    for layer in (loaded.up_proj, loaded.gate_proj):
        assert torch.equal(layer.weight, weights["blocks.0.mlp.gate_proj.weight"])


def test_convert_says_what_is_missing(run, tmp_path):
    with pytest.raises(ValueError, match="--to='.udcff' is not UTF-8"):
        run("convert.py", f"--out_dir={tmp_path}", "--to=\udcff")
    with pytest.raises(ValueError, match="is the run's own folder: name another"):
        run("convert.py", f"--out_dir={tmp_path}", f"--to={tmp_path}/.")
    with pytest.raises(ValueError, match="pass --to=FOLDER"):
        run("convert.py", f"--out_dir={tmp_path}")
    with pytest.raises(ValueError, match="no checkpoint at"):
        run("convert.py", f"--out_dir={tmp_path}", f"--to={tmp_path / 'to'}")


def test_a_run_of_ones_own_is_finetuned_with_a_new_optimizer(run, sums, tmp_path):
    train = ["train.py", *TINY, f"--dataset={sums}"]
    run(*train, f"--out_dir={tmp_path / 'a'}", "--max_iters=3")
    before = checkpoint.load(tmp_path / "a" / "ckpt.pt")
    for source in ("a", "a/ckpt.pt"):
        shown = run(*train, f"--out_dir={tmp_path / 'b'}", f"--init_from={tmp_path / source}",
                    "--learning_rate=1e-12", "--min_lr=0", "--max_iters=1")  # fmt: skip
        assert "with a new optimizer; to resume that run, use --out_dir=" in shown
        after = checkpoint.load(tmp_path / "b" / "ckpt.pt", checkpoint.EVERYTHING)
        assert after["iter_num"] == 1 and after["sequences"] == before["sequences"] // 3
        for name, weight in after["model"].items():
            assert torch.allclose(weight, before["model"][name], atol=1e-6), name


def test_gpt2_is_of_another_architecture(run):
    """Said before the data set is looked for, and without the hub."""
    with pytest.raises(ValueError, match="init_from=gpt2-xl: GPT-2 has another architecture, with"):
        run("train.py", "--init_from=gpt2-xl", "--dataset=missing")


def test_a_window_without_effect_and_a_missing_head_size_are_as_in_transformers():
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64,
             "intermediate_size": 64, "max_position_embeddings": 16}  # fmt: skip
    for kind, window in (("llama", 16), ("mistral", 16), ("qwen3", 8)):
        found = convert.translated(sizes | {"model_type": kind, "sliding_window": window})
        assert found["head_dim"] == (128 if kind == "qwen3" else 16)
    long = {"model_type": "qwen3", "use_sliding_window": True, "max_position_embeddings": 8192}
    with pytest.raises(UserError, match="sliding_window 4096"):
        convert.translated(sizes | long)
