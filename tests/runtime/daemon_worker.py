"""Ends while a daemon thread is inside a call: `python daemon_worker.py ARTIFACT THREADS`."""

import sys
import threading

import numpy as np

from mhsa_compile.runtime.compiled_attention import load


def call_on_and_on() -> None:
    attention = load(sys.argv[1], threads=int(sys.argv[2]))
    x, mask = np.ones((64, 512, 8), np.float32), np.ones((1, 512), bool)
    while True:
        attention(x, mask)
        called.set()


called = threading.Event()
threading.Thread(target=call_on_and_on, daemon=True).start()
called.wait()
