"""Print samples from a trained model.

    python sample.py --out_dir=out-stdlib-char --start="def " --num_samples=3
    python sample.py config/train_shakespeare_char.py

The config file of a training run says where its checkpoint is. Of its other settings only `seed`,
`device` and `dtype` have an effect.
"""

import steady

steady.start_script()  # before torch is imported

import math
import sys
import time
from itertools import takewhile
from pathlib import Path

import torch

from configurator import configure
from model import GPT, GPTConfig
from steady import UserError, checkpoint, hardware, visible
from steady.folder import naming, require_file
from steady.generate import generate, require_room
from steady.output import waiting
from steady.tokenizer import encode_prompt

# checkpoint
out_dir = "out"  # folder of the checkpoint
ckpt = ""  # a file in out_dir; default: best.pt if there is one, else ckpt.pt
# sampling
start = "\n"  # the prompt (default: a line break), or FILE:path to read it from
num_samples = 10  # samples to draw, as one batch
max_new_tokens = 500  # new tokens per sample
temperature = 0.8  # 1: the model's probabilities; lower: less random; 0: always the likeliest
top_k = 200  # sample from the k likeliest tokens; 0: from all
top_p = 1.0  # sample from the likeliest tokens with this total probability; 1: from all
stop_at_end = True  # end a sample at an end-of-text token; False: continue
seed = 1337  # for drawing the samples
# system
device = "auto"  # auto, cpu, cuda, cuda:N, mps
dtype = "auto"  # auto, float32, bfloat16, float16

configure(globals(), ignored="train.py")

device = hardware.choose_device(device)
asked, dtype = dtype, hardware.choose_dtype(dtype, device)

path = checkpoint.find(Path(out_dir), ckpt)
saved = checkpoint.load(path)
model = checkpoint.build(GPT, GPTConfig, saved, path)
dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
mixed = len(dtypes) > 1 and asked != "float32"  # by your edit
autocast = torch.autocast(device.type, dtype if dtype != torch.float32 else torch.bfloat16,
                          enabled=mixed, cache_enabled=False)  # fmt: skip
# model.to(device, dtype) would drop the imaginary part of complex buffers
model._apply(lambda t: t.to(device, dtype if t.is_floating_point() and not mixed else t.dtype))
model.eval()
width = getattr(model.config, "n_embd", 0)  # you may have renamed it
hardware.use_onednn(device, dtype, width, model.config.block_size)
tokenizer = checkpoint.tokenizer_of(saved, path)

if start.startswith("FILE:"):
    file = Path(start.removeprefix("FILE:")).expanduser()
    require_file(file)
    with naming(f"cannot read --start={start}", OSError, UnicodeDecodeError):
        start = file.read_bytes().decode("utf-8-sig")
if start == "\n" and start not in getattr(tokenizer, "alphabet", start):  # the default
    start = "" if tokenizer.end_of_text is not None else tokenizer.alphabet[0]
if any("\ud800" <= character <= "\udfff" for character in start):  # invalid bytes from the shell
    raise UserError(f"--start={start!r} is not UTF-8")
with naming("--start"):
    prompt = encode_prompt(tokenizer, start)
    if max(prompt, default=0) >= model.config.vocab_size:
        raise UserError(f"token {max(prompt)} is not among the model's {model.config.vocab_size}")
if len(prompt) > model.config.block_size:
    print(f"note: the model only sees the last {model.config.block_size} of the prompt's "
          f"{len(prompt)} tokens", file=sys.stderr)  # fmt: skip
require_room(model.config, num_samples, len(prompt), max_new_tokens, dtype, device)
tokens = torch.tensor([prompt] * num_samples, device=device)
generator = torch.Generator(device=device).manual_seed(seed)

stops = tokenizer.stop_tokens if stop_at_end else []
ends = torch.tensor(stops, dtype=torch.long, device=device)
ended = torch.zeros(num_samples, dtype=torch.bool, device=device)
printed, ids = "", []
show = visible if sys.stdout.isatty() else str  # escape control characters on a terminal
prompt_length = len(tokenizer.decode(prompt))  # in characters; may differ from len(start)


def text_of(ids: list[int]) -> str:
    """The text of the prompt and the new tokens `ids`, up to the first stop token."""
    ids = list(takewhile(lambda id: id not in stops, ids))
    # decode both together: some tokenizers drop a space at the start of a text
    return start + tokenizer.decode(prompt + ids)[prompt_length:]


def stream(new: torch.Tensor) -> bool:
    """If there is one sample, print its new text, but wait for incomplete characters.

    new: (num_samples,). Returns whether all samples have ended.
    """
    global printed
    next(progress, None)
    if num_samples == 1:
        ids.append(new.item())
        text = text_of(ids)
        if not text.endswith("\ufffd") and text.startswith(printed):
            print(show(text[len(printed) :]), end="", flush=True)
            printed = text
    if not len(ends):
        return False
    ended.logical_or_(torch.isin(new, ends))
    return bool(ended.all())


best = "val loss" if path.name == "best.pt" else "best val loss so far"
evaluated = math.isfinite(saved["best_val_loss"])
print(f"# loaded {path}: {model.num_params():,} parameters, iteration {saved['iter_num']}, "
      + (f"{best} {saved['best_val_loss']:.4f}" if evaluated else "not evaluated yet"),
      file=sys.stderr)  # fmt: skip
progress = iter(waiting(range(max_new_tokens), max_new_tokens, "sampling", num_samples == 1))
began = time.perf_counter()
with autocast:
    samples = generate(
        model, tokens, max_new_tokens, temperature, top_k, top_p,
        vocab_size=tokenizer.vocab_size, generator=generator,
        on_token=stream, cuda_graph=device.type == "cuda",
    )  # fmt: skip
seconds = max(time.perf_counter() - began, 1e-9)
list(progress)  # ends the bar
if num_samples == 1:
    text = text_of(ids)
    changed = "" if text.startswith(printed) else "\n"  # a decoder may replace text
    print(changed + show(text.removeprefix(printed)))
else:
    for sample in samples[:, len(prompt) :].tolist():
        print(show(text_of(sample)))
        print("---------------")
drawn = num_samples * (samples.shape[1] - len(prompt))
print(f"# {drawn / seconds:,.0f} tokens/s", file=sys.stderr)
