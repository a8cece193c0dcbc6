"""How is a book kept? One append-only file of chained rows; each is written under a lock and synced before it counts.

A row is one line of JSON that ends with the SHA-256 of its text so far, and holds the hash of the row before.
A process that appends has read all rows so far under the same lock, so two processes never decide by the same state.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GENESIS = "0" * 64
HASH = b',"hash":"'
SUM = b'"row":"total"'
TAIL = len(HASH) + 64 + 2
"""Bytes of a row's end: the hash, its name and the closing brace."""
PATIENCE = 60.0
"""Seconds that a process waits for the lock, which is held for the time of one write."""

NETWORK = ("9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gpfs", "lustre", "ncpfs", "nfs",
           "nfs4", "orangefs", "osxfs", "panfs", "prl_fs", "pvfs2", "smb", "smb2", "smb3", "smbfs", "vboxsf",
           "virtiofs", "vmhgfs", "wekafs", "webdav")  # fmt: skip
"""File systems where a lock may be local to one machine, or lost when the server restarts."""
FUSE = ("fuse", "macfuse", "osxfuse")
LOCAL_FUSE = ("fuse-overlayfs", "gocryptfs", "encfs", "ntfs", "ntfs-3g", "exfat")
"""Of the file systems in user space, which mostly reach over a network (sshfs, s3fs, gcsfuse, glusterfs, rclone), those
that keep to a disk."""

encoded = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

Row = dict[str, Any]


class BookError(ValueError):
    """The book cannot be trusted, and why."""


def sealed(row: Mapping[str, object]) -> tuple[bytes, str]:
    """The line of a row, and its hash."""
    body = encoded(row).encode()
    seal = hashlib.sha256(body).hexdigest()
    return body[:-1] + HASH + seal.encode() + b'"}\n', seal


