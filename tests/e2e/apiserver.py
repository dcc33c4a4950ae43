"""As much of an API server as one kubelet, or node-problem-detector, needs.

Objects are kept as they come, without defaults or validation; lists and watches give everything of
a kind. Standard library only, for virtual machines, but for events in protobuf.
"""

from __future__ import annotations

import copy
import datetime
import json
import re
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tests.e2e.steps import JSON

PORT = 8080
KINDS = {
    "nodes": "Node", "pods": "Pod", "services": "Service", "leases": "Lease", "events": "Event",
    "csidrivers": "CSIDriver", "csinodes": "CSINode", "runtimeclasses": "RuntimeClass",
    "configmaps": "ConfigMap",
}  # fmt: skip
PODS = "/api/v1/namespaces/default/pods"
PATH = re.compile(r"/apis?/((?:[^/]+/)?v\w+)(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+))?")


class Place(NamedTuple):
    """What a path names: an object, or without a name all of a kind, in one namespace or all."""

    group: str
    namespace: str
    kind: str
    name: str

    @classmethod
    def of(cls, path: str) -> Place:
        match = PATH.fullmatch(path)
        return cls(*match.groups("")) if match else cls("", "", "", "")

    def has(self, path: str) -> bool:
        """Return whether this collection has the object with that path."""
        other = Place.of(path)
        is_near = self.namespace in ("", other.namespace)
        return is_near and (self.group, self.kind) == (other.group, other.kind)


class ApiServer:
    """Keeps its objects while machines lose power; `serve` anew after each."""

    def __init__(self) -> None:
        self._objects: dict[str, JSON] = {}  # by path
        self._deleted: dict[str, JSON] = {}
        self._version = 0
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
        pod["metadata"]["namespace"] = "default"
        pod["status"] = {"phase": "Pending", "qosClass": "BestEffort"}

        usual = {"securityContext": {}, "enableServiceLinks": False}
        spec = pod["spec"] = usual | pod["spec"] | {"nodeName": node, "dnsPolicy": "Default"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            container["terminationMessagePath"] = "/dev/termination-log"
            container["terminationMessagePolicy"] = "File"
            container.setdefault("imagePullPolicy", "IfNotPresent")
            # Defaulted like this by a real server; the kubelet's predicates see requests only.
            resources = container.setdefault("resources", {})
            resources["requests"] = resources.get("limits", {}) | resources.get("requests", {})

        self.write(f"{PODS}/{pod['metadata']['name']}", pod)

    def delete_pod(self, name: str, *, grace: int | None = None) -> None:
        """Delete a pod's object at once; with `grace`, the kubelet ends the pod first."""
        if grace is None:
            return self.delete(f"{PODS}/{name}")

        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        marks = {"deletionTimestamp": now, "deletionGracePeriodSeconds": grace}
        self.patch(f"{PODS}/{name}", {"metadata": marks})

    def pod(self, name: str) -> JSON | None:
        """Return the pod as `kubectl get` would show it."""
        return self.read(f"{PODS}/{name}")

    def node(self, name: str) -> JSON:
        return self.read(f"/api/v1/nodes/{name}") or {}

    # Objects

    def read(self, path: str) -> JSON | None:
        with self._changed:
            return copy.deepcopy(self._objects.get(path))

    def collect(self, collection: str) -> tuple[list[JSON], int]:
        """Return everything of a kind in all namespaces (or one), and the version of that view."""
        place = Place.of(collection)
        with self._changed:
            found = [item for path, item in self._objects.items() if place.has(path)]
            return copy.deepcopy(found), self._version

    def write(self, path: str, item: JSON) -> JSON:
        place = Place.of(path)
        defaults: JSON = {"apiVersion": place.group, "kind": KINDS.get(place.kind, "Unknown")}
        named: JSON = {"name": place.name, "uid": str(uuid.uuid4())}
        with self._changed:
            item = defaults | copy.deepcopy(item)
            item["metadata"] = named | item.get("metadata", {})
            self._record(item)
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
                self._record(item)
                self._deleted[path] = item

    def _record(self, item: JSON) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._changed.notify_all()

    def wait_changes(
        self, collection: str, after: int, server: _Server
    ) -> tuple[list[JSON], int] | None:
        """Return the watch events of a kind after a version, once there are any; None: closed."""
        place = Place.of(collection)
        with self._changed:
            while not server.closing:
                found = [
                    {"type": action, "object": copy.deepcopy(item)}
                    for action, items in (("DELETED", self._deleted), ("MODIFIED", self._objects))
                    for path, item in items.items()
                    if place.has(path) and int(item["metadata"]["resourceVersion"]) > after
                ]
                if found:
                    return found, self._version
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
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    def fields(message: bytes) -> dict[int, Any]:
        found: Any = UnknownFieldSet(Empty.FromString(message))
        return {field.field_number: field.data for field in found}

    event = fields(fields(content.removeprefix(b"k8s\0"))[2])  # core/v1 Event in runtime.Unknown
    texts = {"reason": 3, "message": 4, "type": 9}
    found = {key: event[number].decode() for key, number in texts.items()}
    return {"metadata": {"name": fields(event[1])[1].decode()}, **found}  # ObjectMeta


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
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Type") == "application/vnd.kubernetes.protobuf":
            return _event_of(content)
        return dict(json.loads(content or b"{}"))

    @property
    def _object(self) -> str:
        """Return the path of the object, also for its status."""
        return urlsplit(self.path).path.removesuffix("/status")

    def _answer(self, content: JSON | None, code: int = 200) -> None:
        if content is None:
            return self._refuse(404, "NotFound")
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, code: int, reason: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
        self._answer({**status, "code": code, "message": f"{self.path}: {reason}"}, code)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        place = Place.of(self._object)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}

        if place.name or place.kind not in KINDS:
            return self._answer(self.server.api.read(self._object))
        if query.get("watch") in ("true", "1"):
            return self._watch(url.path, query)

        items, version = self.server.api.collect(url.path)
        kind = {"kind": f"{KINDS[place.kind]}List", "apiVersion": place.group}
        self._answer({**kind, "items": items, "metadata": {"resourceVersion": str(version)}})

    def _watch(self, collection: str, query: Mapping[str, str]) -> None:
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
            place = Place.of(collection)
            marks = {"k8s.io/initial-events-end": "true"}
            metadata = {"resourceVersion": str(after), "annotations": marks}
            last = {"kind": KINDS[place.kind], "apiVersion": place.group, "metadata": metadata}
            self._chunk({"type": "BOOKMARK", "object": last})

        while found := self.server.api.wait_changes(collection, after, self.server):
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
        self._answer(self.server.api.write(f"{path}/{name}", item), 201)

    def do_PUT(self) -> None:
        self._answer(self.server.api.write(self._object, self._body()))

    def do_PATCH(self) -> None:
        self._answer(self.server.api.patch(self._object, self._body()))

    def do_DELETE(self) -> None:
        self._body()
        self.server.api.delete(urlsplit(self.path).path)
        self._answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})
