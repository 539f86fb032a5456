"""In the place of Zig's compilers, whose package is too large for some journeys: the system's own, for this machine.

python -m ziglang cc -target x86_64-linux-gnu.2.17 -shared -o module.so devc.o lib0.o
"""

from __future__ import annotations

import os
import platform
import sys


def command(words: list[str]) -> list[str]:
    """What the system's compiler is asked for. It has no word for a target, and makes code for its own."""
    language, *rest = words
    target = rest.index("-target")
    if (triple := rest[target + 1]).partition("-")[0] != platform.machine():
        sys.exit(f"the system's compiler is no cross compiler: expected {platform.machine()}, got {triple}")
    return [language, *rest[:target], *rest[target + 2 :]]


if __name__ == "__main__":
    found = command(sys.argv[1:])
    os.execvp(found[0], found)
