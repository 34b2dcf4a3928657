"""Export a run to Hugging Face's format, as a Llama or Qwen3. (train.py --init_from reads it too.)

    python train.py config/finetune_shakespeare.py --init_from=FOLDER_OR_HUB_ID
    python convert.py --out_dir=out-stdlib-char --to=exported

The first command loads Llama, SmolLM2, Mistral and Qwen3 (config.json and safetensors). An error
names features that this model lacks. The second writes a folder for transformers' AutoTokenizer and
AutoModelForCausalLM, which vLLM, llama.cpp's converter and the evaluation harness read too.
"""

import steady

if __name__ == "__main__":
    steady.start_script()  # before torch is imported

import itertools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from configurator import configure
from model import GPT, GPTConfig
from steady import UserError, checkpoint, distributed
from steady.checkpoint import Start
from steady.dataloader import DataSet
from steady.folder import atomic_write, naming, require_file
from steady.generate import logits_of, probe_tokens, same_logits
from steady.hardware import choose_dtype
from steady.tokenizer import (
    TEMPLATES,
    find_folder,
    from_meta,
    hf_tokenizer_meta,
    read_json,
    same_tokenizer,
    write_hf_tokenizer,
)

# checkpoint
out_dir = "out"  # folder of the checkpoint
ckpt = ""  # a file in out_dir; default: best.pt if there is one, else ckpt.pt
# output
to = ""  # required: folder to write to
dtype = "auto"  # float32, bfloat16, float16, or auto: the pretrained model's, else float32

NAMES = {  # theirs: ours
    "model.embed_tokens": "token_embedding",
    "model.norm": "final_norm",
    "lm_head": "lm_head",
    "model.layers": "blocks",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
OURS = {ours: theirs for theirs, ours in NAMES.items()}
WRITER = {"written_by": "steadyGPT"}  # in the metadata of exported weights


class Pretrained(NamedTuple):
    """A model read from a folder: GPTConfig's arguments, weights, tokenizer, and the metadata that
    an export keeps (the weights' dtype, and contents of files by name)."""

    model_config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokenizer: dict[str, Any]
    metadata: dict[str, Any]


def rename(name: str, names: dict[str, str]) -> str:
    """Replace the dot-separated parts of a parameter's name that are in `names`."""
    parts = "|".join(re.escape(part) for part in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![^.])({parts})(?![^.])", lambda found: names[found.group()], name)


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read GPTConfig's arguments from a config.json. UserErrors name unsupported features."""
    theirs = read_json(folder / "config.json")
    if not theirs:
        raise UserError(f"{folder} has no config.json")
    try:
        settings = translated(theirs)
        GPTConfig(**settings)  # checks their values
        return settings
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    except Exception as error:  # a field is missing or has the wrong type
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{folder / 'config.json'} is not that of a Llama, Mistral or Qwen3 ({reason})"
        ) from None


