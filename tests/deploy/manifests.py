"""Reads the Kubernetes manifests as a person would mean them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jsonpatch
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "deploy/kubernetes"
SIDECAR = FOLDER / "sidecar.yaml"
NODE = FOLDER / "node/daemonset.yaml"
MLOCK = FOLDER / "node-mlock/kustomization.yaml"

Manifest = dict[str, Any]
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def documents(file: Path) -> list[Manifest]:
    """Every object of a file."""
    return [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one]


def of_kind(found: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only one of a kind, or the one with the name."""
    (one,) = (
        one for one in found if one["kind"] == kind and name in (None, one["metadata"]["name"])
    )
    return one


def with_mlock() -> list[Manifest]:
    """The node's objects as the variant's patches leave them."""
    variant = documents(MLOCK)[0]
    found = documents(NODE)
    for patch in variant["patches"]:
        target = of_kind(found, patch["target"]["kind"], patch["target"]["name"])
        operations = yaml.safe_load(patch["patch"])
        target.update(cast(Manifest, jsonpatch.apply_patch(target, operations)))
    return found


def pods(found: list[Manifest]) -> Iterator[Manifest]:
    """Every pod's spec."""
    for one in found:
        if "template" in one.get("spec", {}):
            yield one["spec"]["template"]["spec"]


def containers(pod: Manifest) -> list[Manifest]:
    """Init containers and sidecars among them."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def daemon_of(pod: Manifest) -> Manifest:
    """The container in which kvstored runs."""
    (one,) = (one for one in containers(pod) if one["name"] == "kvstored")
    return one


def bytes_of(quantity: str) -> int:
    """Bytes of "33280Mi"."""
    match = re.fullmatch(r"(\d+)([KMGT]i)", quantity)
    assert match is not None, quantity
    return int(match[1]) * _UNITS[match[2]]


def mount_of(container: Manifest, volume: str) -> Manifest:
    """Where a container has a volume."""
    mounts: list[Manifest] = container["volumeMounts"]
    (one,) = (one for one in mounts if one["name"] == volume)
    return one
