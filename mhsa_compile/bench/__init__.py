"""What is fast: we, others, and what the machine can do at best. Imports `compiler` and all below it."""
