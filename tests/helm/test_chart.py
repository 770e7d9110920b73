"""The chart as Helm itself renders it: valid objects, least rights, programs that exist, refusals that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import helm_python
import kubernetes_validate
import pytest
import typer.main
import yaml
from rendered_chart import CASES, CHART, chart, notes, one, pods, render

from fp8watch.commands.controller import app as controller_app
from fp8watch_agent.cli import app as agent_app
from fp8watch_dashboards import grafana
from fp8watch_dashboards.cli import app as console_app

KUBERNETES = "1.34"
MONITORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")


@pytest.mark.parametrize("kube_version", ["v1.25.0", "v1.30.0", "v1.34.0"])
def test_strict_lint_has_no_error(kube_version):
    result = helm_python.lint(str(CHART), strict=True, kube_version=kube_version)
    assert result["errors"] == []
    assert [m for m in result["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid_for_kubernetes(case):
    documents = render(CASES[case])
    assert documents
    core = [document for document in documents if document["kind"] not in MONITORS]
    for document in core:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    names = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents]
    assert len(set(names)) == len(names)


def test_the_validator_would_notice():
    document = one(render({}), "DaemonSet")
    document["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"agent": {"metrics": {"port": "x"}}}, "/agent/metrics/port"),
        ({"agent": {"metrics": {"port": 70000}}}, "/agent/metrics/port"),
        ({"agent": {"metrics": {"scope": "node"}}}, "/agent/metrics/scope"),
        ({"agent": {"socketHostPath": "run/fp8watch"}}, "/agent/socketHostPath"),
        ({"agent": {"tollerations": []}}, "tollerations"),
        ({"consol": {}}, "consol"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"controller": {"replicas": 0}}, "/controller/replicas"),
        ({"redis": {"storage": 10}}, "/redis/storage"),
        ({"externalRedis": {"url": "http://x"}}, "/externalRedis/url"),
        ({"dashboard": {"labels": {"grafana_dashboard": 1}}}, "/dashboard/labels/grafana_dashboard"),
        ({"serviceMonitor": {"interval": "15"}}, "/serviceMonitor/interval"),
    ],
)
def test_a_bad_value_is_refused_by_name(values, key):
    with pytest.raises(helm_python.HelmValuesError, match=key):
        chart.validate_schema(values)
    with pytest.raises(helm_python.HelmError, match=key):
        chart.render(values, name="r", namespace="ns")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"podMonitor": {"enabled": True}}, "agent.metrics.scope"),
        (
            {
                "agent": {"metrics": {"scope": "pod"}},
                "podMonitor": {"enabled": True},
                "serviceMonitor": {"enabled": True},
            },
            "serviceMonitor.enabled and podMonitor.enabled",
        ),
        ({"console": {"enabled": True}}, "console.nodeSelector"),
        (
            {"console": {"enabled": True, "nodeSelector": {"a": "b"}}, "agent": {"dataHostPath": ""}},
            "agent.dataHostPath",
        ),
        (
            {
                "agent": {"metrics": {"scope": "pod"}},
                "podMonitor": {"enabled": True},
                "metricsTls": {"existingSecret": "s"},
            },
            "metricsTls.serverName",
        ),
        (
            {"console": {"enabled": True, "nodeSelector": {"a": "b"}}},
            "console.tls.existingSecret: .*console.allowPlain",
        ),
        (
            {
                "console": {
                    "enabled": True,
                    "nodeSelector": {"a": "b"},
                    "allowPlain": True,
                    "tls": {"existingSecret": "s"},
                }
            },
            "console.tls.existingSecret and console.allowPlain",
        ),
        ({"redis": {"enabled": False}}, "controller.enabled"),
        ({"redis": {"enabled": True}, "externalRedis": {"url": "redis://x"}}, "redis.enabled and externalRedis"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(values, key):
    with pytest.raises(helm_python.HelmRenderError, match=key):
        chart.render(values, name="r", namespace="ns")


def test_every_value_has_a_schema_and_the_defaults_fit_it():
    chart.validate_schema({})
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: dict, node: dict, path: str) -> None:
        for key, value in values.items():
            assert key in node["properties"], f"{path}{key}"
            if isinstance(value, dict) and "properties" in node["properties"][key]:
                compare(value, node["properties"][key], f"{path}{key}.")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


# case: HLM-09
@pytest.mark.parametrize("case", CASES)
def test_pods_have_least_rights(case):
    for name, pod in pods(render(CASES[case])).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert "hostNetwork" not in spec
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "initContainers" not in spec
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]
            assert all("hostPort" not in port for port in container.get("ports", []))
        uses_host_path = any("hostPath" in volume for volume in spec.get("volumes", []))
        assert uses_host_path == name.endswith(("-agent", "-console")), "the one exception, stated in values.yaml"
        if not uses_host_path:
            assert spec["securityContext"]["runAsNonRoot"] is True


# case: HLM-12
@pytest.mark.parametrize("case", CASES)
def test_no_right_on_the_kubernetes_api_is_asked_for(case):
    kinds = {document["kind"] for document in render(CASES[case])}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


# case: HLM-07
# case: HLM-11
def test_only_stable_apis_and_no_lookup():
    for path in (CHART / "templates").iterdir():
        assert "lookup " not in path.read_text()
    for case in CASES.values():
        for document in render(case):
            assert document["apiVersion"] in ("v1", "apps/v1", "networking.k8s.io/v1", "monitoring.coreos.com/v1")
    assert not {d["kind"] for d in render({})} & set(MONITORS)


# case: HLM-01
def test_gpu_taints_are_tolerated_and_values_add_to_them():
    extra = {"key": "team", "operator": "Exists"}
    spec = one(render({"agent": {"extraTolerations": [extra]}}), "DaemonSet")["spec"]["template"]["spec"]
    assert {toleration["key"] for toleration in spec["tolerations"]} == {"nvidia.com/gpu", "amd.com/gpu", "team"}
    assert "DESIRED 0" in notes({})


# case: HLM-03
@pytest.mark.parametrize("name", ["a", "my-fp8watch", "r" * 53])
@pytest.mark.parametrize("override", [{}, {"nameOverride": "watch"}, {"fullnameOverride": "f" * 63}])
@pytest.mark.parametrize("monitor", ["serviceMonitor", "podMonitor"])
def test_monitors_select_what_is_there(name, override, monitor):
    values = {**override, "agent": {"metrics": {"scope": "pod"}}, monitor: {"enabled": True}}
    documents = render(values, name=name)
    labels = one(documents, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in one(documents, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["ports"]}
    if monitor == "serviceMonitor":
        service, found = one(documents, "Service", "-agent"), one(documents, "ServiceMonitor", "-agent")
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        labels = service["metadata"]["labels"]
        ports = {port["name"] for port in service["spec"]["ports"]}
        endpoints = found["spec"]["endpoints"]
    else:
        found = one(documents, "PodMonitor", "-agent")
        endpoints = found["spec"]["podMetricsEndpoints"]
    assert found["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert found["spec"]["namespaceSelector"]["matchNames"] == ["ns"]
    assert {endpoint["port"] for endpoint in endpoints} <= ports
    assert all(len(document["metadata"]["name"]) <= 63 for document in documents)


def test_two_releases_do_not_select_each_other():
    first, second = (one(render({}, name=name), "DaemonSet") for name in ("a", "b"))
    selector = first["spec"]["selector"]["matchLabels"]
    assert selector.items() <= first["spec"]["template"]["metadata"]["labels"].items()
    assert not selector.items() <= second["spec"]["template"]["metadata"]["labels"].items()


# case: HLM-04
def test_monitors_take_the_labels_an_operator_selects_by():
    documents = render(CASES["scraped"])
    assert one(documents, "PodMonitor", "-agent")["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    for suffix in ("-agent", "-controller"):
        found = one(render(CASES["everything"]), "ServiceMonitor", suffix)
        assert found["metadata"]["namespace"] == "monitoring"
    assert "If it is not scraped" in notes(CASES["scraped"])


# case: HLM-05
def test_the_metrics_port_is_one_value_and_closed_by_default():
    container = one(render({}), "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    assert "ports" not in container
    assert container["args"][container["args"].index("--metrics-host") + 1] == "127.0.0.1"
    values = {"agent": {"metrics": {"scope": "pod", "port": 9999}}, "networkPolicy": {"enabled": True}}
    documents = render({**values, "serviceMonitor": {"enabled": True}})
    container = one(documents, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    assert [port["containerPort"] for port in container["ports"]] == [9999]
    assert container["args"][container["args"].index("--metrics-port") + 1] == "9999"
    assert container["args"][container["args"].index("--metrics-host") + 1] == "$(POD_IP)"
    assert "POD_IP" in {variable["name"] for variable in container["env"]}
    assert one(documents, "Service", "-agent")["spec"]["ports"][0]["port"] == 9999
    assert one(documents, "NetworkPolicy", "-agent")["spec"]["ingress"][0]["ports"][0]["port"] == 9999


@pytest.mark.parametrize(("suffix", "app"), [("agent", agent_app), ("console", console_app)])
def test_containers_run_commands_that_exist_with_options_that_exist(suffix, app):
    container = pods(render(CASES["everything"]))[f"r-fp8watch-{suffix}"]["spec"]["containers"][0]
    assert container["command"] == ["fp8watch"]
    assert container["args"][0] == suffix
    group = typer.main.get_command(app)
    arguments = [argument.replace("$(POD_IP)", "10.0.0.1") for argument in container["args"][1:]]
    context = group.make_context("fp8watch", arguments, resilient_parsing=False)
    known = {option for parameter in group.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= known
    assert context.params["directory"] == Path("/var/lib/fp8watch")


def test_socket_folder_is_the_nodes_and_the_notes_say_how_to_mount_it():
    spec = one(render({"agent": {"socketHostPath": "/srv/w"}}), "DaemonSet")["spec"]["template"]["spec"]
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "socket")
    assert volume["hostPath"] == {"path": "/srv/w", "type": "DirectoryOrCreate"}
    mount = next(m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "socket")
    arguments = spec["containers"][0]["args"]
    assert arguments[arguments.index("--socket") + 1] == f"unix://{mount['mountPath']}/agent.sock"
    assert "hostPath: {path: /srv/w" in notes({"agent": {"socketHostPath": "/srv/w"}})


def test_controller_and_redis_are_there_and_the_agents_forward_to_them():
    documents = render({})
    assert pods(documents)["r-fp8watch-controller"]["spec"]["containers"][0]["args"][0] == "controller"
    assert one(documents, "Deployment", "-controller")["spec"]["replicas"] == 2
    variables = {v["name"]: v for v in one(documents, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert variables["FP8WATCH_REDIS_URL"]["value"] == "redis://r-fp8watch-redis:6379/0"
    assert variables["FP8WATCH_NODE"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert "doctor --cluster" in notes({})


def test_without_the_controller_every_agent_decides_for_itself():
    documents = render(CASES["single-nodes"])
    assert list(pods(documents)) == ["r-fp8watch-agent"]
    names = {v["name"] for v in one(documents, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert "FP8WATCH_REDIS_URL" not in names
    assert "controller is off" in notes(CASES["single-nodes"])


def test_the_controller_runs_with_options_that_exist():
    container = pods(render(CASES["everything"]))["r-fp8watch-controller"]["spec"]["containers"][0]
    assert container["command"] == ["fp8watch"]
    assert container["args"][0] == "controller"
    arguments = [
        argument.replace("$(POD_IP)", "10.0.0.1").replace("$(POD_NAME)", "p") for argument in container["args"][1:]
    ]
    context = typer.main.get_command(controller_app).make_context("fp8watch", arguments, resilient_parsing=False)
    assert context.params["name"] == "p"
    assert context.params["metrics_port"] == container["ports"][0]["containerPort"] == 9465


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"redis": {"enabled": True}}, {"value": "redis://r-fp8watch-redis:6379/0"}),
        (
            {"redis": {"enabled": False}, "externalRedis": {"url": "rediss+sentinel://h:1/s/0"}},
            {"value": "rediss+sentinel://h:1/s/0"},
        ),
        (
            {"redis": {"enabled": False}, "externalRedis": {"existingSecret": "s", "existingSecretKey": "k"}},
            {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ),
    ],
)
def test_the_controller_finds_redis(values, expected):
    documents = render({"controller": {"enabled": True}, **values})
    container = pods(documents)["r-fp8watch-controller"]["spec"]["containers"][0]
    variable = next(variable for variable in container["env"] if variable["name"] == "FP8WATCH_REDIS_URL")
    assert variable == {"name": "FP8WATCH_REDIS_URL", **expected}


def test_redis_keeps_its_data():
    stateful = one(render({"redis": {"enabled": True}}), "StatefulSet")
    arguments = stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--appendonly") + 1] == "yes"
    assert stateful["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "10Gi"


def test_the_dashboard_survives_the_template():
    config = one(render({"dashboard": {"enabled": True}}), "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["data"]["fp8watch.json"] == grafana.text()


def test_network_policies_cover_what_runs():
    documents = render(CASES["everything"])
    policies = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "NetworkPolicy"}
    templates = pods(documents)
    assert policies.keys() == templates.keys()
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"].items() <= templates[name]["metadata"]["labels"].items()
    allowed = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in policies["r-fp8watch-redis"]["ingress"][0]["from"]
    }
    assert allowed == {"agent", "controller"}
