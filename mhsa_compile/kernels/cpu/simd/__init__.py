"""The vocabulary of CPU kernels: vectors, element types, dot products, functions such as exp2."""
