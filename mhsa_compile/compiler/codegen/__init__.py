"""A lowered module -> a shared library: LLVM, CUDA, Zig's linker, and the passes before them."""
