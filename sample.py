"""Print samples from a trained model.

python sample.py --out_dir=out-stdlib-char --start="def " --num_samples=3
"""

import sys
import time
from pathlib import Path

from steady import checkpoint, hardware
from steady.generate import generate, require_room
from steady.tokenizer import from_meta

import torch

from configurator import configure
from model import GPT, GPTConfig

# what to sample from
out_dir = "out"  # folder of the checkpoint
ckpt = ""  # a file in out_dir; default: best.pt if there is one, else ckpt.pt
# what to sample
start = "\n"  # the prompt, or FILE:path to read it from
num_samples = 10  # samples, decoded together
max_new_tokens = 500  # tokens in each sample
temperature = 0.8  # 1: the model's own probabilities, lower: bolder choices, 0: the likeliest
top_k = 200  # only the k likeliest tokens; 0: all
top_p = 1.0  # only the likeliest tokens that together have this probability; 1: all
seed = 1337  # of the draws
# system
device = "auto"  # auto, cpu, cuda, cuda:N, mps
dtype = "auto"  # auto, float32, bfloat16, float16

configure(globals())

device = hardware.choose_device(device)
dtype = hardware.choose_dtype(dtype, device)

path = checkpoint.find(Path(out_dir), ckpt)
saved = checkpoint.load(path)
model = GPT(GPTConfig(**saved["model_config"]))
model.load_state_dict(saved["model"])
model = model.to(device, dtype).eval()
hardware.use_onednn(device, dtype, model.config.n_embd, model.config.block_size)
tokenizer = from_meta(saved["tokenizer"])

if start.startswith("FILE:"):
    try:
        start = Path(start.removeprefix("FILE:")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --start={start}: {error}") from None
prompt = tokenizer.encode(start)
if not prompt:
    if tokenizer.end_of_text is None:
        raise ValueError("--start is empty: give the model at least one character to go on from")
    prompt = [tokenizer.end_of_text]
require_room(model.config, num_samples, len(prompt), max_new_tokens, dtype, device)
tokens = torch.tensor([prompt] * num_samples, device=device)
generator = torch.Generator(device=device).manual_seed(seed)

printed, ids = start, []


def stream(new: torch.Tensor) -> None:
    """Print what a single sample's new token adds, characters of several tokens when complete."""
    global printed
    ids.append(new.item())
    text = start + tokenizer.decode(ids)
    if not text.endswith("\ufffd"):
        print(text[len(printed) :], end="", flush=True)
        printed = text


print(f"# {path}, iteration {saved['iter_num']}, val loss {saved['best_val_loss']:.4f}",
      file=sys.stderr)  # fmt: skip
if num_samples == 1:
    print(start, end="", flush=True)
began = time.perf_counter()
samples = generate(
    model, tokens, max_new_tokens, temperature, top_k, top_p,
    vocab_size=tokenizer.vocab_size, generator=generator,
    on_token=stream if num_samples == 1 else None, cuda_graph=device.type == "cuda",
).tolist()  # fmt: skip
seconds = time.perf_counter() - began
if num_samples == 1:
    print((start + tokenizer.decode(ids))[len(printed) :])
else:
    for sample in samples:
        print(start + tokenizer.decode(sample[len(prompt) :]))
        print("---------------")
print(f"# {num_samples * max_new_tokens / seconds:,.0f} tokens/s", file=sys.stderr)
