import json

import pytest

from steady.runlog import read_metrics, training_clock

FOREIGN_LINES = (
    b'[1, 2]\n3\nnull\n"iter"\n{"loss": 1.0}\n{"iter": "5", "loss": 1.0}\n{"iter": null}\n'
    b"\xff\xfe\n"
    + b"[" * 100_000
    + b'\n{"iter": 5, "loss": "x"}\n{"iter": 6, "loss": 1.0, "lr": null}\n'
)


def write(folder, n):
    folder.mkdir()
    lines = [{"iter": 0, "train_loss": 4.0, "val_loss": 4.1}]
    step = {"lr": 1e-3, "ms": 2e3, "tokens_per_s": 10.0}
    lines += [{"iter": i, "loss": 4 / (i + 1)} | step for i in range(n)]
    lines += [{"iter": n, "train_loss": 4 / n, "val_loss": 4 / n}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_several_runs_become_one_picture(run, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    write(tmp_path / "out-a", 50)
    write(tmp_path / "out-$b^$", 20)
    png = tmp_path / "runs.png"
    curve = [{"iter": i, "tokens": i * 64, "seconds": i / 9, "val_loss": 4 - i} for i in range(3)]
    line = {"recipe": "baseline 65k", "kind": "baseline", "curve": curve}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    axes = []
    for paths in (["out-a", "out-$b^$"], ["runs.jsonl", "out-a"], ["runs.jsonl"]):
        shown = run("plot.py", *(tmp_path / p for p in paths), f"--png={png}", "--x=time")
        assert f"wrote {png}" in shown
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
        axes.append(pyplot.gcf().axes)
    assert [len(panels) for panels in axes] == [3, 3, 1]
    # 50 steps of 2 s, starting from the first evaluation after training steps
    assert axes[0][0].lines[1].get_xdata().tolist() == [100]
    assert axes[0][2].get_xlabel() == "time of training steps (seconds)"
    assert axes[2][0].lines[0].get_xdata().tolist() == [1 / 9, 2 / 9]
    assert axes[2][0].get_ylabel() == "validation loss (nats per token)"


def test_time_is_that_of_training_steps_alone():
    step = {"loss": 1.0, "tokens_per_s": 1000.0}
    first = [{"iter": i, "ms": 9000.0} | step for i in range(3)]  # steps that compiled
    then = [{"iter": i, "ms": 100.0} | step for i in range(3, 6)]
    # an evaluation waited for step 5's optimizer, so step 6 seems short; then a line for four steps
    evaluated = {"iter": 6, "loss": 1.5, "val_loss": 1.0}  # an edited one may have any losses
    after = [evaluated, {"iter": 6, "ms": 60.0} | step]
    entries = first + then + after + [{"iter": 10, "ms": 100.0} | step, {"iter": 12, "val_loss": 1}]
    seconds, tokens = training_clock(entries)
    expected = [i / 10 for i in range(13)]
    assert seconds == pytest.approx(expected)
    assert tokens[6:9] == [27300, 27360, 27460] and len(tokens) == 13


def test_evaluations_alone_have_their_iterations():
    assert training_clock([{"iter": 50, "val_loss": 1.0}]) == ([0.0] * 51, [0] * 51)


def test_lines_of_another_kind_are_left_out(run, tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path / "out", 20)
    with open(tmp_path / "out" / "metrics.jsonl", "ab") as file:
        file.write(FOREIGN_LINES)
        file.write(b'{"iter": 67108864, "loss": 1.0}\n')  # would take minutes and gigabytes
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) == 22 + 2
    assert "wrote" in run("plot.py", tmp_path / "out", f"--png={tmp_path / 'runs.png'}")


def test_numbers_of_ones_own_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path / "out", 20)
    with open(tmp_path / "out" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"iter": 5, "accuracy": 0.25}\n{"iter": 15, "accuracy": 0.5}\n')
    for y in ("accuracy", "ms"):
        shown = run("plot.py", tmp_path / "out", f"--y={y}", f"--png={tmp_path}/{y}.svg")
        assert "wrote" in shown and y in (tmp_path / f"{y}.svg").read_text(encoding="utf-8")


def test_bad_input_is_one_line(run, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no runs given"):
        run("plot.py")
    with pytest.raises(ValueError, match="nothing to draw: name folders"):
        run("plot.py", tmp_path)
    write(tmp_path / "out", 20)
    shown = run("plot.py", tmp_path / "none", tmp_path / "out", f"--png={tmp_path}/runs.png")
    assert "there is no" in shown and "wrote" in shown  # it draws the others
    with pytest.raises(ValueError, match="smooth=1e.308 must be at least 0 and at most 1"):
        run("plot.py", tmp_path, "--smooth=1e308")
    with pytest.raises(ValueError, match="--png=.*xyz must end in .png, .svg,"):
        run("plot.py", tmp_path / "out", f"--png={tmp_path}/runs.xyz")


def test_a_resume_makes_no_kink_in_time():
    """The first step after a resume compiles again. Other slow steps count."""
    step = {"loss": 1.0, "tokens_per_s": 1000.0}
    entries = [{"iter": i, "ms": 20_000.0 if i == 50 else 100.0} | step for i in range(100)]
    seconds, _ = training_clock(entries)
    assert seconds[-1] == pytest.approx(29.9)
    entries[50]["resumed"] = True
    seconds, _ = training_clock(entries)
    assert seconds == pytest.approx([i / 10 for i in range(101)])


def test_a_slow_start_is_left_out_if_ten_steps_share_a_log_line():
    step = {"loss": 1.0, "tokens_per_s": 1000.0}
    entries = [{"iter": i, "ms": 5000.0 if i <= 10 else 100.0} | step for i in range(0, 100, 10)]
    entries[5] |= {"ms": 2000.0, "resumed": True}
    assert training_clock(entries)[0] == pytest.approx([i / 10 for i in range(92)])