def translated(theirs: dict[str, Any]) -> dict[str, Any]:
    """Translate the content of a config.json to GPTConfig's arguments."""
    kind = theirs.get("model_type")
    # as in transformers, rope_scaling replaces rope_parameters
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    heads, longest = theirs.get("num_attention_heads"), theirs.get("max_position_embeddings", 2048)
    # transformers' generate uses a Llama's window, too
    window = theirs.get("sliding_window", None if kind == "llama" else 4096)
    unused = kind == "qwen3" and not theirs.get("use_sliding_window", False)
    if unused or window is not None and window >= longest:
        window = None
    unsupported = {
        f"model_type {kind}": kind not in ("llama", "mistral", "qwen3"),
        f"rope scaling {rope_type}": rope_type != "default",
        f"sliding_window {window}": window is not None,
        "is_causal": theirs.get("is_causal") is False,
        "attention_bias": theirs.get("attention_bias", False),
        "mlp_bias": theirs.get("mlp_bias", False),
        f"hidden_act {theirs.get('hidden_act')}": theirs.get("hidden_act", "silu")
        not in ("silu", "swish"),
        "quantization_config": theirs.get("quantization_config") is not None,
        "partial_rotary_factor": rope.get("partial_rotary_factor",
                                          theirs.get("partial_rotary_factor", 1.0)) != 1.0,
    }  # fmt: skip
    found = [name for name, present in unsupported.items() if present]
    if found:
        raise UserError(f"these settings are not supported: {', '.join(found)}; use another model")
    theta = rope.get("rope_theta", theirs.get("rope_theta", 10000.0))
    return {
        "block_size": longest,
        "vocab_size": theirs["vocab_size"],
        "n_layer": theirs["num_hidden_layers"],
        "n_head": heads,
        "n_kv_head": theirs.get("num_key_value_heads") or heads,
        "n_embd": theirs["hidden_size"],
        "n_hidden": theirs["intermediate_size"],
        "head_dim": theirs.get("head_dim", 128 if kind == "qwen3" else None)
        or theirs["hidden_size"] // heads,
        "rope_theta": float(theta),
        "norm_eps": theirs.get("rms_norm_eps", 1e-6),
        "qk_norm": kind == "qwen3",
        # if missing: transformers' default, which is False for all of these models
        "tied_embeddings": theirs.get("tie_word_embeddings", False),
    }


