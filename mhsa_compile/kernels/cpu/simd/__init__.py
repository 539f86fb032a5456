"""The vocabulary of CPU kernels: vectors, register tiles, functions such as exp2."""
