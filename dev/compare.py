"""Time a training step of several checkouts of this project against each other.

    git worktree add ../before HEAD~1
    python dev/compare.py config/train_gpt2.py --folders=../before,. --batch_size=32

Clocks, power and neighbours change a GPU's speed by more than most changes to the code do. So the
checkouts' models (model.py and what it imports) share weights and optimizer in one process and take
turns, and what is printed is the mean of their differences, with its standard error. Where a
checkout has functions that the first lacks, it takes --compile=False: torch's compiler looks for
them there.
"""

import importlib
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))
from steady import hardware
from steady.optim import build_optimizer, clip_in_step, set_schedule

import torch

from configurator import configure

# comparison
folders = "."  # checkouts, separated by commas; the others are compared with the first
rounds = 12  # turns of each
steps = 3  # steps in a turn

config = configure(globals(), base=Path(__file__).parents[1] / "train.py")
device = hardware.choose_device(config["device"])
dtype = hardware.choose_dtype(config["dtype"], device)
names = folders.split(",")
if rounds < 2 or steps < 1:
    raise ValueError(f"rounds={rounds} must be at least 2, steps={steps} at least 1")


def import_model(folder: str) -> tuple[ModuleType, ModuleType]:
    """The checkout's model.py, with all that it imports from its own steady/; and its
    steady/recompute.py."""
    if not Path(folder, "model.py").is_file():
        raise ValueError(f"--folders: there is no {Path(folder, 'model.py')}")
    for name in list(sys.modules):
        if name == "model" or name.partition(".")[0] == "steady":
            del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("model"), importlib.import_module("steady.recompute")
    finally:
        sys.path.remove(folder)


def step(model: torch.nn.Module) -> float:
    torch.compiler.cudagraph_mark_step_begin()
    with hardware.autocast(device, dtype):
        loss = model(tokens, targets)
    loss.backward()
    grad_norm = clip_in_step(optimizer, config["grad_clip"])
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm.item()


hardware.prepare(device, dtype, config["n_embd"], config["block_size"])
vocab_size = config["vocab_size"] or 50304
shape = config["batch_size"], config["block_size"]
tokens, targets = (torch.randint(vocab_size, shape, device=device) for _ in range(2))
first, models, peaks = None, [], []
for name in names:
    module, recompute = import_model(name)
    settings = module.GPTConfig.from_settings(config, vocab_size)
    model = module.GPT(settings).to(device)
    model.use_cudnn_attention(hardware.cudnn_attention(device, dtype, settings.head_dim))
    recompute.use_activation_checkpointing(model, config["activation_checkpointing"])
    if first is None:
        first = model
        still = config | {"learning_rate": 0.0}
        optimizer = build_optimizer(first, still, config["compile"], dtype)
        set_schedule(optimizer, 0, still)  # Muon's momentum
    # its very parameters, not copies: the optimizer has them
    model.load_state_dict(first.state_dict(keep_vars=True), assign=True)
    if config["compile"]:
        model = torch.compile(model, mode=config["compile_mode"], dynamic=False)
    step(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step(model)
    models.append(model)
    peaks.append(hardware.peak_memory_gib(device))

times: list[list[float]] = [[] for _ in names]
for i in range(rounds):
    for which in range(len(names)) if i % 2 == 0 else reversed(range(len(names))):
        step(models[which])
        began = time.perf_counter()
        for _ in range(steps):
            step(models[which])
        times[which].append((time.perf_counter() - began) / steps * 1e3)

width = max(map(len, names))
print(f"{'':{width}}    median ms   difference (standard error)")
for name, own, peak in zip(names, times, peaks, strict=True):
    differences = [a - b for a, b in zip(own, times[0], strict=True)]
    error = statistics.stdev(differences) / rounds**0.5
    shown = f"{statistics.mean(differences):+10.2f} ({error:.2f})" if name != names[0] else ""
    memory = f"   {peak:.2f} GiB" if peak is not None else ""
    print(f"{name:{width}}   {statistics.median(own):10.2f}   {shown:20}{memory}".rstrip())
