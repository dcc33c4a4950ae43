"""Each fault raises one alert, which names the remedy and the pods; promtool runs the rules.

All cases run with one cluster and two, with node_exporter and the plugin's own port. Other nodes
are healthy meanwhile, also one of the same name in the other cluster. honor_labels makes no
difference, as test_dashboard.py shows. A series is written "name label=value label=value".

A Case is a fault with its alert. All cases follow one another in one history of samples, of which
promtool is asked in which minute which alerts fire: just before an alert is due, while it is, and
after the fault.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import ttdp
from tests.documents import DEB
from tests.e2e.readers import assert_rules, labelled, promtool
from tests.e2e.steps import JSON

FILES = [DEB / f"tt-device-plugin.{name}.yml" for name in ("rules", "idle-rules")]
GROUPS = [group for file in FILES for group in yaml.safe_load(file.read_text())["groups"]]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
BEGIN = 10  # the minute of a case in which its fault begins

Value = float | Callable[[int], float | None] | None  # at each minute of a case; None: no sample
Samples = dict[str, Value]  # by series

# --- A healthy node -------------------------------------------------------------------------------

N150, P300, SIBLING = "0000:01:00.0", "0000:05:00.0", "0000:06:00.0"
NEW, LAST = "0000:07:00.0", "0000:08:00.0"  # of two p300 without telemetry so far
EXCLUDED = "0000:09:00.0"  # out of service
CHIPS = {
    N150: "board=n150 card=n150 serial=0100018511111111",
    **dict.fromkeys((P300, SIBLING), "board=p300 card=p300c serial=0000046131111111"),
    **dict.fromkeys((NEW, LAST), "board=p300 card=p300c serial="),
}
HOLDERS = (  # two containers of a pod; two pods that share; a pod without a name
    (N150, "default/train/init"), (N150, "default/train/main"), (P300, "default/infer-0/main"),
    (P300, "default/infer-1/main"), (SIBLING, "/8d3cf3e2/main"),
)  # fmt: skip
USERS = {
    N150: "in use by default/train",
    P300: "in use by default/infer-0, default/infer-1",
    SIBLING: "in use by pod 8d3cf3e2",
}

MTIME = "node_textfile_mtime_seconds file=/host/root/var/lib/node/tt-device-plugin.prom"
KUBELET, DRIVER = "up job=kubelet instance=node-1:10250", "tt_driver_info version=2.9.0"
UNBOUND = "tt_pci_functions driver="
BOUND = f"{UNBOUND}tenstorrent"
REGISTERED = [f"tt_kubelet_registered resource={name}" for name in ("n150", "p300", "p300-board")]
ERRORS = f"tt_device_pcie_errors_total device={P300} severity="


def healthy(output: str, suffix: str = "") -> Samples:
    """Return the series of a node at work; suffix: of its pods' names."""
    samples: Samples = {"up": 1, KUBELET: 1, DRIVER: 1, BOUND: 5, **dict.fromkeys(REGISTERED, 1)}
    samples["tt_plugin_info version=0.3.0"] = 1

    for chip, identity in CHIPS.items():
        samples[f"tt_device_info device={chip} excluded=false firmware=19.4.0.0 {identity}"] = 1
        samples[f"tt_device_power_watts device={chip}"] = 100
        samples[f"tt_device_open device={chip}"] = 1
        samples |= {f"tt_device_pcie_link_width{end} device={chip}": 16 for end in ("", "_max")}
        for severity in ("correctable", "nonfatal", "fatal"):
            samples[f"{ERRORS.replace(P300, chip)}{severity}"] = 0

    for chip, holder in (*HOLDERS, *([(LAST, "default/far/main")] if suffix else [])):
        namespace, pod, container = holder.split("/")
        names = f"pod_namespace={namespace} pod_name={pod}{suffix} container_name={container}"
        samples[f"tt_device_allocated device={chip} {names}"] = 1

    if output == "file":
        samples |= {MTIME: lambda minute: 60.0 * minute}
        samples["node_textfile_mtime_seconds file=/var/lib/other.prom"] = 1e6
    return samples


