"""`python -m mhsa_compile` is the command `mhsa`."""

from mhsa_compile.cli import main

main()
