"""Tests, the simulated node and the reference kubelet."""