# --- Cases ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A fault, and the alert that it raises; none if there is no name."""

    changes: Samples
    alert: str = ""
    minutes: int = 60  # from the fault to the alert
    action: str = ""
    description: str = ""
    labels: str = ""
    summary: str = ""  # if it has a number; else as in the file
    lasts: int = 5  # minutes from the alert to the end of the fault
    after: int = 15  # minutes from there to the end of the case
    other: Case | None = None  # a fault at the same time, on another node
    is_beside: bool = False  # on the same node instead


RESEAT = "Reseat the card, or check its slot"
COOLING = ("hot", "tripped")  # kinds of faults that no command helps
KINDS = [*(each.value for each in ttdp.Kind), "new"]  # and one of a later version


def of(chip: str, changes: Samples, alert: str, minutes: int, action: str, **more: Any) -> Case:
    """Return the case of a chip."""
    _, card, serial = (pair.split("=")[1] for pair in CHIPS[chip].split())
    users = f"; {USERS[chip]}" if chip in USERS else ""
    description = f"{chip} ({card}{f', board {serial}' if serial else ''}) on {{where}}{users}"
    labels = f"device={chip} {CHIPS[chip]} {more.pop('labels', '')}"
    return Case(changes, f"Tenstorrent{alert}", minutes, action, description, labels, **more)


def fault(kind: str, chip: str = P300, more: Samples | None = None) -> Case:
    """Return the case of a kind of fault; more: other changes."""
    alert, action = "DeviceUnhealthy", f"On this node, run: {ttdp.fix_command(chip)}"
    if kind in COOLING:
        alert, action = "DeviceTooHot", "Check its cooling"
    changes = {f"tt_device_fault device={chip} kind={kind}": 1, **(more or {})}
    return of(chip, changes, alert, 2, action, labels=f"kind={kind}")


def idle(chip: str, pod: str, opened: Value = 0, **more: Any) -> Case:
    """Return the case of a pod that holds a chip; opened: how many processes have it open."""
    changes: Samples = {f"tt_device_open device={chip}": opened}
    action = "Ask the pod's owner whether it still needs the chip"
    summary = f"default/{pod} holds a chip that no process has opened for an hour on {{instance}}"
    pod_labels = f"pod_namespace=default pod_name={pod} holder=default/{pod}"
    case = of(chip, changes, "DeviceIdle", 60, action, labels=pod_labels, summary=summary, **more)

    # Of two pods that share the chip, this is about one.
    users = f"; in use by default/{pod}"
    return case._replace(description=case.description.replace(f"; {USERS[chip]}", users))


def chip_cases() -> dict[str, Case]:
    """Return the cases of a chip's faults, and of its link."""
    stalled = fault("stalled", more={f"tt_device_open device={P300}": 0})
    gone = fault("gone", more={f"{ERRORS}fatal": lambda at: 1 if at == BEGIN else None})
    narrow: Samples = {f"tt_device_pcie_link_width device={P300}": 4}
    many: Samples = {f"{ERRORS}correctable": lambda at: 30 * (at + 1 - BEGIN)}
    few: Samples = {f"{ERRORS}correctable": lambda at: at}
    found = {kind: fault(kind) for kind in KINDS}

    found |= {
        "unbound": fault("no_driver", more={UNBOUND: 1}),
        "no serial": fault("no_response", NEW),
        "stalled, not idle": stalled._replace(lasts=65),
        "gone after an error": gone._replace(lasts=65),
        "narrow link": of(P300, narrow, "LinkNarrow", 10, RESEAT)._replace(
            summary="PCIe link runs at x4, below the card's width, on {instance}"
        ),
        "corrected errors": of(P300, many, "LinkErrorsCorrected", 13, RESEAT)._replace(
            summary="300 corrected PCIe errors in ten minutes on {instance}"
        ),
        "few errors": Case(few),
    }

    for severities in (["nonfatal"], ["fatal"], ["nonfatal", "fatal"]):
        errors: Samples = {f"{ERRORS}{severity}": 1 for severity in severities}
        action = f"{RESEAT}; for AER messages, run: dmesg"
        case = of(P300, errors, "LinkErrors", 0, action, after=65)
        found[f"{' and '.join(severities)} errors"] = case

    excluded: Samples = {
        f"tt_device_info device={EXCLUDED} excluded=true board=p300 card=p300c serial=": 1,
        f"tt_device_pcie_link_width device={EXCLUDED}": 4,
        f"tt_device_pcie_link_width_max device={EXCLUDED}": 16,
        f"{ERRORS.replace(P300, EXCLUDED)}correctable": lambda at: 30 * at,
        f"{ERRORS.replace(P300, EXCLUDED)}fatal": lambda at: at,
        f"tt_device_open device={EXCLUDED}": 0,
    }
    found["excluded"] = Case(excluded, minutes=15)
    return found


