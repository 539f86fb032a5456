"""How anything is timed: workloads, turns, the accuracy of a timed run."""
