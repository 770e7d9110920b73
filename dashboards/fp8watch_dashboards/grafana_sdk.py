"""The parts of grafana-foundation-sdk in use, imported in one place.

The SDK warns at import that its schema v1 classes are deprecated. v1 is used on purpose: Grafana 10 to 13 accept it by
provisioning, sidecar and import alike.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Prefer using dashboardv2", category=DeprecationWarning)
    from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import common as common_models
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models import prometheus as prometheus_models

__all__ = [
    "JSONEncoder",
    "common",
    "common_models",
    "dashboard",
    "heatmap",
    "models",
    "prometheus",
    "prometheus_models",
    "register_default_plugins",
    "stat",
    "timeseries",
]