def driver_cases() -> dict[str, Case]:
    """Return the cases of a driver that is not there, or not bound."""
    unloaded: Samples = {DRIVER: None, BOUND: None, UNBOUND: 5}
    unbound: Samples = {f"tt_device_fault device={chip} kind=no_driver": 1 for chip in CHIPS}
    unseen: Samples = {each: None for each in healthy("port") if each.startswith("tt_device_info")}
    vfio: Samples = {UNBOUND: None, f"{UNBOUND}vfio-pci": 5}

    missing = Case(
        unloaded | unbound,
        alert="TenstorrentDriverNotLoaded",
        minutes=2,
        action="After a kernel update, check DKMS; run: modprobe tenstorrent",
        description="Tenstorrent PCI functions without a driver on {where}: 5; "
        f"{USERS[P300]}, default/train, pod 8d3cf3e2",
    )
    never = Case(
        {UNBOUND: 2},
        alert="TenstorrentDriverNotBound",
        minutes=5,
        action="For each address and its reason, run: tt-device-plugin list",
        description="Tenstorrent PCI functions that never had a driver on {where}: 2",
    )
    one = never._replace(changes={UNBOUND: 1}, description=never.description.replace("2", "1"))
    return {
        "driver unloaded": missing,
        "driver unloaded and a chip": missing._replace(other=fault("gone", NEW)),
        "driver missing since boot": missing._replace(changes=unloaded | unseen),
        "bound to vfio-pci": Case(unloaded | unseen | vfio),
        "bound to vfio-pci after the boot": fault("no_driver", more=unloaded | vfio),
        "never bound": never,
        "one never bound, one gone": one._replace(other=fault("gone"), is_beside=True),
    }


def node_cases(output: str) -> dict[str, Case]:
    """Return the cases of a node's services, and of two faults at the same time."""
    is_file = output == "file"
    down: Samples = {**dict.fromkeys(healthy(output)), "up": 0, KUBELET: 1}
    probe = "job=blackbox instance=node-1"
    node_down: Samples = down | {KUBELET: 0, f"up {probe}": 1, f"probe_success {probe}": 0}

    stopped = Case(
        {MTIME: 60.0 * BEGIN} if is_file else down,
        alert="TenstorrentPluginNotReporting",
        minutes=6 if is_file else 3,
        action="To see what fails, run: tt-device-plugin check",
        description="{where}",
    )
    unregistered = Case(
        dict.fromkeys(REGISTERED[:2], 0),
        alert="TenstorrentResourceNotRegistered",
        minutes=5,
        action="Check both services; run: systemctl status kubelet tt-device-plugin",
        description="{where}: n150, p300",
    )
    elsewhere = unregistered._replace(changes={REGISTERED[2]: 0}, description="{where}: p300-board")
    return {
        "daemon stopped": stopped._replace(lasts=365),
        "daemon stopped and a chip": stopped._replace(other=fault("hot", NEW)),
        "not registered": unregistered._replace(other=elsewhere),
        "two chips": fault("gone", SIBLING)._replace(other=fault("blocked"), is_beside=True),
        "node down": Case(node_down),
        "node_exporter down": Case(down if is_file else {}),
    }


