"""What a call spends its time on: each operation of the compiled function timed where it stands, and a Chrome trace."""
