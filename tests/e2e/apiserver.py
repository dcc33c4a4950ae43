"""As much of an API server as one kubelet needs: so that its pods are ordinary ones, not static.

Kubelets differ between the two: static pods are admitted in the first turn, those of an API server
once the kubelet has found its own node there, which it looks for once a second. Objects are kept as
they come, without defaults or validation; lists and watches give everything of a kind. Standard
library only, for virtual machines.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.e2e.steps import JSON

PORT = 8080
KINDS = {
    "nodes": "Node", "pods": "Pod", "services": "Service", "leases": "Lease", "events": "Event",
    "csidrivers": "CSIDriver", "csinodes": "CSINode", "runtimeclasses": "RuntimeClass",
    "configmaps": "ConfigMap",
}  # fmt: skip


class ApiServer:
    """Keeps its objects while machines lose power; `serve` anew after each."""

    def __init__(self) -> None:
        self._objects: dict[str, JSON] = {}  # by path
        self._events: list[tuple[int, str, JSON]] = []  # version, path, watch event
        self._version = itertools.count(1)
        self._latest = 0
        self._changed = threading.Condition()
        self._server: _Server | None = None

    def serve(self, listen: Callable[[int], socket.socket]) -> None:
        """Serve on what listens on a port of a machine, until it loses power or `close`."""
        self.close()
        self._server = _Server(self, listen(PORT))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Answer no longer; the objects stay."""
        if self._server:
            server, self._server = self._server, None
            with self._changed:
                server.closing = True
                self._changed.notify_all()
            server.shutdown()
            server.server_close()

    # What tests ask

    def add_pod(self, manifest: Mapping[str, Any], node: str) -> None:
        """Create a pod that is scheduled to the node, completed as by a real server."""
        pod = copy.deepcopy(dict(manifest))
        pod["metadata"] = {"uid": str(uuid.uuid4()), **pod["metadata"], "namespace": "default"}
        pod["status"] = {"phase": "Pending", "qosClass": "BestEffort"}

        spec = pod["spec"]
        spec |= {"nodeName": node, "dnsPolicy": "Default", "schedulerName": "default"}
        spec.setdefault("securityContext", {})
        spec.setdefault("enableServiceLinks", True)

        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            container["terminationMessagePath"] = "/dev/termination-log"
            container["terminationMessagePolicy"] = "File"
            container.setdefault("imagePullPolicy", "IfNotPresent")
            # Defaulted like this by a real server; the kubelet's predicates see requests only.
            resources = container.setdefault("resources", {})
            resources["requests"] = resources.get("limits", {}) | resources.get("requests", {})

        self.write(f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}", pod)

    def delete_pod(self, name: str, *, grace: int | None = None) -> None:
        """Delete a pod's object at once; with `grace`, the kubelet ends the pod first."""
        path = f"/api/v1/namespaces/default/pods/{name}"
        if grace is None:
            return self.delete(path)

        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        marks = {"deletionTimestamp": now, "deletionGracePeriodSeconds": grace}
        self.patch(path, {"metadata": marks})

    def pod(self, name: str) -> JSON | None:
        """Return the pod as `kubectl get` would show it."""
        return self.read(f"/api/v1/namespaces/default/pods/{name}")

    def node(self, name: str) -> JSON:
        return self.read(f"/api/v1/nodes/{name}") or {}

    # Objects

    def read(self, path: str) -> JSON | None:
        with self._changed:
            return copy.deepcopy(self._objects.get(path))

    def collect(self, collection: str) -> tuple[list[JSON], int]:
        """Return everything of a kind in all namespaces (or one), and the version of that view."""
        with self._changed:
            found = [item for path, item in self._objects.items() if _within(path, collection)]
            return copy.deepcopy(found), self._latest

    def write(self, path: str, item: JSON) -> JSON:
        with self._changed:
            group, _, kind, name = _parse(path)
            item = {"apiVersion": group, "kind": KINDS.get(kind, "Unknown"), **copy.deepcopy(item)}
            item["metadata"] = {"name": name, "uid": str(uuid.uuid4()), **item.get("metadata", {})}
            self._record("MODIFIED" if path in self._objects else "ADDED", path, item)
            self._objects[path] = item
            return copy.deepcopy(item)

    def patch(self, path: str, change: JSON) -> JSON | None:
        with self._changed:
            if path not in self._objects:
                return None
            return self.write(path, merged(self._objects[path], change))

    def delete(self, path: str) -> None:
        with self._changed:
            if item := self._objects.pop(path, None):
                self._record("DELETED", path, item)

    def _record(self, action: str, path: str, item: JSON) -> None:
        self._latest = next(self._version)
        item["metadata"]["resourceVersion"] = str(self._latest)
        self._events.append((self._latest, path, {"type": action, "object": copy.deepcopy(item)}))
        self._changed.notify_all()

    def wait_events(
        self, collection: str, after: int, server: _Server
    ) -> tuple[list[JSON], int] | None:
        """Return the watch events of a kind after a version, once there are any; None: closed."""
        with self._changed:
            while not server.closing:
                new = [each for each in self._events if each[0] > after]
                if found := [event for _, path, event in new if _within(path, collection)]:
                    return found, self._latest
                self._changed.wait()
        return None


