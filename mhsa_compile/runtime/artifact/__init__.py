"""The folder that an artifact is: its manifest, its hashes, whether its code may run here. Imports no TVM."""
