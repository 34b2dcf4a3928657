import json

import pytest


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
    shown = run("plot.py", tmp_path / "out-a", tmp_path / "out-b", f"--png={png}", "--baseline=3")
    assert f"wrote {png}" in shown
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000


def test_bad_input_is_one_line(run, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="which runs"):
        run("plot.py")
    with pytest.raises(ValueError, match="has nothing to draw"):
        run("plot.py", tmp_path)
    write(tmp_path / "out", 20)
    with pytest.raises(ValueError, match="cannot write --png=.*xyz: Format 'xyz'"):
        run("plot.py", tmp_path / "out", f"--png={tmp_path}/runs.xyz")
