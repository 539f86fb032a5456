"""What a release is: its wheels, and the files that one of them needs."""
