"""The runtimes we are compared with, a file for each family."""
