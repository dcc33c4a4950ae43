"""Tests of the program; world/ has the simulated node and the reference kubelet, e2e/ what needs root."""
