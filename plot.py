"""Plot the loss, learning rate and throughput of one or more runs.

python plot.py out-stdlib-char
python plot.py out-* --x=time --png=comparison.png
python plot.py out-gpt2 out-bpe --y=bpb
python plot.py dev/runs/peers_67m.jsonl --x=time

A run is a folder with metrics.jsonl, or a line in a file from dev/peers.py, which only has
evaluations.
"""

import steady

steady.start_script()

import itertools
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from configurator import configure
from steady import UserError
from steady.folder import atomic_write, naming
from steady.runlog import read_json_lines, read_metrics, training_clock

# the plot
png = "runs.png"  # file to write
x = "iter"  # horizontal axis: iter, tokens, or time (training steps only)
y = "loss"  # vertical axis: loss, bpb (bits per byte), or another number in metrics.jsonl
reference = 0.0  # draw a line at this loss, such as that of token frequencies; 0: none
smooth = 0.05  # average the training loss over this fraction of a run; 0: no smoothing

paths = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
sys.argv = [sys.argv[0], *(argument for argument in sys.argv[1:] if argument.startswith("-"))]
configure(globals(), positional="OUT_DIR", choices={"x": ("iter", "tokens", "time")})
png += "" if Path(png).suffix else ".png"

if not paths:
    raise UserError("no runs given: use python plot.py OUT_DIR [OUT_DIR ...]")
os.environ["MPLBACKEND"] = "Agg"
import matplotlib

