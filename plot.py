"""Draw loss, learning rate and throughput of one or several runs into a picture.

python plot.py out-stdlib-char
python plot.py out-* --png=comparison.png
"""

import sys
from pathlib import Path
from typing import Any

from steady.runlog import read_metrics

from configurator import configure

# the picture
png = "runs.png"  # file to write
smooth = 0.02  # share of a run over which the training loss is averaged; 0: not at all

folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
sys.argv = [sys.argv[0], *(argument for argument in sys.argv[1:] if argument.startswith("-"))]
configure(globals(), positional="OUT_DIR")

if not folders:
    raise ValueError("which runs? python plot.py OUT_DIR [OUT_DIR ...]")
try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:
    raise ValueError("plotting needs matplotlib: pip install matplotlib") from None


def moving_average(values: list[float], width: int) -> list[float]:
    """The mean of each value and up to `width` - 1 before it."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    starts = [max(0, i + 1 - width) for i in range(len(values))]
    return [(sums[i + 1] - sums[s]) / (i + 1 - s) for i, s in enumerate(starts)]


def are_numbers(entry: dict[str, Any], *names: str) -> bool:
    """Whether `entry` has all of `names` as numbers: what was not finite is null."""
    return all(type(entry.get(name)) in (int, float) for name in names)


figure, (losses, rates, speeds) = pyplot.subplots(
    3, 1, figsize=(8, 8), sharex=True, height_ratios=(3, 1, 1), layout="constrained"
)
for i, folder in enumerate(folders):
    entries = read_metrics(Path(folder) / "metrics.jsonl")
    steps = [e for e in entries if are_numbers(e, "loss", "lr", "tokens_per_s")]
    evaluations = [e for e in entries if are_numbers(e, "val_loss")]
    if not steps and not evaluations:
        raise ValueError(f"{folder}/metrics.jsonl has nothing to draw (a run writes it)")
    color, name = f"C{i % 10}", Path(folder).name
    at = [e["iter"] for e in steps]
    loss = moving_average([e["loss"] for e in steps], max(1, round(smooth * len(steps))))
    losses.plot(at, loss, color=color, alpha=0.45, linewidth=1, label=f"{name}: training")
    losses.plot(
        [e["iter"] for e in evaluations], [e["val_loss"] for e in evaluations],
        color=color, marker=".", label=f"{name}: validation",
    )  # fmt: skip
    rates.plot(at, [e["lr"] for e in steps], color=color)
    speeds.plot(at, [e["tokens_per_s"] for e in steps], color=color, linewidth=1)
losses.set_ylabel("loss")
losses.legend(frameon=False)
rates.set_ylabel("learning rate")
speeds.set_ylabel("tokens/s")
speeds.set_ylim(bottom=0)
speeds.set_xlabel("iteration")
speeds.yaxis.set_major_formatter("{x:,.0f}")
for axes in (losses, rates, speeds):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
try:
    figure.savefig(png, dpi=150)
except ValueError as error:
    raise ValueError(f"cannot write --png={png}: {error}") from None
print(f"wrote {png}")
