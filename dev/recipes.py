"""Try training recipes against each other in one process: what each setting is worth.

    python dev/recipes.py --data=FOLDER --recipes="lr=7e-3; lr=7e-3 zero_init=1; lr=5e-3 sequences=32"

Every recipe starts from the same weights and sees the same data; the compiled model is used again, so
that a recipe costs its steps only. Prints tokens, seconds of steps and validation loss of each.
"""

import json
import lzma
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from steady import hardware, optim
from steady.dataloader import DataLoader, DataSet, validation_batches

import torch

from configurator import configure
from model import GPT, GPTConfig

# what is compared
data = ""  # folder with train.bin (or train.bin.xz), val.bin and meta.json
recipes = ""  # each some key=value of DEFAULTS, separated by ";"
base = ""  # key=value that all recipes share
seeds = "1337"  # of weights and data order, separated by commas
out = ""  # file that one JSON line per run is added to
device = "auto"  # auto, cpu, cuda
compile = True  # torch.compile the model

configure(globals(), positional="")
DEFAULTS = {
    "n_layer": 12, "n_head": 12, "n_kv_head": 0, "n_embd": 768, "block_size": 1024, "qk_norm": 0,
    "tied_embeddings": 1, "micro_batch": 32, "sequences": 64, "tokens": 16.8e6,
    "optimizer": "muon", "learning_rate": 7e-3, "adamw_lr_scale": 0.5, "weight_decay": 0.1,
    "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "warmup": 0.0, "decay": 0.4, "shape": "linear",
    "zero_init": 0, "cautious": 0, "normuon": 0, "momentum": 0.95, "momentum_steps": 300,
    "embedding_std": 0.02,
}  # fmt: skip
SHORT = {"lr": "learning_rate", "scale": "adamw_lr_scale", "zero": "zero_init", "qk": "qk_norm"}


class Variant(optim.Muon):
    """Muon with what is being tried."""

    recipe: dict

    def step_together(self, parameters, group):
        r = self.recipe
        if not (r["cautious"] or r["normuon"]):
            return super().step_together(parameters, group)
        weights, buffers = parameters, [self.state[p]["momentum_buffer"] for p in parameters]
        gradient = torch.stack([p.grad for p in parameters]).div_(self.grad_scale)
        buffer = torch.stack(buffers).lerp_(gradient, 1 - group["momentum"])
        torch._foreach_copy_(buffers, buffer.unbind())
        update = optim.orthogonalise_together(
            gradient.lerp_(buffer, group["momentum"]), row_shards=False
        ).float()
        if r["normuon"]:
            norm = update.norm(dim=(1, 2), keepdim=True)
            state = self.state[parameters[0]].setdefault("rows", torch.zeros_like(update[..., :1]))
            state.lerp_(update.square().mean(dim=2, keepdim=True), 0.05)
            update = update * state.add(1e-10).rsqrt()
            update = update * (norm / update.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7))
        size = optim.ADAMW_RMS * max(parameters[0].shape) ** 0.5
        decay = group["lr"] * group["weight_decay"]
        if r["cautious"]:
            stacked = torch.stack([p.data for p in weights])
            update = update * (group["lr"] * size) + decay * stacked * (update * stacked > 0)
        else:
            torch._foreach_mul_([p.data for p in weights], 1 - decay)
            update = update * (group["lr"] * size)
        torch._foreach_sub_([p.data for p in weights], update.unbind())


def parse(text: str) -> dict:
    recipe = dict(DEFAULTS)
    for pair in text.split():
        key, _, value = pair.partition("=")
        key = SHORT.get(key, key)
        recipe[key] = type(DEFAULTS[key])(value) if key != "sequences" else int(value)
    return recipe


models: dict = {}


