"""A file that is hashed as it is read. Standard library only."""

from __future__ import annotations

import hashlib
import os
from io import BufferedReader

_BLOCK = 2**20  # bytes that are read at once, where nobody keeps them


class HashedFile:
    """A file, read once from its beginning, and the sha256 of all of it."""

    def __init__(self, file: BufferedReader) -> None:
        self._file, self._sha256 = file, hashlib.sha256()
        self.size = os.fstat(file.fileno()).st_size

    def readinto(self, buffer: memoryview, /) -> int:
        """Fills the buffer, or as much of it as there is; 0 at the end."""
        count = self._file.readinto(buffer)
        self._sha256.update(buffer[:count])
        return count

    def read(self) -> bytes:
        """The rest of it."""
        data = self._file.read()
        self._sha256.update(data)
        return data

    def digest(self) -> str:
        """The sha256 of the whole file, in hexadecimal digits; what was not read yet is read now."""
        block = memoryview(bytearray(min(_BLOCK, self.size + 1)))
        while self.readinto(block):
            pass
        return self._sha256.hexdigest()
