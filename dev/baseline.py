"""Train a plain GPT-2 as nanoGPT would: what dev/time_to_loss.py compares train.py with.

LayerNorm and linear layers without biases, GELU, learned positions, tied embeddings, flash
attention, the loss of all logits at once, the whole model compiled, fused AdamW, a cosine. The
tokens, their order, the validation windows and the clock are train.py's, and so is metrics.jsonl.

B batch, T tokens of a sequence, C width.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import steady

steady.start_script()

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configurator import configure
from steady import distributed, hardware
from steady.dataloader import DataLoader, DataSet, eval_batches
from steady.runlog import RunLog

# data and output
out_dir = "out-baseline"  # folder of metrics.jsonl
dataset = ""  # a folder
batch_size = 32  # sequences in a micro-batch
gradient_accumulation_steps = 2  # micro-batches in an iteration
block_size = 1024  # tokens in a sequence
eval_interval = 100  # iterations between evaluations
eval_iters = 8  # batches per evaluation
seed = 1337  # of the initial weights and the data order
# model
n_layer = 12  # blocks
n_head = 12  # heads
n_embd = 768  # width
# training
learning_rate = 1.2e-3  # peak; the cosine ends at a tenth of it
warmup_iters = 100  # iterations of linear warm-up
max_iters = 1000  # iterations to train for
# system
device = "auto"  # auto, cpu, cuda
compile = True  # torch.compile the model

config = configure(globals(), positional="")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(n_embd, bias=False) for _ in range(2))
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, n_head, C // n_head).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocab_size: int):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, n_embd)
        self.position_embedding = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                into_residual = name.endswith(("proj.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * n_layer) if into_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of (B, T) tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate() -> float:
    total = torch.zeros((), device=process.device)
    n_sequences = eval_iters * batch_size  # whole batches, as F.cross_entropy needs here
    for tokens, targets, share in eval_batches(val_file, batch_size, n_sequences, process):
        with autocast:
            total += share * model(tokens, targets)
    return total.item()


def learning_rate_at(step: int) -> float:
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    share = (step - warmup_iters) / max(1, max_iters - warmup_iters)
    return learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


process = distributed.this_process(device=device, dtype="auto")
autocast = process.autocast()
torch.set_float32_matmul_precision("high")
torch.manual_seed(seed)
data = DataSet(dataset)
train_file, val_file = data.open(block_size, data.padded_vocab_size)
loader = DataLoader(train_file, batch_size, gradient_accumulation_steps, seed, process)
raw_model = PlainGPT(data.padded_vocab_size).to(process.device)
model = torch.compile(raw_model) if compile else raw_model
parameters = list(model.parameters())
groups = [
    {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)

Path(out_dir).mkdir(parents=True, exist_ok=True)
log = RunLog(Path(out_dir), config | {"eval_only": False, "wandb_log": False}, 0)
log.line(f"plain GPT-2, {sum(p.numel() for p in parameters):,} parameters")
log.start_clock(0, batch_size * gradient_accumulation_steps * block_size, 0, process)
micro_batches = loader.micro_batches(0)
tokens, targets = next(micro_batches)
for step in range(max_iters + 1):
    if step % eval_interval == 0 or step == max_iters:
        if process.device.type == "cuda":
            torch.cuda.synchronize()
        log.write({"iter": step, "val_loss": evaluate()})
        log.restart_clock(step)
    if step == max_iters:
        break
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step)
    total = torch.zeros((), device=process.device)
    for _ in range(gradient_accumulation_steps):
        with autocast:
            loss = model(tokens, targets) / gradient_accumulation_steps
        loss.backward()
        total += loss.detach()
        tokens, targets = next(micro_batches)
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    read_numbers = hardware.to_host_async(total, norm)  # as train.py: the device never waits for us
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss_now, norm_now = read_numbers()
    log.step(step, loss_now, learning_rate_at(step), norm_now)
log.close()
