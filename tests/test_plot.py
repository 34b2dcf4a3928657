import json

from steady.runlog import read_metrics

import pytest

FOREIGN_LINES = (
    b'[1, 2]\n3\nnull\n"iter"\n{"loss": 1.0}\n{"iter": "5", "loss": 1.0}\n{"iter": null}\n'
    b"\xff\xfe\n"
    + b"[" * 100_000
    + b'\n{"iter": 5, "loss": "x"}\n{"iter": 6, "loss": 1.0, "lr": null}\n'
)


def write(folder, n):
    folder.mkdir()
    lines = [{"iter": 0, "train_loss": 4.0, "val_loss": 4.1}]
    lines += [{"iter": i, "loss": 4 / (i + 1), "lr": 1e-3, "tokens_per_s": 10.0} for i in range(n)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_several_runs_become_one_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path / "out-a", 50)
    write(tmp_path / "out-b", 20)
    png = tmp_path / "runs.png"
    shown = run("plot.py", tmp_path / "out-a", tmp_path / "out-b", f"--png={png}")
    assert f"wrote {png}" in shown
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000


def test_lines_of_another_kind_are_left_out(run, tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path / "out", 20)
    with open(tmp_path / "out" / "metrics.jsonl", "ab") as file:
        file.write(FOREIGN_LINES)
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) == 21 + 2
    assert "wrote" in run("plot.py", tmp_path / "out", f"--png={tmp_path / 'runs.png'}")


def test_bad_input_is_one_line(run, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="which runs"):
        run("plot.py")
    with pytest.raises(ValueError, match="has nothing to draw"):
        run("plot.py", tmp_path)
    write(tmp_path / "out", 20)
    with pytest.raises(ValueError, match="smooth=1e.308 must be at least 0 and at most 1"):
        run("plot.py", tmp_path, "--smooth=1e308")
    with pytest.raises(ValueError, match="cannot write --png=.*xyz: Format 'xyz'"):
        run("plot.py", tmp_path / "out", f"--png={tmp_path}/runs.xyz")
