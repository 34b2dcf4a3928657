import errno
import os
import shutil
import subprocess
import sys

import pytest
from conftest import HOLD, ROOT, TINY

from steady import UserError, folder


def test_f45_a_second_run_in_the_folder_is_refused_and_changes_nothing(
    run, sums, tmp_path, other_run
):
    (tmp_path / "ckpt.pt").write_text("an earlier run's")
    first = other_run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    arguments = [*TINY, f"--dataset={sums}", f"--out_dir={tmp_path}"]
    with pytest.raises(
        ValueError, match="another process is writing to .*process .* on .*: stop it"
    ):
        run("train.py", *arguments)
    assert "val loss" in run("train.py", *arguments, "--eval_only=True")  # which writes nothing
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    first.kill()
    first.wait()
    other_run(tmp_path)  # the system has released the lock


def test_f45_a_lock_does_not_outlive_its_process_in_one_that_it_started(tmp_path, other_run):
    """Compilation forks short-lived processes. With flock they would keep the lock."""
    forks = HOLD.replace('print("claimed', 'import os; os.fork() and print("claimed')
    first = subprocess.Popen(
        [sys.executable, "-c", forks, str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert first.stdout.readline() == b"claimed\n"
    first.kill()
    first.wait()
    other_run(tmp_path)
    os.killpg(first.pid, 9)
    first.communicate()


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_f45_a_folder_that_was_moved_or_removed_is_claimed_again(tmp_path, capsys, how, other_run):
    out = tmp_path / "out"
    folder.claim(out)
    folder.hold_lock(out)
    assert capsys.readouterr().out == ""
    (out / "ckpt.pt").write_text("this run's")
    out.rename(tmp_path / "old") if how == "moved" else shutil.rmtree(out)
    out.mkdir()
    other = other_run(out)  # takes over the folder
    (out / "ckpt.pt").write_text("the other's")
    with pytest.raises(ValueError, match="another process is writing"):
        folder.hold_lock(out)
    other.kill()
    other.wait()
    folder.hold_lock(out)
    assert "was moved or removed during this run" in capsys.readouterr().out
    assert (out / "previous" / "ckpt.pt").read_text() == "the other's"
    folder.hold_lock(out)
    assert capsys.readouterr().out == ""


def test_f45_a_folder_whose_lock_was_removed_keeps_its_files(tmp_path, capsys):
    folder.claim(tmp_path)
    (tmp_path / "ckpt.pt").write_text("this run's")
    (tmp_path / ".lock").unlink()
    folder.hold_lock(tmp_path)
    assert capsys.readouterr().out == "" and (tmp_path / "ckpt.pt").read_text() == "this run's"
    again = subprocess.run(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert "another process is writing to" in again.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="lists the open files of Linux")
def test_f45_a_run_whose_folder_another_took_over_keeps_no_files_open(tmp_path, other_run):
    """It tries to claim the folder again before every line of metrics.jsonl."""
    folder.claim(tmp_path)
    (tmp_path / ".lock").unlink()
    other_run(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(9):
        with pytest.raises(ValueError, match="another process is writing"):
            folder.hold_lock(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_f45_what_another_run_left_in_an_unlocked_folder_is_archived(tmp_path, other_run):
    folder.claim(tmp_path)
    (tmp_path / ".lock").unlink()
    other = other_run(tmp_path)
    (tmp_path / "ckpt.pt").write_text("the other's")
    other.kill()
    other.wait()
    folder.hold_lock(tmp_path)
    assert (tmp_path / "previous" / "ckpt.pt").read_text() == "the other's"


def test_a_name_that_torch_cannot_load_is_refused(tmp_path):
    """Also a name that is UTF-8, if Python reads it as ASCII, as without PYTHONUTF8."""
    for name in ("run_\udce9", "run_\udcc3\udcb6"):
        with pytest.raises(UserError, match="cannot write to .*can't encode character"):
            folder.claim(tmp_path / name)


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "out").write_text("notes")
    with pytest.raises(FileExistsError, match="/out"):
        folder.claim(tmp_path / "out")


def test_f45_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    (tmp_path / "ckpt.pt.0a1b2c3d.tmp").write_text("half")
    folder.claim(tmp_path)
    assert os.listdir(tmp_path) == [".lock"]


def test_f45_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, capsys):
    def unsupported(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder.fcntl, "lockf", unsupported)
    folder.claim(tmp_path)
    assert "cannot be locked (No locks available): avoid a second" in capsys.readouterr().out
    monkeypatch.setattr(folder, "fcntl", None)  # Windows
    folder.claim(tmp_path)
    assert "cannot be locked" in capsys.readouterr().out


def test_a_full_disk_names_the_file_and_leaves_it_as_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left on device: .*metrics.jsonl"):
        with folder.atomic_write(path) as file:
            file.write(b"new")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == ["metrics.jsonl"] and path.read_text() == "old"


def test_earlier_run_is_moved_aside_not_overwritten(tmp_path, capsys):
    folder.archive_previous_run(tmp_path)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())
    (tmp_path / "ckpt.pt").write_text("old")
    folder.archive_previous_run(tmp_path)
    assert (tmp_path / "previous" / "ckpt.pt").read_text() == "old"
    assert "previous" in capsys.readouterr().out
    for n in range(2, 12):  # accidental starts, and files of a run that a resume leaves behind
        name = "best.pt" if n % 2 else "metrics.jsonl"
        (tmp_path / name).write_text(f"run {n}")
        folder.archive_previous_run(tmp_path)
        assert (tmp_path / f"previous-{n}" / name).read_text() == f"run {n}"
        assert len(folder.archives(tmp_path)) == 2
    assert (tmp_path / "previous" / "ckpt.pt").read_text() == "old"
    (tmp_path / "previous-11" / "ckpt.pt").touch()  # two with a ckpt.pt
    (tmp_path / "best.pt").write_text("best")
    folder.archive_previous_run(tmp_path, ["best.pt"])
    assert (tmp_path / "previous-12" / "best.pt").read_text() == "best"  # not removed at once
    assert list(folder.archives(tmp_path)) == [1, 11, 12]  # no new run: both old ones stay
    (tmp_path / "best.pt").write_text("best")
    folder.archive_previous_run(tmp_path, ["best.pt"])
    assert list(folder.archives(tmp_path)) == [1, 11, 12, 13]
    (tmp_path / "best.pt").write_text("best")
    folder.archive_previous_run(tmp_path, ["best.pt"])
    assert list(folder.archives(tmp_path)) == [1, 11, 12, 13, 14]  # single files may be the best
    (tmp_path / "ckpt.pt").write_text("run 15")
    folder.archive_previous_run(tmp_path)
    assert list(folder.archives(tmp_path)) == [11, 15]


def test_an_archive_that_was_moved_and_linked_is_not_removed(tmp_path):
    out, moved = tmp_path / "out", tmp_path / "moved"
    out.mkdir()
    for n in range(4):
        (out / "ckpt.pt").touch()
        folder.archive_previous_run(out)
        if n == 0:
            (out / "previous").rename(moved)
            (out / "previous").symlink_to(moved)
    assert (moved / "ckpt.pt").exists() and list(folder.archives(out)) == [1, 3, 4]
