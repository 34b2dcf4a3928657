"""Time a training step on this CPU against a plain nanoGPT-style model of the same size.

    python dev/cpu_step.py

Both use the size and batch of `config/train_shakespeare_char_cpu.py` and train with AdamW. Ours is
in the dtype that train.py chooses, eager and compiled. The plain model is in float32 and has
LayerNorm, learned positions, one matmul for queries, keys and values, GELU, and the AdamW that
nanoGPT uses on a CPU. The variants take turns, and the figures are medians.
"""

import contextlib
import copy
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import steady

steady.start_script()

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configurator import configure, read_settings, resolve
from model import GPT, GPTConfig
from steady import compiling, hardware
from steady.optim import build_optimizer, clip_gradients

configure(globals(), positional="")
ROOT = Path(__file__).parents[1]
PLAIN_ENOUGH = ["--optimizer=adamw", "--qk_norm=False", "--n_head=4", "--learning_rate=1e-3"]
config = resolve(
    read_settings(ROOT / "train.py"),
    [str(ROOT / "config" / "train_shakespeare_char_cpu.py"), *PLAIN_ENOUGH],
)
BATCH, BLOCK, WIDTH = config["batch_size"], config["block_size"], config["n_embd"]
LAYERS, HEADS, VOCAB = config["n_layer"], config["n_head"], 128
ROUNDS, STEPS = 20, 8


class PlainBlock(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(BATCH, BLOCK, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(BATCH, BLOCK, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.position_embedding = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(PlainBlock(hidden) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(BLOCK))
        logits = self.norm(self.blocks(x)) @ self.token_embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ours: bool,
    autocast: contextlib.AbstractContextManager = contextlib.nullcontext(),  # noqa: B008
) -> None:
    with autocast:
        loss = model(*torch.randint(VOCAB, (2, BATCH, BLOCK)))
    loss.backward()
    if ours:
        clip_gradients(optimizer, config["grad_clip"])
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()


CPU = torch.device("cpu")


def set_up(dtype: torch.dtype | None) -> bool:
    """Set up torch as train.py does for `dtype`, or reset it to its defaults for None. Returns
    whether oneDNN runs the float32 matmuls."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_flash_sdp(True)
    return dtype is not None and hardware.use_onednn(CPU, dtype, WIDTH, BLOCK)


ours = GPT(GPTConfig.from_settings(config, VOCAB))
plain = Plain(1 + (count(ours) - count(Plain(1))) // (2 * WIDTH * LAYERS))
rate, decay = config["learning_rate"], config["weight_decay"]
betas = config["beta1"], config["beta2"]
own_adamw = torch.optim.AdamW(plain.parameters(), lr=rate, betas=betas, weight_decay=decay)
compiled = copy.deepcopy(ours)
with_compiler = compiling.plan(True, "default", CPU)
compiling.compile_model(compiled, with_compiler)
fused = [build_optimizer(model, config) for model in (ours, plain, compiled)]
chosen = hardware.choose_dtype("auto", CPU, WIDTH)
autocast = torch.autocast("cpu", chosen, enabled=chosen != torch.float32)
variants = {  # name: arguments of set_up() and step()
    "plain": (None, plain, own_adamw, False),
    "plain, fused AdamW": (None, plain, fused[1], False),
    "ours": (chosen, ours, fused[0], True, autocast),
}
if with_compiler.compiled:
    variants["ours, compiled"] = (chosen, compiled, fused[2], *variants["ours"][3:])
if chosen != torch.float32:
    variants["ours, float32"] = (torch.float32, ours, fused[0], True)
if set_up(torch.float32):
    variants["ours, float32, MKL"] = (None, ours, fused[0], True)
times: dict[str, list[float]] = {name: [] for name in variants}
for _ in range(ROUNDS):
    for name, (dtype, *arguments) in variants.items():
        set_up(dtype)
        step(*arguments)
        began = time.perf_counter()
        for _ in range(STEPS):
            step(*arguments)
        times[name].append((time.perf_counter() - began) / STEPS * 1e3)
print(f"{count(ours):,} and {count(plain):,} parameters, {torch.get_num_threads()} threads")
for name in variants:
    median = statistics.median(times[name])
    print(f"{name:22} {median:6.1f} ms   {median / statistics.median(times['plain']):.2f}")
