"""`python -m mhsa_compile` is the command `mhsa`."""

from mhsa_compile.cli.app import main

main()
