"""The real kubelet, real containerd and runc, for tests that need to know what those really do."""
