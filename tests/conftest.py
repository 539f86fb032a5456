"""Set up before any test module: two pytest processes share the machine, so each library gets one thread."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# The same examples on every run, kept nowhere; a slow machine is no failure.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")
