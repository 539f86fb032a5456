"""Matrix tiles (AMX) where there are none: an emulator of their instructions, the same functions in plain LLVM IR, and what runs on both."""