matplotlib.rcParams["text.parse_math"] = False  # a run's name may contain a dollar sign
from matplotlib import pyplot


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Read the runs at `path`: name, log lines of steps, evaluations, and x by iteration."""
    file = path / "metrics.jsonl" if not path.is_file() else path
    entries = read_json_lines(file)
    if entries and all("curve" in entry for entry in entries):
        if y != "loss":
            raise UserError(f"{file} has only validation losses: use --y=loss")
        curves = [e["curve"] for e in entries]
        whole = all(isinstance(curve, list) and curve and all(
            isinstance(point, dict) and are_numbers(point, "iter", "val_loss", "seconds", "tokens")
            for point in curve) for curve in curves)  # fmt: skip
        if not whole or not all({"recipe", "kind"} <= e.keys() for e in entries):
            raise UserError(f"{file} has no valid curves from dev/peers.py")
        return [
            {"name": f"{e['recipe']}", "steps": [], "evaluations": e["curve"],
             "x": {point["iter"]: point["seconds" if x == "time" else x] for point in e["curve"]},
             "peer": e["kind"] != "ours"}
            for e in entries
        ]  # fmt: skip
    entries = read_metrics(file)
    steps = [e for e in entries if are_numbers(e, "loss", "lr", "tokens_per_s", "ms")]
    evaluations = [e for e in entries if are_numbers(e, value)]
    if not steps and not evaluations:
        print(f"note: {file} has nothing to draw" if file.exists() else f"note: there is no {file}")
        return []
    seconds, tokens = training_clock(steps + evaluations)
    positions = {"iter": range(len(seconds)), "tokens": tokens, "time": seconds}[x]
    return [{"name": names[path], "steps": steps, "evaluations": evaluations, "x": positions,
             "peer": False}]  # fmt: skip


def shortest_names(paths: list[Path]) -> dict[Path, str]:
    """Map each path to its shortest suffix that differs from those of the other paths."""
    folders = {p: (p if p.is_dir() else p.parent if p.is_file() else p).resolve() for p in paths}
    names = {}
    for path, folder in folders.items():
        others = {other.parts for other in folders.values() if other != folder}
        n = 1
        while n < len(folder.parts) and any(o[-n:] == folder.parts[-n:] for o in others):
            n += 1
        names[path] = os.path.join(*folder.parts[-n:])
    return names


def are_numbers(entry: dict[str, Any], *names: str) -> bool:
    """Whether `entry` has a number for all of `names`. (Values that are not finite are null.)"""
    return all(type(v := entry.get(name)) in (int, float) and abs(v) < 1e15 for name in names)


def moving_average(values: list[float], width: int) -> list[float]:
    """The mean of each value and `width // 2` on either side; fewer near the steep start."""
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for i in range(len(values)):
        side = min(i, width // 2)
        first, end = i - side, min(len(values), i + side + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def unit(largest: float) -> tuple[float, str]:
    """The unit of the horizontal axis (a divisor) and its label."""
    if x == "iter":
        return 1, "iteration"
    if x == "tokens":
        sizes, label = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")), "tokens ({})"
    else:
        sizes, label = ((3600, "hours"), (60, "minutes")), "time of training steps ({})"
    for size, name in sizes:
        if largest >= 3 * size:
            return size, label.format(name)
    return 1, "tokens" if x == "tokens" else label.format("seconds")


value = {"loss": "val_loss", "bpb": "val_bpb"}.get(y, y)
names = shortest_names([Path(path) for path in paths])
runs = [run for path in names for run in read_runs(path)]
if not runs:
    raise UserError("nothing to draw: name folders of runs (train.py writes metrics.jsonl there)")
logs = any(run["steps"] for run in runs)  # only log lines have learning rates and speeds
ratios = (3, 1, 1) if logs else (1,)
figure, axes = pyplot.subplots(
    len(ratios), 1, figsize=(8, 8 if logs else 5), sharex=True, height_ratios=ratios,
    layout="constrained", squeeze=False,
)  # fmt: skip
axes = list(axes[:, 0])
losses = axes[0]
scale, label = unit(max(run["x"][e["iter"]] for run in runs
                        for e in run["steps"] + run["evaluations"]))  # fmt: skip
PALETTE = [*range(0, 20, 2), *range(1, 20, 2)]  # tab20's ten strong colours, then its pale ones
colors: dict[str, Any] = {}  # runs with the same name (several seeds) share one
tops = []
for run in runs:
    name, steps = run["name"], run["steps"]
    if name.startswith("_"):
        name = f"\u200b{name}"  # matplotlib's legends skip labels that begin with an underscore
    first = name not in colors
    color = colors.setdefault(name, pyplot.get_cmap("tab20")(PALETTE[len(colors) % 20]))
    at = [run["x"][e["iter"]] / scale for e in steps]
    # at most a fifth of a short run, or its end would lag behind
    width = max(min(5, len(steps) // 5), round(smooth * len(steps))) if smooth else 1
    loss = moving_average([e["loss"] for e in steps], width)
    # Skip the untrained model's evaluation: a line from there would cut across the curves and
    # squeeze the interesting part into the bottom of the plot.
    evaluations = [e for e in run["evaluations"] if e["iter"] > 0] or run["evaluations"]
    both = bool(steps and evaluations and y == "loss")
    if steps and y == "loss":
        losses.plot(at, loss, color=color, alpha=0.45, linewidth=1,
                    label=f"{name}: training" if first else None)  # fmt: skip
    if steps:
        axes[1].plot(at, [e["lr"] for e in steps], color=color)
        axes[2].plot(at, [e["tokens_per_s"] for e in steps], color=color, linewidth=1)
    if evaluations:
        losses.plot(
            [run["x"][e["iter"]] / scale for e in evaluations],
            [e[value] for e in evaluations],
            color=color, marker="." if len(evaluations) <= 40 else None,
            label=(f"{name}: validation" if both else name) if first else None,
        )  # fmt: skip
        if y in ("loss", "bpb"):
            tops.append(max([evaluations[0][value], *(loss[len(loss) // 20 :] if both else [])]))
ends = [run["evaluations"][-1]["val_loss"] for run in runs if run["peer"]]
if ends:
    losses.axhline(min(ends), color="0.4", linestyle=":", linewidth=1, zorder=0,
                   label=f"the best peer's final loss, {min(ends):.4f}")  # fmt: skip
if reference:
    losses.axhline(reference, color="gray", linestyle="--", linewidth=1,
                   label=f"reference {reference:.2f}")  # fmt: skip
    tops.append(reference)
if tops and max(tops) > losses.dataLim.y0:
    lowest = losses.dataLim.y0
    losses.set_ylim(lowest - 0.05 * (max(tops) - lowest), max(tops) + 0.05 * (max(tops) - lowest))
titles = {"loss": "loss (nats per token)" if logs else "validation loss (nats per token)",
          "bpb": "bits per byte of validation text"}  # fmt: skip
losses.set_ylabel(titles.get(y, y))
handles, labels = losses.get_legend_handles_labels()
if len(labels) <= 8:
    losses.legend(frameon=False)
else:  # too long: put it beside the curves
    kept = [i for i, label in enumerate(labels) if not label.endswith(": training")] or range(999)
    figure.set_figwidth(11)
    figure.legend(
        [handles[i] for i in kept if i < len(labels)],
        [textwrap.shorten(labels[i], 40, placeholder="...") for i in kept if i < len(labels)],
        loc="outside right upper", frameon=False, fontsize="small",
    )  # fmt: skip
if logs:
    axes[1].set_ylabel("learning rate")
    axes[2].set_ylabel("tokens per second")
    axes[2].set_ylim(bottom=0)
    axes[2].yaxis.set_major_formatter("{x:,.0f}")
axes[-1].set_xlabel(label)
axes[-1].set_xlim(left=0)
figure.align_ylabels(axes)
for panel in axes:
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
kind = Path(png).suffix[1:].lower()
if kind not in ("png", "svg", "pdf", "ps", "eps"):  # formats with metadata
    raise UserError(f"--png={png} must end in .png, .svg, .pdf, .ps or .eps")
WRITER = "plot.py of steadyGPT"  # in the metadata: only our own plots are overwritten
if Path(png).is_file() and WRITER.encode() not in Path(png).read_bytes():
    raise UserError(f"{png} exists and was not made by plot.py: move it, or use another --png")
with naming(f"cannot write --png={png}", ValueError), atomic_write(Path(png)) as file:
    written = {"Creator" if kind != "png" else "Software": WRITER}
    figure.savefig(file, dpi=150, format=kind, metadata=written)  # if it fails, the old plot stays
print(f"wrote {png}")