class BookFile:
    """The file of a book, read once from its start and then row by row as it grows."""

    def __init__(self, path: Path, whole: bool = True) -> None:
        """Without `whole`, rows before the last sum are checked by one hash of their bytes, and left out."""
        self.path, self._whole = path, whole
        self.head, self.count, self.size = GENESIS, 0, 0
        self._last = 0
        """Where the last row begins."""

    def create(self, row: Mapping[str, object]) -> None:
        """Make the book with its first row: whole, or not at all. A file that is there already is left alone."""
        if not self.path.parent.is_dir():
            raise ValueError(f"book={str(self.path)!r}: there is no folder {str(self.path.parent)!r}; make it first")
        refuse_network(self.path)
        line, _ = sealed({"seq": 0, "previous": GENESIS, **row})
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        handle = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(handle, line)
            os.fsync(handle)
            os.link(beside, self.path)
        except FileExistsError:
            raise ValueError(
                f"book={str(self.path)!r} exists; a book is never opened twice: give another name"
            ) from None
        finally:
            os.close(handle)
            os.unlink(beside)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def new_rows(self) -> list[Row]:
        """The rows since the last reading, checked. A torn last line is left out: its writer died inside the write."""
        with self._locked(os.O_RDONLY, fcntl.LOCK_SH) as handle:
            return self._read(handle)

    def last_rows(self, enough: Callable[[Row], bool]) -> list[Row]:
        """Rows from the end of what was read and checked, back to the first that is `enough`, in their order."""
        with self.path.open("rb") as file:
            text = file.read(self.size)
        found: list[Row] = []
        end = len(text) - 1
        while end > 0:
            start = text.rfind(b"\n", 0, end) + 1
            found.append(json.loads(text[start:end]))
            if enough(found[-1]):
                break
            end = start - 1
        return found[::-1]

    @contextmanager
    def exclusive(self) -> Iterator[Appending]:
        """Hold the book: the rows that others appended since, and a way to append further ones."""
        refuse_network(self.path)
        with self._locked(os.O_RDWR | os.O_APPEND, fcntl.LOCK_EX) as handle:
            rows = self._read(handle)
            if os.fstat(handle).st_size > self.size:  # a torn line: what it was to say was never answered
                os.ftruncate(handle, self.size)
                os.fsync(handle)
            yield Appending(self, handle, rows)

    def append(self, handle: int, row: Mapping[str, object]) -> Row:
        whole = {"seq": self.count, "previous": self.head, **row}
        line, seal = sealed(whole)
        try:
            if os.write(handle, line) != len(line):
                raise OSError(errno.ENOSPC, "short write")
            os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, self.size)
            raise OSError(f"cannot write the book {self.path}: {error}; nothing was spent, free space first") from error
        self._last, self.size = self.size, self.size + len(line)
        self.head, self.count = seal, self.count + 1
        return whole

    @contextmanager
    def _locked(self, flags: int, kind: int) -> Iterator[int]:
        if self.path.is_dir():
            raise ValueError(f"book={str(self.path)!r} is a folder; give the file of a book")
        try:
            handle = os.open(self.path, flags)
        except FileNotFoundError:
            raise ValueError(
                f"book={str(self.path)!r}: no such file; make it with vestige budget open {self.path} --data FILE"
            ) from None
        except OSError as error:  # above all missing permission: who may not write the book may not spend
            what = "written" if flags & os.O_RDWR else "read"
            raise ValueError(f"book={str(self.path)!r} cannot be {what}: {error.strerror}") from error
        try:
            until = time.monotonic() + PATIENCE
            while True:
                try:
                    fcntl.flock(handle, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise OSError(
                            f"{self.path} is locked for {PATIENCE:.0f} s: stop the process that holds it"
                        ) from None
                    time.sleep(0.001)
            if os.fstat(handle).st_ino != self._now().st_ino:  # the file was replaced: a row written here would be lost
                raise BookError(f"{self.path} was replaced by another file just now; look which of them is the book")
            yield handle
        finally:
            os.close(handle)

    def _now(self) -> os.stat_result:
        try:
            return os.stat(self.path)
        except OSError as error:
            raise BookError(f"{self.path} was taken away just now: {error.strerror}") from error

    def _read(self, handle: int) -> list[Row]:
        size = os.fstat(handle).st_size
        start = self._last  # the last row once more: it must still be there
        text = os.pread(handle, size - start, start) if size > start else b""
        while len(text) < size - start:  # pread gives at most 2 GiB at once
            text += os.pread(handle, size - start - len(text), start + len(text))
        if not self.count and not self._whole and (summed := self._last_sum(text)) is not None:
            return summed
        lines = text.split(b"\n")
        if self.count:
            if sealed_by(lines[0]) != self.head or len(lines) < 2:
                raise BookError(f"{self.path}: the rows that were there before are gone: cut or replaced")
            lines = lines[1:]
        rows = [self._checked(line) for line in lines[:-1]]
        if not self.count:
            raise BookError(f"{self.path} is no book: its first line is not a whole row")
        return rows

    def _last_sum(self, text: bytes) -> list[Row] | None:
        """The first row, the last one that holds a sum of all before it, and those after it; None where a sum does not
        hold what it says, or there is none: then all are read, and the one at fault is named."""
        place = text.rfind(SUM, 0, text.rfind(b"\n") + 1)
        start, end = text.rfind(b"\n", 0, max(place, 0)) + 1, text.find(b"\n", place)
        if place < 0 or not start:
            return None
        line, before = text[start:end], text[:start]
        if hashlib.sha256(line[:-TAIL] + b"}").hexdigest() != sealed_by(line):
            return None
        row = json.loads(line)
        if row.get("row") != "total" or row["prefix"] != hashlib.sha256(before).hexdigest():
            return None
        first = self._checked(before[: before.index(b"\n")])
        self.count, self.head, self.size = row["seq"], row["previous"], start
        return [first, *(self._checked(each) for each in text[start:].split(b"\n")[:-1])]

    def _checked(self, line: bytes) -> Row:
        place = f"{self.path}, line {self.count + 1}"
        seal = sealed_by(line)
        if seal is None or hashlib.sha256(line[:-TAIL] + b"}").hexdigest() != seal:
            raise BookError(f"{place}: its hash does not match its content: edited, or no row of a book")
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BookError(f"{place}: not JSON ({error})") from error
        if row.get("seq") != self.count or row.get("previous") != self.head:
            raise BookError(f"{place}: does not follow the line before it: rows were removed, reordered or put in")
        self._last, self.size = self.size, self.size + len(line) + 1
        self.head, self.count = seal, self.count + 1
        del row["hash"], row["previous"]
        return dict(row)


class Appending:
    """What may be done while the book is held."""

    def __init__(self, file: BookFile, handle: int, rows: list[Row]) -> None:
        self.rows, self._file, self._handle = rows, file, handle

    def append(self, row: Mapping[str, object]) -> Row:
        """Write a row, durably: it counts when this returns."""
        return self._file.append(self._handle, row)

    def hash_so_far(self) -> str:
        """The SHA-256 of all bytes of the book."""
        return hashlib.sha256(os.pread(self._handle, self._file.size, 0)).hexdigest()


def sealed_by(line: bytes) -> str | None:
    """The hash at the end of a line; None where there is none."""
    if line[-TAIL : -TAIL + len(HASH)] != HASH or line[-2:] != b'"}':
        return None
    return line[-66:-2].decode("ascii", "replace")


def refuse_network(path: Path) -> None:
    """Refuse a book where the lock of one machine may not hold on another."""
    kind = file_system(path.resolve().parent)
    system, _, driver = kind.partition(".")
    if system in NETWORK or (system in FUSE and driver not in LOCAL_FUSE):
        raise ValueError(
            f"book={str(path)!r} lies on a network file system ({kind}), where two machines could both take the last "
            "of the budget: keep it on a local disk, and start runs on that machine"
        )


def file_system(folder: Path) -> str:
    """The type of the file system that holds a folder, or "" where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return _by_mount(folder)
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if len(point) >= len(best) and folder.is_relative_to(point):
            best, kind = point, after.split()[0]
    return kind


def _by_mount(folder: Path) -> str:
    """The same where there is no /proc: `mount` prints "DEVICE on POINT (TYPE, ...)"."""
    import subprocess

    try:
        lines = subprocess.run(["mount"], capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    best, kind = "", ""
    for line in lines:
        point, _, rest = line.partition(" on ")[2].rpartition(" (")
        if len(point) >= len(best) and point and folder.is_relative_to(point):
            best, kind = point, rest.split(",")[0].rstrip(")")
    return kind