def merged(item: Any, change: Any) -> Any:
    """Merge strategically, as far as kubelets use it: lists of conditions and the like, too."""
    if not isinstance(item, dict) or not isinstance(change, dict):
        return change

    result = dict(item)
    for key, value in change.items():
        if key.startswith("$"):  # an instruction to the server
            continue
        if value is None:
            result.pop(key, None)
        elif key in ("conditions", "addresses") and isinstance(value, list):
            known = {entry["type"]: entry for entry in result.get(key, [])}
            for entry in value:
                known[entry["type"]] = merged(known.get(entry["type"], {}), entry)
            result[key] = list(known.values())
        else:
            result[key] = merged(result.get(key), value)
    return result


def _event_of(content: bytes) -> JSON:
    """Return the name and the texts of an Event in protobuf, which newer clients send."""
    unknown = dict(_fields(content.removeprefix(b"k8s\0")))  # runtime.Unknown; 2: raw
    event = dict(_fields(unknown[2]))  # core/v1 Event
    metadata = dict(_fields(event[1]))  # ObjectMeta; 1: name
    texts = {"reason": 3, "message": 4, "type": 9}
    found = {key: event[number].decode() for key, number in texts.items()}
    return {"metadata": {"name": metadata[1].decode()}, **found}


def _fields(message: bytes) -> list[tuple[int, bytes]]:
    """Return number and content of a message's fields that have a length.

    A key is the field's number and, in three bits, its type: 0 is a varint, 1 has eight bytes, 2
    has a length, 5 has four bytes.
    """
    found, place = [], 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        size = varint() if key & 7 in (0, 2) else 8 if key & 7 == 1 else 4
        if key & 7 == 2:
            found.append((key >> 3, message[place : place + size]))
        if key & 7:
            place += size
    return found


def _parse(path: str) -> tuple[str, str, str, str]:
    """Return a path's group and version, namespace, plural kind and name ("": a collection)."""
    parts = path.strip("/").split("/")
    start = 2 if parts[0] == "api" else 3
    group, rest = "/".join(parts[1:start]), parts[start:]

    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    return group, namespace, rest[0] if rest else "", rest[1] if len(rest) > 1 else ""


def _within(path: str, collection: str) -> bool:
    group, namespace, kind, _ = _parse(path)
    wanted_group, wanted_namespace, wanted_kind, _ = _parse(collection)
    return (group, kind) == (wanted_group, wanted_kind) and wanted_namespace in ("", namespace)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    closing = False

    def __init__(self, api: ApiServer, listener: socket.socket) -> None:
        super().__init__(("127.0.0.1", PORT), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.api = api

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A kubelet that was killed drops its connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _body(self) -> JSON:
        length = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(length)
        if self.headers.get("Content-Type") == "application/vnd.kubernetes.protobuf":
            return _event_of(content)
        return dict(json.loads(content or b"{}"))

    @property
    def _object(self) -> str:
        """Return the path of the object, also for its status."""
        return urlsplit(self.path).path.removesuffix("/status")

    def _answer(self, code: int, content: JSON) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _missing(self) -> None:
        self._refuse(404, "NotFound")

    def _refuse(self, code: int, reason: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
        self._answer(code, {**status, "code": code, "message": f"{self.path}: {reason}"})

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        group, _, kind, name = _parse(url.path)

        if name:
            item = self.server.api.read(self._object)
            return self._answer(200, item) if item else self._missing()
        if kind not in KINDS:
            return self._missing()
        if query.get("watch") in ("true", "1"):
            return self._watch(url.path, query)

        items, version = self.server.api.collect(url.path)
        answer = {"kind": f"{KINDS[kind]}List", "apiVersion": group, "items": items}
        self._answer(200, {**answer, "metadata": {"resourceVersion": str(version)}})

    def _watch(self, collection: str, query: Mapping[str, str]) -> None:
        group, _, kind, _ = _parse(collection)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        # A reflector that asks for a "watch list" gets all objects, and a mark behind them.
        after = int(query.get("resourceVersion") or 0)
        if query.get("sendInitialEvents") == "true":
            items, after = self.server.api.collect(collection)
            for item in items:
                self._chunk({"type": "ADDED", "object": item})
            marks = {"k8s.io/initial-events-end": "true"}
            metadata = {"resourceVersion": str(after), "annotations": marks}
            last = {"kind": KINDS[kind], "apiVersion": group, "metadata": metadata}
            self._chunk({"type": "BOOKMARK", "object": last})

        while found := self.server.api.wait_events(collection, after, self.server):
            events, after = found
            for event in events:
                self._chunk(event)
        self.close_connection = True

    def _chunk(self, event: JSON) -> None:
        data = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def do_POST(self) -> None:
        item, path = self._body(), urlsplit(self.path).path
        name = item.get("metadata", {}).get("name") or uuid.uuid4().hex
        if self.server.api.read(f"{path}/{name}"):  # the node of a kubelet that starts again
            return self._refuse(409, "AlreadyExists")
        self._answer(201, self.server.api.write(f"{path}/{name}", item))

    def do_PUT(self) -> None:
        self._answer(200, self.server.api.write(self._object, self._body()))

    def do_PATCH(self) -> None:
        item = self.server.api.patch(self._object, self._body())
        if item is None:
            self._missing()
        else:
            self._answer(200, item)

    def do_DELETE(self) -> None:
        self._body()
        self.server.api.delete(urlsplit(self.path).path)
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
