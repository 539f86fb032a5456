"""What kernels of both families begin with: buffers, arguments, masks known in advance. Imports `interface`."""
