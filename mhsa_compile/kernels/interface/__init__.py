"""All that the rest of the compiler sees of kernels: the ops, and the Kernel protocol. Imports no kernel."""
