"""The vocabulary of CUDA kernels: registers, fragments, pipelines of copies, PTX of Hopper."""
