"""The chart as Helm renders it, for the tests of this folder; its example values are the cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm" / "fp8watch"
Document = dict[str, Any]
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    **{
        path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text())
        for path in sorted((CHART / "ci").glob("*-values.yaml"))
    },
}
chart = helm_python.Chart.load(str(CHART))


def render(values: dict[str, Any], *, name: str = "r", namespace: str = "ns") -> list[Document]:
    """All objects of a release with these values."""
    texts = chart.render(values, name=name, namespace=namespace)
    return [
        document
        for path, text in texts.items()
        if not path.endswith("NOTES.txt")
        for document in yaml.safe_load_all(text)
        if document
    ]


def notes(values: dict[str, Any]) -> str:
    """What Helm says after an installation."""
    return str(chart.render(values, name="r", namespace="ns")["fp8watch/templates/NOTES.txt"])


def one(documents: list[Document], kind: str, suffix: str = "") -> Document:
    """The only object of this kind whose name ends so."""
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"].endswith(suffix)]
    return found


def pods(documents: list[Document]) -> dict[str, Document]:
    """Name -> pod template of everything that runs."""
    return {
        d["metadata"]["name"]: d["spec"]["template"]
        for d in documents
        if d["kind"] in ("DaemonSet", "Deployment", "StatefulSet")
    }