def idle_cases() -> dict[str, Case]:
    """Return the cases of chips that pods have and do not open."""
    # The pods of the other node have longer names.
    elsewhere = fault("hot", N150)
    elsewhere = elsewhere._replace(description=f"{elsewhere.description}-elsewhere")
    no_pod, old_driver = f"tt_device_open device={LAST}", f"tt_device_open device={N150}"
    at_times: Samples = {f"tt_device_open device={P300}": lambda at: at % 30 == 0}
    return {
        "idle": idle(N150, "train"),
        "idle, a fault elsewhere": idle(N150, "train", other=elsewhere),
        "idle, shared": idle(P300, "infer-0", other=idle(P300, "infer-1"), is_beside=True),
        "no pod, or an old driver": Case({no_pod: 0, old_driver: None}),
        "opened now and then": Case(at_times),
    }


def cases(output: str) -> dict[str, Case]:
    """Return the cases by name; output: "file" (node_exporter) or "port" (the plugin's own)."""
    return chip_cases() | driver_cases() | node_cases(output) | idle_cases()


# --- Ways to have the metrics ---------------------------------------------------------------------

Place = tuple[str, str]  # cluster, "" for none, and node


class Setup(NamedTuple):
    """One way to have the metrics in Prometheus."""

    clusters: Sequence[str]
    output: str

    @property
    def places(self) -> list[Place]:
        return [*itertools.product(self.clusters, ("node-1", "node-2"))]

    def target(self, place: Place) -> dict[str, str]:
        """Return the labels that Prometheus gives to all samples of a scrape."""
        own = {"job": "tt-device-plugin", "instance": f"{place[1]}:7762", "service": "kubelet"}
        if self.output == "file":
            own = {"job": "node-exporter", "instance": f"{place[1]}:9100", "pod": "exporter-x"}
        return own | {"cluster": place[0], "namespace": "monitoring", "container": "exporter"}

    def stored(self, series: str, place: Place) -> str:
        """Return a series as Prometheus stores it."""
        name, *labels = series.replace("node-1", place[1]).split()
        own = dict(label.split("=") for label in labels)
        if "job" in own:  # of another target
            return labelled(name, own | {"cluster": place[0]})

        target = self.target(place)
        assert not own.keys() & target.keys(), series
        return labelled(name, target | own)

    def history(self, *windows: tuple[Case, Mapping[Place, Samples]]) -> list[dict[str, str]]:
        """Return the series of all nodes; windows: a case's times, and changes by place."""
        found = []
        for place in self.places:
            samples = healthy(self.output, "" if place == self.places[0] else "-elsewhere")
            changes = [(case, changed.get(place, {})) for case, changed in windows]

            for series in samples | {key: None for _, change in changes for key in change}:
                usual, values = samples.get(series), []
                for case, change in changes:
                    during = [change.get(series, usual)] * (case.minutes + case.lasts)
                    each = enumerate([*[usual] * BEGIN, *during, *[usual] * case.after])
                    values += [value(at) if callable(value) else value for at, value in each]
                found.append({"series": self.stored(series, place), "values": notation(values)})
        return found

    def alert(self, case: Case, place: Place) -> dict[str, dict[str, str]]:
        """Return the alert of a case, as promtool describes it."""
        target = self.target(place)
        rule = ALERTS[case.alert]
        labels = {"alertname": case.alert, **rule["labels"]}
        labels |= {key: target[key] for key in ("cluster", "job", "instance")}
        labels |= dict(label.split("=") for label in case.labels.split())
        labels = {key: value for key, value in labels.items() if value}

        where = target["instance"] + (f", cluster {place[0]}" if place[0] else "")
        summary = case.summary or rule["annotations"]["summary"].replace("{{ $labels.", "{")
        summary = summary.replace(" }}", "}").replace("{instance}", target["instance"])
        summary = summary.replace("{kind}", labels.get("kind", ""))
        texts = {"summary": summary, "action": case.action}
        texts["description"] = case.description.replace("{where}", where)
        return {"exp_labels": labels, "exp_annotations": texts}


def notation(values: Sequence[float | None]) -> str:
    """Return samples as promtool reads them; a series that ends does so at once (stale)."""
    text = " ".join("_" if value is None else f"{value:g}" for value in values)
    return re.sub(r"(?<=\d )_", "stale", text)


