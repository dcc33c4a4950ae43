"""The kubelet's pod resources API (v1): what the real kubelet itself says of its devices.

The messages have only the fields that tests look at (k8s.io/kubelet, podresources/v1/api.proto).
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.world.processes import LONG_PATIENCE

STRING, MESSAGE = 9, 11  # types of fields
MESSAGES: dict[str, list[tuple[str, int, str]]] = {  # name, number, and type "" for a text
    "Empty": [],
    "ContainerDevices": [("resource_name", 1, ""), ("device_ids", 2, "repeated")],
    "ContainerResources": [("name", 1, ""), ("devices", 2, "ContainerDevices")],
    "PodResources": [
        ("name", 1, ""),
        ("namespace", 2, ""),
        ("containers", 3, "ContainerResources"),
    ],
    "List": [("pod_resources", 1, "PodResources")],
    "GetAllocatableResources": [("devices", 1, "ContainerDevices")],
}


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="pods.proto", package="v1", syntax="proto3")
    for message, fields in MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind in fields:
            is_text = kind in ("", "repeated")
            described.field.add(
                name=name,
                number=number,
                label=1 if kind == "" else 3,
                type=STRING if is_text else MESSAGE,
                type_name=None if is_text else f".v1.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


POOL = _pool()


def ask(socket_path: str, method: str) -> Any:
    """Return the answer to a method; a kubelet that was just started may not listen yet."""
    answer = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"v1.{method}"))
    with grpc.insecure_channel(f"unix://{socket_path}") as channel:
        call: Any = channel.unary_unary(
            f"/v1.PodResourcesLister/{method}", response_deserializer=answer.FromString
        )
        return call(b"", timeout=LONG_PATIENCE, wait_for_ready=True)
