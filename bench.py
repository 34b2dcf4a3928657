"""Time training steps: run the real train.py on random tokens and read its metrics.

    python bench.py config/train_gpt2.py --batch_size=32 --gradient_accumulation_steps=1
    python bench.py config/train_gpt2.py --gradient_accumulation_steps=16 --processes=4

Prints the median over the measured steps, their spread ((max - min) / median), MFU if the device's
peak is known, and peak memory. It does not evaluate or save. The vocabulary size is the data set's
if that is prepared, else GPT-2's.
"""

import steady

steady.start_script()  # before torch is imported

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from configurator import configure
from steady import UserError
from steady.dataloader import dataset_folder, read_meta
from steady.runlog import read_metrics
from steady.stop import on_signals

# measurement
steps = 12  # steps to measure
warmup_steps = 4  # steps to run before that
processes = 1  # number of GPUs, one process each

config = configure(globals(), base="train.py")
if "TORCHELASTIC_RUN_ID" in os.environ:
    raise UserError("bench.py starts the processes: use --processes=N instead of torchrun")

# like Ctrl-C, so that train.py is killed too
on_signals(("SIGTERM", "SIGHUP"), signal.default_int_handler)

with tempfile.TemporaryDirectory() as folder:
    data_dir = dataset_folder(config["dataset"])
    meta = read_meta(data_dir) if (data_dir / "train.bin").exists() else {}
    vocab_size = config["vocab_size"] or meta.get("vocab_size", 50304)
    # sampled_softmax needs room for tokens that are not targets
    different = min(vocab_size, config.get("sampled_softmax", 0) // 2 or vocab_size)
    tokens = np.random.default_rng(0).integers(0, different, 2**22 + config["block_size"])
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    for split in ("train", "val"):
        tokens.astype(dtype).tofile(Path(folder, f"{split}.bin"))
    Path(folder, "meta.json").write_text(
        f'{{"vocab_size": {vocab_size}, "dtype": "{dtype}"}}', encoding="utf-8"
    )
    print(f"timing {steps} steps of train.py after {warmup_steps}", file=sys.stderr)
    own = ("--steps", "--warmup_steps", "--processes")
    command = [sys.executable, str(Path(__file__).parent / "train.py")]
    command += [argument for argument in sys.argv[1:] if argument.partition("=")[0] not in own]
    command += [f"--dataset={folder}", f"--out_dir={folder}", "--init_from=scratch"]
    command += ["--eval_interval=0", "--eval_only=False", "--log_interval=1", "--wandb_log=False"]
    command += [f"--max_iters={1000 * (warmup_steps + steps)}"]  # a limit, if this script is killed
    metrics, output = Path(folder, "metrics.jsonl"), Path(folder, "output.txt")
    began = time.perf_counter()
    with socket.create_server(("127.0.0.1", 0)) as found:  # a free port for torch.distributed
        port = found.getsockname()[1]
    running = []
    with open(output, "w", encoding="utf-8") as file:
        try:
            for rank in range(processes):
                variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environ = os.environ | {name: str(value) for name, value in variables.items()}
                running.append(
                    subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ)
                )
            entries, first_step = [], None
            while len(entries) < warmup_steps + steps and running[0].poll() is None:
                time.sleep(0.2)
                entries = read_metrics(metrics)
                if entries and first_step is None:
                    first_step = time.perf_counter() - began
        finally:  # no torchrun above: killing it would leave its processes running
            for process in running:
                process.kill()
                process.wait()
    lines = output.read_text(encoding="utf-8").splitlines()
    if len(entries) < warmup_steps + steps:
        print("\n".join(lines[-20:]), file=sys.stderr)
        raise UserError(
            f"train.py ended after {len(entries)} of {warmup_steps + steps} steps, see above"
        )

print("\n".join(line for i, line in enumerate(lines) if i < 2 or "going on with" in line))
measured = entries[warmup_steps : warmup_steps + steps]
ms = [entry["ms"] for entry in measured]
median = statistics.median(ms)
print(f"tokens/s    {statistics.median(entry['tokens_per_s'] for entry in measured):12,.0f}")
print(f"ms per step {median:12.2f}")
print(f"spread      {(max(ms) - min(ms)) / median:12.1%}")
if measured[-1]["mfu"] is not None:
    print(f"mfu         {statistics.median(entry['mfu'] for entry in measured):12.1%}")
if measured[-1]["memory_gib"] is not None:
    print(f"peak memory {measured[-1]['memory_gib']:12.2f} GiB")
print(f"first step  {first_step:12.1f} s after the start")
