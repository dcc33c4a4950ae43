"""The simulated node, the reference kubelet, and what runs programs between them."""
