"""The package on real systemd, in system containers. `python -m tests.e2e` (root)."""
