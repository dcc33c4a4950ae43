"""Tests of the program. This page shows where they are, how to run one, and how to add to them.

Run them:

    make test                                                 all that need no root, in two minutes
    .venv/bin/python -m pytest tests/test_health.py           one file
    .venv/bin/python -m pytest tests/test_health.py -k dead   the tests with that word in their name
    make e2e-systemd                                          as root; see CONTRIBUTING.md
    .venv/bin/python -m pytest -vv tests/e2e/test_pods.py     one file of these, after make pyz deb

Layout, by chapter of ttdp.py:

    CONFIGURATION                     test_config, golden/config
    INVENTORY                         test_inventory
    HEALTH                            test_health: what is read; test_chips: the rules
    CHIPS                             test_chips: over time; test_resources: their places
    RESOURCES, DECISION               test_resources; the lists are in golden/reports
    HOLDS                             test_holds, test_holds_explored, test_ownership
      its directories                 test_directories
    PREFERRED ALLOCATION              test_preferred
    CONTAINER EDITS, CDI AND LABELS   test_reports
    REPORTS                           test_reports; the texts are in golden/reports
    THREADS                           test_readers
    FILES                             test_files
    SYSTEMD                           test_systemd
    KERNEL EVENTS                     test_events
    HOST, DAEMON                      test_daemon
    REQUESTS                          test_requests, test_container_starts
    REGISTRATION                      test_registration
    CONNECTIONS                       test_connections
    COMMAND LINE                      test_golden, test_cli, test_list, test_fix
    packaging/, README, man page      test_start, test_versions, test_texts
    the package's files, make         test_postinst, test_sbom, test_make
    needs the real thing              e2e/: kubelets, containerd, systemd, udev, podman, Prometheus

Where a new test goes: to the chapter that it is about, into the nearest world in which its promise
is true. A pure function has a property or a table (chips.py). What the daemon does is tested on the
simulated node (the example below), what a command prints by a text in golden (test_golden); what
only a real kubelet, runtime or systemd can show, in e2e. Each promise stands once. Two levels have
it only if they find other faults: who has a chip is any order of events in test_holds_explored,
calls and loop in test_ownership and test_container_starts, and in e2e what real kubelets do.

Helpers:

    chips.py           chips, holds and decisions, for pure functions
    commands.py        the program as a process, and all that it prints
    documents.py       README and its like: their examples, which tests run
    conftest.py        fixtures: a simulated node, a reference kubelet, the daemon in this process
    world/node.py      sysfs, /dev and /proc of a machine with cards; chip.py: one chip of it
    world/controls.py  what an operator does to it: writes to sysfs, modprobe, tt-smi
    world/service.py   a stand-in for the daemon, which answers commands with its view
    world/kubelet.py   the reference kubelet, as strict as all versions together
    world/data/        recordings of the real driver, which test_node compares the node with
    e2e/conftest.py    the map of e2e: nodes with a real kubelet, booted Debians, guests
    bench.py           costs and leaks; demo.py: what make demo shows

A test of the daemon in this process begins like this one. It waits for a condition, with
kubelet.wait_for(), or until() of world/processes.py, and never sleeps.

    async def test_an_n150_is_a_device(node, kubelet, start):
        node.add("n150")
        await start()
        await kubelet.registered("tenstorrent.com/n150")
        assert kubelet.capacity() == {"tenstorrent.com/n150": 1}

To add a card: its subsystem ID goes into CARDS of ttdp.py and of world/cards.py, its memory into
MEMORY of ttdp.py; then `pytest tests/test_inventory.py tests/world/test_node.py`. If a capture of
the real driver exists, put it into world/data/captures.json: test_node replays each of them.
"""

import os

# Read when grpc is imported: its core would write to stderr, between the lines of a run.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
