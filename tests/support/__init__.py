"""What tests share: cases, runs, simulators, machines made up or emulated."""