def read_pretrained(source: str) -> Pretrained:
    """Open a model of the Llama family from a folder or the hub. Weights are read from its files
    only when they are used.

    Raises UserError for anything that would make its numbers differ from the original's.
    """
    model_config = read_model_config(find_folder(source, ["*.json"]))  # small files first
    folder = find_folder(source, ["*.json", "*.jinja", f"{TEMPLATES}/*", "model*.safetensors"])
    from safetensors.torch import load_file

    # some repositories have a second copy (consolidated.safetensors) with other weight names
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        hint = ""
        if any([*folder.glob("*.bin"), *folder.glob("*.pth")]):
            hint = (
                ", only other formats: convert the model with python -c 'from transformers import "
                f'AutoModelForCausalLM as A; A.from_pretrained("{source}").save_pretrained('
                '"NEW_FOLDER")\', and copy the other files there'
            )
        raise UserError(f"{folder} has no *.safetensors file{hint}")
    listed = read_json(folder / "model.safetensors.index.json").get("weight_map", {})
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise UserError(f"{folder / 'model.safetensors.index.json'} has no valid weight_map")
    # read the same files as transformers: others may be older copies
    used = {"model.safetensors"} if folder / "model.safetensors" in files else {*listed.values()}
    if missing := sorted(used - {file.name for file in files}):
        raise UserError(f"{folder} lacks {', '.join(missing[:5])}: download the model again")
    files = [file for file in files if file.name in used] or files
    distributed.require_same_files(*files)
    tensors = {}
    for file in files:
        require_file(file)
        with naming(f"cannot read {file}", Exception):
            content = load_file(file)
        if not used and (twice := tensors.keys() & content.keys()):
            raise UserError(f"{folder}: {min(twice)} is in two files: delete all but the right one")
        tensors |= content
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{folder}: {name} ({kind}) is not floating point")
    weights = {
        rename(name, NAMES): tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if model_config["tied_embeddings"] and "token_embedding.weight" in weights:
        embedding = weights["token_embedding.weight"]
        head = weights.setdefault("lm_head.weight", embedding)
        if head is not embedding and not torch.equal(head, embedding):
            raise UserError(
                f"{folder}: lm_head.weight differs from the embedding, but its config.json has "
                "tie_word_embeddings: set it to false there if the model is not tied"
            )
    if model_config["n_layer"] > len(tensors):  # building them all takes minutes
        raise UserError(
            f"{folder}: its config.json has {model_config['n_layer']} layers, but there are only "
            f"{len(tensors)} weights"
        )
    with torch.device("meta"):
        expected = GPT(GPTConfig(**model_config))
    complaint = f"{folder} does not fit its config.json in"
    checkpoint.check_weights(weights, expected.state_dict(), complaint)
    names = ("generation_config", "tokenizer_config", "special_tokens_map")
    metadata = {name: read_json(folder / f"{name}.json") for name in names}
    theirs = read_json(folder / "config.json")
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    metadata["config"] = {key: theirs[key] for key in kept if key in theirs}
    with naming(f"{folder} has a chat template that is not UTF-8", UnicodeDecodeError):
        if (folder / "chat_template.jinja").is_file():
            metadata["chat_template"] = (folder / "chat_template.jinja").read_text("utf-8")
        named = [path for path in (folder / TEMPLATES).glob("*.jinja") if path.is_file()]
        if named:
            metadata[TEMPLATES] = {path.stem: path.read_text("utf-8") for path in named}
    dtype = next(iter(tensors.values())).dtype
    dtype = torch.bfloat16 if dtype.itemsize < 2 else dtype  # FP8 would round finetuned weights
    metadata["dtype"] = str(dtype).removeprefix("torch.")
    return Pretrained(model_config, weights, hf_tokenizer_meta(folder), metadata)


def read_run(source: Path) -> Pretrained:
    """Read the weights of a train.py run from its folder or from a checkpoint in it."""
    path = source if source.is_file() else checkpoint.find(source)
    saved = checkpoint.load(path)
    distributed.require_same_files(path)
    checkpoint.architecture(saved, GPTConfig, path)  # checks saved["model_config"]
    metadata = saved["pretrained"] or {"dtype": "float32"}
    if os.environ.get("RANK", "0") == "0":
        print(f"note: starting from {path} with a new optimizer; to resume that run, use "
              f"--out_dir={path.parent} --init_from=resume")  # fmt: skip
    return Pretrained(saved["model_config"], saved["model"], saved["tokenizer"], metadata)


def load_pretrained(source: str, data: DataSet, block_size: int, dropout: float) -> Start:
    """Prepare the start of a run that finetunes the model from `source` on `data`.

    Raises UserError if the model cannot be trained on this data.
    """
    run = Path(source)
    is_run = run.is_file() or (run / "ckpt.pt").is_file() and not (run / "config.json").is_file()
    pretrained = read_run(run) if is_run else read_pretrained(source)
    longest = pretrained.model_config["block_size"]
    if block_size > longest:
        raise UserError(
            f"block_size={block_size} is longer than {source}'s context: use "
            f"--block_size={longest} or less"
        )
    gpt2 = is_run and pretrained.model_config["vocab_size"] >= 50257  # trained on bare .bin files
    known = gpt2 or pretrained.tokenizer
    if known and not same_tokenizer(data.tokenizer, pretrained.tokenizer):
        kind = "run" if is_run else "hf"
        raise UserError(
            f"data set {data.folder.name} was not made with {source}'s tokenizer: make one with "
            f"python data/text/prepare.py --input=FILES --tokenizer={kind}:{source} --out=data/NAME"
        )
    if not known and os.environ.get("RANK", "0") == "0":
        print(f"note: {source} has no tokenizer.json: cannot check that {data.folder.name} was "
              "made with its tokenizer")  # fmt: skip
    model_config = pretrained.model_config | {"block_size": block_size, "dropout": dropout}
    return Start(model_config, pretrained.weights, pretrained.metadata, source=Path(source))


def holds_another_model(folder: Path) -> bool:
    """Whether `folder` has a model or tokenizer other than an earlier export."""
    from safetensors import SafetensorError, safe_open

    ours = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
            "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
            "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")  # fmt: skip
    if not any([*folder.glob("*.safetensors*"), *((folder / name).exists() for name in ours)]):
        return False
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            return not WRITER.items() <= (file.metadata() or {}).items()
    except (OSError, SafetensorError):
        return True


