"""Configuration that all real kubelets of these tests have. Standard library only."""

from __future__ import annotations

from tests.e2e.steps import JSON

NODE_NAME = "node"
NODE_ADDRESS = "192.0.2.1"  # TEST-NET-1: a kubelet takes none of the loopback range
READ_ONLY_PORT = 10255  # without TLS: handshakes of whoever polls would cost much

COMMON: JSON = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    "failSwapOn": False,
    # Reached by nobody but the tests: the loopback device is the machine's own.
    "address": "127.0.0.1",
    "readOnlyPort": READ_ONLY_PORT,
    "healthzPort": 0,
    "authentication": {"webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "registerNode": True,
    "contentType": "application/json",
    "enableControllerAttachDetach": False,
    "makeIPTablesUtilChains": False,
    "resolvConf": "",
    # However full the disk is, pods are not refused and images not removed for that.
    "imageGCHighThresholdPercent": 100,
    "imageGCLowThresholdPercent": 99,
    "evictionHard": {
        "memory.available": "0%",
        "nodefs.available": "0%",
        "nodefs.inodesFree": "0%",
        "imagefs.available": "0%",
        "imagefs.inodesFree": "0%",
    },
}


def kubeconfig(server: str) -> JSON:
    """Return the file by which a kubelet finds an API server, which asks for no credentials."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
        "current-context": "c",
    }
