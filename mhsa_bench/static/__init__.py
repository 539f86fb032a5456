"""Speed without the machine: inner loops read from assembly, judged by llvm-mca."""
