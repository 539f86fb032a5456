"""The compiled sentence encoder on Ray Serve, replicas by CPU: README.md beside this says when."""