def exactly(minute: int, alerts: Sequence[dict[str, dict[str, str]]]) -> tuple[JSON, list[JSON]]:
    """Return what promtool checks so that in this minute these alerts fire and no others.

    That is a query for their labels, and for each name the alerts with their texts.
    """
    at = {"eval_time": f"{minute}m"}
    firing = [{"alertstate": "firing", **alert["exp_labels"]} for alert in alerts]
    samples = [{"labels": labelled("ALERTS", each), "value": 1} for each in firing]
    query: JSON = at | {"expr": 'ALERTS{alertstate="firing"}', "exp_samples": samples}

    rules = []
    for name in {each["alertname"] for each in firing}:
        named = [alert for alert in alerts if alert["exp_labels"]["alertname"] == name]
        rules.append({**at, "alertname": name, "exp_alerts": named})
    return query, rules


def powers(cluster: str) -> Iterator[JSON]:
    """Yield queries for the power of two pods: one has two containers, two share a chip."""
    for pod, watts in (("train", 100), ("infer-0", 50)):
        names = {"cluster": cluster, "pod_namespace": "default", "pod_name": pod}
        series = labelled("namespace_pod:tt_device_power_watts:sum", names)
        samples = [{"labels": series, "value": watts}]
        yield {"expr": series, "eval_time": "5m", "exp_samples": samples}


@pytest.mark.parametrize("output", ["file", "port"])
@pytest.mark.parametrize("clusters", [("",), ("east", "west")], ids=["one", "two"])
def test_each_fault_raises_one_alert(tmp_path: Path, clusters: Sequence[str], output: str) -> None:
    """One fault after the other: an alert at its time and not before, and none after the fault.

    The power of a chip is divided among its pods.
    """
    setup = Setup(clusters, output)
    here, there = setup.places[0], setup.places[len(setup.places) // 2]
    windows: list[tuple[Case, dict[Place, Samples]]] = []
    queries, rules = [*powers(here[0])], []

    start = 0
    for name, case in cases(output).items():
        print(f"{start // 60}h{start % 60}m: {name}")  # to find the case of a failure
        other = case.other or Case({})
        faults = [(here, case), (here if case.is_beside else there, other)]
        changes: dict[Place, Samples] = {}
        for place, each in faults:
            changes.setdefault(place, {}).update(each.changes)
        windows.append((case, changes))

        fires = start + BEGIN + case.minutes
        end = fires + case.lasts
        alerts = [setup.alert(each, place) for place, each in faults if each.alert]
        expected = {fires: alerts, end - 1: alerts, end + case.after - 1: []}
        # Of two faults, one can have its alert before the other.
        if case.other is None:
            expected[fires - 1] = []
        for minute, firing in expected.items():
            query, texts = exactly(minute, firing)
            queries.append(query)
            rules += texts
        start = end + case.after

    test = {"promql_expr_test": queries, "alert_rule_test": rules}
    test["input_series"] = setup.history(*windows)
    assert_rules(tmp_path / "test.yml", test, FILES)


def test_the_rules_fit_the_program() -> None:
    """promtool accepts the files; each alert has a case, and a kind of a later version, too."""
    assert promtool("check", "rules", *map(str, FILES)).returncode == 0
    assert {case.alert for case in cases("file").values()} == {"", *ALERTS}
    severities = {rule["labels"]["severity"] for rule in ALERTS.values()}
    assert severities == {"critical", "warning", "info"}
    assert {*COOLING} == {each.value for each in ttdp.NO_COMMAND_HELPS}


def test_the_alert_on_idle_chips_is_off_by_default() -> None:
    """It is in the file that the example configuration does not load."""
    config = yaml.safe_load((DEB / "tt-device-plugin.prometheus.yml").read_text())
    assert config["rule_files"] == [FILES[0].name]
    assert "TenstorrentDeviceIdle" not in FILES[0].read_text()


def test_each_summary_names_the_node() -> None:
    """A pager shows the summary alone."""
    for rule in ALERTS.values():
        assert rule["annotations"]["summary"].endswith("on {{ $labels.instance }}")
