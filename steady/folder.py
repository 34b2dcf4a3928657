"""The folder of a run, or of a data set in preparation. Only one process at a time writes to it,
and files appear there only once they are complete."""

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from steady import UserError
from steady.output import survive_closed_streams

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FILES = ("ckpt.pt", "before_decay.pt", "best.pt", "metrics.jsonl")

# errors of file systems that do not support an operation
CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY)

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how such a file begins
KEPT_ARCHIVES = 2  # earlier runs to keep in a folder
MARK = ".archived"  # marks the folders that we created for them

# descriptors of each claimed folder's lock file and of the folder, open until the process ends
held: dict[Path, tuple[int, int]] = {}


def claim(out_dir: Path, names: Sequence[str] = FILES) -> None:
    """Create `out_dir` and lock it until this process ends. Remove the temporary files of killed
    runs that were writing the files `names`.

    The lock is an fcntl file lock: a killed process leaves no lock behind, and child processes that
    outlive this one do not hold it. (With flock they would.)

    Raises UserError if another run is writing there. From here on printing never raises: a run must
    not end because nobody reads its output.
    """
    survive_closed_streams()
    with naming(f"cannot write to {out_dir}", UnicodeError):
        str(out_dir).encode()  # torch.save would raise an error for a name that is not UTF-8
    out_dir.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    lock = os.open(out_dir / ".lock", flags, 0o666)
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(lock)
        raise UserError(f"{out_dir / '.lock'} is a hard link or not a regular file: delete it")
    with contextlib.suppress(OSError):  # anyone who can write to the folder can lock it (F74)
        os.fchmod(lock, 0o600 | os.stat(out_dir).st_mode & 0o066)
    try:
        if fcntl is None:
            raise OSError(errno.ENOLCK, "this system has no file locks")
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(lock, 200).decode("utf-8", "replace") or "unknown"
        os.close(lock)  # a run may try again at every step, and Windows cannot delete an open file
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise UserError(
                f"another process is writing to {out_dir} ({holder}): stop it first, or use "
                "another folder"
            ) from None
        print(f"note: {out_dir} cannot be locked ({error.strerror}): avoid a second run there")
        return
    held[out_dir] = lock, os.open(out_dir, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    for name in names:
        for path in out_dir.glob(f"{name}.{'[0-9a-f]' * 8}.tmp"):
            path.unlink(missing_ok=True)


def require_file(path: Path) -> None:
    """Raises UserError if `path` exists but is not a regular file: reading a FIFO or a device may
    never end. (The same goes for some files in /proc, which look regular.) Also raises it for a
    pointer, which `git clone` leaves in place of a large file if Git LFS is not installed."""
    if path.exists() and (not path.is_file() or str(path.resolve()).startswith("/proc/k")):
        kind = "folder" if path.is_dir() else "device or pipe"
        raise UserError(f"{path} is a {kind}, not a file")
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{path} is only a pointer to the file: run `git lfs pull` there")


@contextlib.contextmanager
def naming(place: str, *kinds: type[Exception]) -> Iterator[None]:
    """In the `with` block, UserErrors and errors of these kinds become UserErrors that begin with
    `place`, such as a file's name."""
    try:
        yield
    except (UserError, *kinds) as error:
        raise UserError(f"{place}: {error}") from None


def hold_lock(out_dir: Path) -> None:
    """Check that `out_dir`, if this process has claimed it, is still the same folder. If it was
    moved or removed, claim it again and archive the files that another run has left there.
    (If only the lock file was removed, and no other run has started since, just lock it again.)

    Raises UserError if another run is writing there now.
    """
    if still_held(out_dir):
        return
    _, opened = held[out_dir]
    only_unlocked = is_same_file(out_dir, opened) and not (out_dir / ".lock").exists()
    claim(out_dir)
    if not only_unlocked:
        print(f"note: {out_dir} was moved or removed during this run: continuing in a new folder")
        archive_previous_run(out_dir)


def still_held(out_dir: Path) -> bool:
    """Whether `out_dir` is the folder that this process has claimed, or has not been claimed."""
    return out_dir not in held or is_same_file(out_dir / ".lock", held[out_dir][0])


def is_same_file(path: Path, opened: int) -> bool:
    """Whether `path` is still the file or folder behind the descriptor `opened`."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(opened))
    return False


def archive_previous_run(out_dir: Path, names: Sequence[str] = FILES) -> None:
    """Move an earlier run's files to a new folder in `out_dir`: `previous`, or if that exists
    `previous-2`, and so on. Then remove old archives until KEPT_ARCHIVES are left, this one
    included; those without a checkpoint go first. A resume, which moves only some of the files,
    removes none: they may be this run's best weights."""
    found = [out_dir / name for name in names if (out_dir / name).exists()]
    if not found:
        return
    n = max(archives(out_dir), default=0) + 1
    aside = out_dir / (f"previous-{n}" if n > 1 else "previous")
    aside.mkdir()
    (aside / MARK).touch()
    for path in found:
        os.replace(path, aside / path.name)
    moved = ", ".join(path.name for path in found)
    why = ": this run does not continue from there" if names is FILES else ""  # all of its files
    print(f"note: moved {moved} to {aside}{why}")
    if names is not FILES:
        return
    # of the others, remove those without a ckpt.pt first: runs started by mistake, or single files
    others = [p for p in archives(out_dir).values() if p != aside and not p.is_symlink()]
    others = [path for path in others if (path / MARK).is_file()]
    others.sort(key=lambda path: (path / "ckpt.pt").exists())
    for old in others[: 1 - KEPT_ARCHIVES]:
        with contextlib.suppress(OSError):  # another user's, or it has other files
            for name in (*FILES, MARK):
                (old / name).unlink(missing_ok=True)
            print(f"note: removed {old}: at most {KEPT_ARCHIVES} previous runs are kept")
            old.rmdir()


def archives(out_dir: Path) -> dict[int, Path]:
    """The folders that `archive_previous_run` has made, by number, oldest first."""
    found = {}
    for path in out_dir.glob("previous*"):
        if match := re.fullmatch(r"previous(?:-(\d+))?", path.name):
            found[int(match[1] or 1)] = path
    return dict(sorted(found.items()))


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A temporary name for a file, which replaces `path` at the end of the `with` block and must be
    on disk by then. So an error, a crash or a full disk leaves `path` as it was."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # make the rename itself durable, where the system can (Windows cannot open folders)
    with contextlib.suppress(OSError):  # the rename has succeeded, even if this fails
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` at the end of the `with` block."""
    try:
        with replacement(path) as temporary, open(temporary, "wb") as file:
            yield file
            sync_to_disk(file)
    except OSError as error:
        error.filename = error.filename or str(path)  # the error for a full disk names no file
        raise


def sync_to_disk(file: BinaryIO) -> None:
    """Flush the file to disk, if the file system supports that, and drop it from the page cache, so
    that the next reader reads the disk."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in CANNOT:
            raise
    with contextlib.suppress(OSError, AttributeError):  # only a hint; not on macOS and Windows
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def crc_of_start(path: str | Path) -> int:
    """The CRC-32 of a file's first MiB, a quick way to tell files apart."""
    with open(path, "rb") as file:
        return zlib.crc32(file.read(2**20))
