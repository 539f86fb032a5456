"""Of each exercise: a solution, what is right, and what typically goes wrong."""