def model_for(r: dict, vocab: int) -> tuple:
    keys = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size", "qk_norm", "tied_embeddings")
    key = tuple(r[k] for k in keys)
    if key not in models:
        config = GPTConfig(**{k: r[k] for k in keys} | {"vocab_size": vocab})
        raw = GPT(config).to(device)
        raw.use_cudnn_attention(hardware.cudnn_attention(device, dtype, config.head_dim))
        models[key] = raw, torch.compile(raw, dynamic=False) if compile else raw
    return models[key]


def lr_at(step: int, steps: int, r: dict) -> float:
    warm = r["warmup"] * steps
    if step < warm:
        return (step + 1) / (warm + 1)
    start = steps * (1 - r["decay"])
    share = max(0.0, (step - start) / (steps - start)) if steps > start else 0.0
    return 1 - share if r["shape"] == "linear" else 1 - share**0.5


def run(r: dict, seed: int) -> tuple[float, float, int]:
    torch.manual_seed(seed)
    raw, model = model_for(r, vocab)
    with torch.no_grad():
        raw.apply(raw.init_weights)
        for name, p in raw.named_parameters():
            if p.dim() < 2:
                p.fill_(1.0)
            if r["zero_init"] and name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
        raw.token_embedding.weight.mul_(r["embedding_std"] / 0.02)
    config = r | {"min_lr": 0.0, "warmup_iters": 0, "lr_decay_iters": 0, "decay_lr": False}
    optim.MUON_MOMENTUM = 0.85, r["momentum"], r["momentum_steps"]
    optim.Muon = Variant
    optimizer = optim.build_optimizer(raw, config)
    optimizer.recipe = r
    accumulation = r["sequences"] // r["micro_batch"]
    steps = round(r["tokens"] / r["sequences"] / r["block_size"])
    loader = DataLoader(train_file, r["micro_batch"], accumulation, seed, device)
    batches = loader.micro_batches(0)
    began = done = 0
    model.train()
    for step in range(steps):
        if step == 3:
            synchronize()
            began = time.perf_counter()
        lr = lr_at(step, steps, r) * r["learning_rate"]
        optim.set_schedule(optimizer, step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        for _ in range(accumulation):
            tokens, targets = next(batches)
            with autocast:
                loss = model(tokens, targets) / accumulation
            loss.backward()
        optim.clip_in_step(optimizer, r["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
    synchronize()
    seconds = (time.perf_counter() - began) * steps / (steps - 3)
    model.eval()
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for tokens, targets in validation_batches(val_file, r["micro_batch"], 512, device):
            with autocast:
                total += model(tokens, targets)
            done += 1
    loader.reader.shutdown(wait=False, cancel_futures=True)
    return total.item() / done, seconds, steps * r["sequences"] * r["block_size"]


def synchronize() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


device = hardware.choose_device(device)
dtype = hardware.choose_dtype("auto", device)
autocast = hardware.autocast(device, dtype)
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(data).resolve()
    if (folder / "train.bin.xz").exists():
        for name in ("val.bin", "meta.json"):
            shutil.copy(folder / name, temporary)
        with (
            lzma.open(folder / "train.bin.xz") as packed,
            open(f"{temporary}/train.bin", "wb") as f,
        ):
            shutil.copyfileobj(packed, f)
        folder = Path(temporary)
    corpus = DataSet(folder)
    vocab = corpus.padded_vocab_size
    train_file, val_file = corpus.open(parse(base)["block_size"], vocab)
    hardware.prepare(device, dtype, 768, 1024)
    for text in recipes.split(";"):
        for seed in map(int, seeds.split(",")):
            r = parse(f"{base} {text}")
            loss, seconds, tokens = run(r, seed)
            print(f"{loss:.4f}  {seconds:6.1f} s  {tokens / 1e6:5.1f}M  {seed}  {text.strip()}",
                  flush=True)  # fmt: skip
            if out:
                with open(out, "a") as file:
                    changed = {k: v for k, v in r.items() if v != DEFAULTS[k]}
                    file.write(json.dumps({"recipe": changed, "seed": seed, "loss": loss,
                                           "seconds": seconds, "tokens": tokens}) + "\n")  # fmt: skip
