"""Tests of the program; world/ has the simulated node and the kubelet, e2e/ what needs root."""
