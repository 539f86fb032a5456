"""Checkpoints of other tools, whose linears have few bits: GPTQ, AWQ and GGUF, read bit for bit."""
