"""What is fast: this project, others, and what the machine can do at best.

The commands of `mhsa` and benchmarks/ import it, the library never.
"""
