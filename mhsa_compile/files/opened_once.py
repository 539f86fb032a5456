"""Files that are opened once: what is checked is what is read, whoever changes names meanwhile; and a file
that is hashed as it is read. Standard library only."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import threading
from io import BufferedReader
from pathlib import Path

from mhsa_compile.files import system

_BLOCK = 2**20  # bytes that are read at once, where nobody keeps them
_HASHED_BESIDE = 2**18  # bytes from which on a thread is worth its start


class OpenFolder:
    """A folder at one moment: it stays the same one wherever its name goes. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = -1 if system.IS_WINDOWS else os.open(path, os.O_RDONLY | os.O_DIRECTORY | system.CLOSED_ON_EXEC)
        self._status = os.stat(path) if system.IS_WINDOWS else os.fstat(self._handle)

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def open(self, name: str) -> BufferedReader | None:
        """A file in it, to be read; None where there is none of this name, or something that is no file (a FIFO, on
        which others would wait)."""
        try:
            handle = self._open(name, os.O_RDONLY | system.NO_WAITING | system.CLOSED_ON_EXEC)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            return None
        return os.fdopen(handle, "rb")

    def _open(self, name: str, flags: int) -> int:
        """Windows opens files by their paths alone; `was_replaced` then tells of another folder."""
        return os.open(self._path / name, flags) if system.IS_WINDOWS else os.open(name, flags, dir_fd=self._handle)

    def was_replaced(self) -> bool:
        """Whether another folder stands in its place now, or none."""
        try:
            return not os.path.samestat(self._status, os.stat(self._path))
        except FileNotFoundError:
            return True


def mappable(data: bytes, name: str) -> int:
    """A descriptor of a file with this content that has no path, to be mapped as code; nobody can change it any more.

    Memory, where the kernel hands that out; else a file that is deleted already, in the temporary folder. It is the
    caller's to close.
    """
    try:
        import fcntl

        handle = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    except (OSError, AttributeError, ImportError):  # forbidden by a sandbox, or vm.memfd_noexec = 2; no Linux
        import tempfile

        with tempfile.TemporaryFile() as file:
            handle, seals = os.dup(file.fileno()), 0
    try:
        with os.fdopen(handle, "wb", closefd=False) as writer:
            writer.write(data)
        if seals:
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(handle)
        raise
    return handle


class HashedFile:
    """A file, read once from its beginning, and the sha256 of all of it.

    Large blocks are hashed while the next one is read, by a thread, where this process may use another CPU: each takes
    a good part of the time that a load takes.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file, self._sha256 = file, hashlib.sha256()
        self._hashing: threading.Thread | None = None
        self._hashed = range(0)  # addresses of the block that is being hashed
        self._beside = len(system.cpus()) > 1
        self.size = os.fstat(file.fileno()).st_size

    def readinto(self, buffer: memoryview, /) -> int:
        """Fills the buffer, or as much of it as there is; 0 at the end. What is in it then stays so until the next call
        for another buffer returns, or `digest`."""
        begin = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0
        addresses = range(begin, begin + len(buffer))
        if max(begin, self._hashed.start) < min(addresses.stop, self._hashed.stop):
            self._settle()
        count = self._file.readinto(buffer)
        self._settle()
        if count >= _HASHED_BESIDE and self._beside:
            self._hashing = threading.Thread(target=self._sha256.update, args=(buffer[:count],), daemon=True)
            try:
                self._hashing.start()
                self._hashed = addresses
                return count
            except RuntimeError:  # no more threads for this process
                self._hashing = None
        self._sha256.update(buffer[:count])
        return count

    def read(self) -> bytes:
        """Reads the rest of the file."""
        data = self._file.read()
        self._settle()
        self._sha256.update(data)
        return data

    def digest(self) -> str:
        """The sha256 of the whole file, in hexadecimal digits; what was not read yet is read now."""
        block = memoryview(bytearray(min(_BLOCK, self.size + 1)))
        while self.readinto(block):
            pass
        self._settle()
        return self._sha256.hexdigest()

    def _settle(self) -> None:
        """Waits until what was read is hashed."""
        if self._hashing is not None:
            self._hashing.join()
            self._hashing, self._hashed = None, range(0)