@torch.no_grad()
def require_llama(model: GPT, vocab_size: int, path: Path) -> None:
    """Raises UserError if an edited `model` computes something other than transformers' Llama or
    Qwen3 would with the same weights."""
    config = model.config
    T = min(config.block_size, 2048)
    tokens = probe_tokens(T, min(vocab_size, config.vocab_size))  # (T,)
    found = logits_of(model.eval(), tokens[None])[0]  # (T, V), or only the last (1, V)
    try:
        expected = llama_logits(model.state_dict(), config, tokens)[-len(found) :]
        same = same_logits(expected, found, 1e-3)
    except (KeyError, RuntimeError):  # it lacks a weight, or has one of another shape
        same = False
    if not same:
        raise UserError(
            f"{path} cannot be exported: its model.py computes something other than a Llama "
            "or Qwen3 does, so transformers' outputs would differ"
        )


def llama_logits(weights: dict[str, Tensor], config: GPTConfig, tokens: Tensor) -> Tensor:
    """The logits (T, V) that transformers' Llama or Qwen3 computes for `tokens` (T,). Does not use
    model.py, which may be edited."""
    D = config.head_dim
    rates = config.rope_theta ** (-torch.arange(0, D, 2) / D)
    turns = torch.polar(torch.ones(()), torch.arange(len(tokens))[:, None, None] * rates)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    def rotate(x: Tensor) -> Tensor:  # (T, heads, D)
        y = torch.complex(*x.chunk(2, dim=-1)) * turns
        return torch.cat((y.real, y.imag), dim=-1)

    x = weights["token_embedding.weight"][tokens]  # (T, C)
    for block in (f"blocks.{i}" for i in range(config.n_layer)):
        y, attention, mlp = norm(x, f"{block}.attention_norm"), f"{block}.attention", f"{block}.mlp"
        q, k, v = (linear(y, f"{attention}.{n}_proj").unflatten(-1, (-1, D)) for n in "qkv")
        if config.qk_norm:
            q, k = norm(q, f"{attention}.q_norm"), norm(k, f"{attention}.k_norm")
        q, k, v = (y.transpose(0, 1) for y in (rotate(q), rotate(k), v))  # (heads, T, D)
        k, v = (y.repeat_interleave(config.n_head // config.n_kv_head, dim=0) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(0, 1).flatten(1), f"{attention}.o_proj")
        y = norm(x, f"{block}.mlp_norm")
        y = F.silu(linear(y, f"{mlp}.gate_proj")) * linear(y, f"{mlp}.up_proj")
        x = x + linear(y.view(-1, config.n_hidden), f"{mlp}.down_proj")  # all of one width
    head = "token_embedding" if config.tied_embeddings else "lm_head"  # as the export says
    return linear(norm(x, "final_norm"), head)


def write_pretrained(saved: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint's model and tokenizer for transformers, as a Llama or (with QK-norm) as a
    Qwen3."""
    import tokenizers  # noqa: F401 (needed below)
    from safetensors.torch import save_file

    ours = GPTConfig(**saved["model_config"])
    kind = "Qwen3" if ours.qk_norm else "Llama"
    tokenizer = from_meta(saved["tokenizer"])
    metadata = saved.get("pretrained") or {}
    before = metadata.get("config", {})
    ids = {"bos_token_id": tokenizer.end_of_text} | before
    stops = tokenizer.stop_tokens  # exported samples end at the same tokens
    ids["eos_token_id"] = stops if len(stops) > 1 else stops[0] if stops else None
    if tokenizer.begin_of_text is not None:
        ids["bos_token_id"] = tokenizer.begin_of_text
    longest = max(ours.block_size, ids.pop("max_position_embeddings", 0))
    theirs = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.n_embd,
        "intermediate_size": ours.n_hidden,
        "num_hidden_layers": ours.n_layer,
        "num_attention_heads": ours.n_head,
        "num_key_value_heads": ours.n_kv_head,
        "head_dim": ours.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": longest,  # finetuning with a shorter context keeps it
        "rms_norm_eps": ours.norm_eps,
        "rope_theta": ours.rope_theta,  # read by transformers 4, llama.cpp and vLLM
        "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": ours.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | ids
    generation = {"bos_token_id": ids["bos_token_id"]} | metadata.get("generation_config", {})
    generation["eos_token_id"] = ids["eos_token_id"]
    if padding := [*range(tokenizer.vocab_size, ours.vocab_size)]:  # ids without text
        more = generation.get("suppress_tokens")
        more = [id for id in more if type(id) is int] if isinstance(more, list) else []
        generation["suppress_tokens"] = sorted({*padding, *more})
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--to={folder} is not a folder: name one")
    if holds_another_model(folder):
        raise UserError(
            f"--to={folder} holds another model or tokenizer: name another folder, or delete it"
        )
    weights = {
        rename(name, OURS): tensor.to(dtype).contiguous()
        for name, tensor in saved["model"].items()
        if isinstance(tensor, Tensor)  # a module may have extra state
        if not (ours.tied_embeddings and name == "lm_head.weight")
    }
    written: set[int] = set()
    for name, tensor in weights.items():  # safetensors refuses weights that blocks share
        address = tensor.untyped_storage().data_ptr()
        weights[name] = tensor.clone() if address in written else tensor
        written.add(address)
    beyond = f"values beyond the range of {theirs['torch_dtype']}: use --dtype=bfloat16"
    checkpoint.check_finite(weights, folder, problem=beyond)
    folder.mkdir(parents=True, exist_ok=True)
    # an earlier export in the folder is replaced only after all new files are complete
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as new:
        new = Path(new)
        try:
            save_file(weights, new / "model.safetensors", metadata={"format": "pt"} | WRITER)
        except Exception as error:  # safetensors raises its own if the disk is full
            reason = " ".join(str(error).split())
            raise UserError(f"cannot write the weights to {folder}: {reason}") from None
        for name, content in (("config", theirs), ("generation_config", generation)):
            with atomic_write(new / f"{name}.json") as file:
                file.write(json.dumps(content, indent=2).encode() + b"\n")
        written = write_hf_tokenizer(saved["tokenizer"], new, metadata)
        shutil.copymode(new / "config.json", new / "model.safetensors")  # else only you may read it
        for name in ("model.safetensors", "config.json", "generation_config.json", *written):
            (folder / name).parent.mkdir(exist_ok=True)
            (new / name).replace(folder / name)
    earlier = [folder / "special_tokens_map.json", folder / "chat_template.jinja",
               *folder.glob(f"{TEMPLATES}/*.jinja")]  # fmt: skip
    for path in earlier:  # of an earlier export, or your own
        if path.exists() and path.relative_to(folder).as_posix() not in written:
            names = (Path(f"{path}.old{i or ''}") for i in itertools.count())
            old = path.rename(next(name for name in names if not name.exists()))
            print(f"note: {path}, which this export lacks, is now {old.name}")


if __name__ == "__main__":
    configure(globals(), positional="")

    if not to:
        raise UserError("no folder to write to: pass --to=FOLDER")
    try:
        to.encode()
    except UnicodeEncodeError:
        raise UserError(f"--to={to!r} is not UTF-8, which safetensors requires") from None
    if Path(to).resolve() == Path(out_dir).resolve():
        raise UserError(f"--to={to} is the run's own folder: name another")
    path = checkpoint.find(Path(out_dir), ckpt)
    saved = checkpoint.load(path)
    tokenizer = checkpoint.tokenizer_of(saved, path)
    require_llama(checkpoint.build(GPT, GPTConfig, saved, path), tokenizer.vocab_size, path)
    if dtype == "auto":
        dtype = (saved.get("pretrained") or {}).get("dtype", "float32")
    write_pretrained(saved, Path(to), choose_dtype(dtype, torch.device("cpu")))
    print(f"wrote {to}: {path} in {dtype}, for transformers' AutoModelForCausalLM.from_pretrained")
