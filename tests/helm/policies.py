"""What must hold of everything that the chart makes, whatever the values: one function a policy, each of
which says what breaks it. They look at rendered objects only, as a cluster's admission control would.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network, ip_network

from tests.helm.rendering import Object, Pod, Release

Policy = Callable[[Release], Iterator[str]]

SERVING = ("router", "worker")
LONG_RUNNING = (*SERVING, "head", "redis")
TALKS_TO_THE_API_SERVER = {"router", "picker", "certify", "uninstall"}
RULES_ALLOWED = {
    "router": [(("discovery.k8s.io",), ("endpointslices",), ("list", "watch"))],
    "picker": [
        (("inference.networking.k8s.io",), ("inferencepools",), ("list",)),
        (("",), ("pods",), ("list",)),
    ],
    "certify": [(("",), ("secrets",), ("get", "patch"))],
    "head": [
        (("ray.io",), ("rayclusters",), ("get",)),
        (("",), ("events",), ("create",)),
    ],
    "uninstall": [
        (("ray.io",), ("rayclusters",), ("get", "delete", "patch")),
        (("",), ("pods",), ("list",)),
    ],
}
_SECRET_NAMES = re.compile(r"(?i)(token|password|secret|api_?key)$")


def no_pod_is_privileged(release: Release) -> Iterator[str]:
    """The Restricted Pod Security Standard, and a root file system that cannot be written."""
    for pod in release.pods():
        outer = pod.spec.get("securityContext", {})
        if outer.get("runAsNonRoot") is not True or outer.get("runAsUser") == 0:
            yield f"{pod.of} may run as root"
        if outer.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pod.of} has no seccomp profile"
        for space in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(space):
                yield f"{pod.of} shares the node's {space}"
        for volume in pod.spec.get("volumes", []):
            if "hostPath" in volume:
                yield f"{pod.of} mounts the node's {volume['hostPath']['path']}"
        for container in pod.containers:
            yield from (f"{pod.of} {container['name']}: {what}" for what in _loose(container))


def _loose(container: Object) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "may write to its root file system"
    if own.get("runAsUser") == 0:
        yield "runs as root"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        yield "has capabilities"


def no_token_where_none_is_needed(release: Release) -> Iterator[str]:
    for account in release.of_kind("ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount/{account['metadata']['name']} hands its token to every pod"
    for pod in release.pods():
        wanted = pod.component in TALKS_TO_THE_API_SERVER
        if pod.spec.get("automountServiceAccountToken") is not wanted:
            yield f"{pod.of}: automountServiceAccountToken is not {str(wanted).lower()}"
        for volume in pod.spec.get("volumes", []):
            sources = volume.get("projected", {}).get("sources", [])
            if not any("serviceAccountToken" in each for each in sources):
                continue
            for container in pod.containers:
                mounts = [mount["name"] for mount in container.get("volumeMounts", [])]
                if volume["name"] in mounts and container["name"] != "autoscaler":
                    yield f"{pod.of} {container['name']} has the autoscaler's token"


def rights_are_the_least(release: Release) -> Iterator[str]:
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        yield from (f"{kind}/{each['metadata']['name']}" for each in release.of_kind(kind))
    for role in release.of_kind("Role"):
        component = role["metadata"]["labels"]["app.kubernetes.io/component"]
        rules = [
            tuple(tuple(rule[key]) for key in ("apiGroups", "resources", "verbs")) for rule in role["rules"]
        ]
        if rules != RULES_ALLOWED.get(component):
            yield f"Role/{role['metadata']['name']} allows {rules}"
        for rule in role["rules"]:
            for kind in ("secrets", "rayclusters"):
                if kind in rule["resources"] and not rule.get("resourceNames"):
                    yield f"Role/{role['metadata']['name']} is for all {kind}"


def limits_are_everywhere(release: Release) -> Iterator[str]:
    for pod in release.pods():
        for container in pod.containers:
            for kind in ("requests", "limits"):
                for what in ("cpu", "memory"):
                    if what not in container.get("resources", {}).get(kind, {}):
                        yield f"{pod.of} {container['name']} has no {what} in its {kind}"
        for volume in pod.spec.get("volumes", []):
            if "emptyDir" in volume and not (volume["emptyDir"] or {}).get("sizeLimit"):
                yield f"{pod.of}: the volume {volume['name']} has no limit"


def images_are_named_exactly(release: Release) -> Iterator[str]:
    for pod in release.pods():
        for container in pod.containers:
            image = container["image"]
            name, _, tag = image.rpartition("/")[2].partition(":")
            if "@sha256:" not in image and (not name or tag in ("", "latest")):
                yield f"{pod.of} {container['name']} runs {image}"


def no_secret_is_in_a_variable_or_an_argument(release: Release) -> Iterator[str]:
    for pod in release.pods():
        for container in pod.containers:
            yield from (f"{pod.of} {container['name']}: {what}" for what in _told(container))
    for cluster in release.of_kind("RayCluster"):
        # KubeRay would make a variable of it.
        if "redisPassword" in cluster["spec"].get("gcsFaultToleranceOptions", {}):
            yield f"RayCluster/{cluster['metadata']['name']} tells Redis' password"
        if cluster["spec"].get("authOptions"):
            yield f"RayCluster/{cluster['metadata']['name']} has KubeRay tell Ray's token"
    texts = {
        f"{each['kind']}/{each['metadata']['name']}": json.dumps(each)
        for each in release.objects
        if each["kind"] != "Secret"
    }
    for secret in release.of_kind("Secret"):
        for key, encoded in secret.get("data", {}).items():
            plain = base64.b64decode(encoded).decode().strip()
            for what, text in texts.items():
                if plain in text or encoded in text:
                    yield f"{what} holds {key} of Secret/{secret['metadata']['name']}"


def _told(container: Object) -> Iterator[str]:
    for source in container.get("envFrom", []):
        if "secretRef" in source:
            yield f"all of the secret {source['secretRef']['name']} in its environment"
    for variable in container.get("env", []):
        if "secretKeyRef" in variable.get("valueFrom", {}):
            yield f"the variable {variable['name']} from a secret"
        elif _SECRET_NAMES.search(variable["name"]) and "value" in variable:
            yield f"the variable {variable['name']} in clear"
    for argument in container.get("args", []):
        name, equals, _ = argument.partition("=")
        if equals and _SECRET_NAMES.search(name) and name != "--secret":
            yield f"the argument {name} in clear"


def files_of_secrets_are_read_by_their_group_alone(release: Release) -> Iterator[str]:
    """The group is the pod's fsGroup, which the kubelet gives the files."""
    for pod in release.pods():
        for volume in pod.spec.get("volumes", []):
            if "secret" not in volume:
                continue
            if volume["secret"].get("defaultMode") != 0o440:
                yield f"{pod.of}: files of {volume['name']} are not of mode 0440"
            if "fsGroup" not in pod.spec.get("securityContext", {}):
                yield f"{pod.of} has no fsGroup, and cannot read {volume['name']}"


def what_serves_is_probed(release: Release) -> Iterator[str]:
    for pod in release.pods():
        if pod.component not in LONG_RUNNING:
            continue
        main = pod.spec["containers"][0]
        wanted = ["livenessProbe", "readinessProbe"]
        wanted += ["startupProbe"] if pod.component != "redis" else []
        for probe in wanted:
            if probe not in main:
                yield f"{pod.of} has no {probe}"


def what_serves_has_a_disruption_budget(release: Release) -> Iterator[str]:
    budgets = release.of_kind("PodDisruptionBudget")
    for pod in release.pods():
        if pod.component not in SERVING:
            continue
        covering = [each for each in budgets if _selects(each["spec"]["selector"], pod)]
        if len(covering) != 1:
            yield f"{pod.of} has {len(covering)} disruption budgets"
        for budget in covering:
            # Kubernetes cannot ask a RayCluster how many pods there should be.
            if pod.of.startswith("RayCluster/") and not isinstance(budget["spec"].get("minAvailable"), int):
                yield f"{pod.of}: its disruption budget needs a number in minAvailable"


def every_pod_has_a_network_policy(release: Release) -> Iterator[str]:
    policies = release.of_kind("NetworkPolicy")
    for pod in release.pods():
        covering = [each for each in policies if _selects(each["spec"]["podSelector"], pod)]
        kinds = {kind for each in covering for kind in each["spec"]["policyTypes"]}
        if kinds != {"Ingress", "Egress"}:
            yield f"{pod.of} is free to send or to receive"
        for policy in covering:
            for rule in policy["spec"].get("egress", []):
                if not rule.get("to"):
                    yield f"{pod.of} may send to everybody"
            for rule in policy["spec"].get("ingress", []):
                if not rule.get("from") and pod.component != "router":
                    yield f"{pod.of} is open to everybody"


def nothing_is_sent_beyond_private_addresses(release: Release) -> Iterator[str]:
    """But for downloads of models, at the port of HTTPS, by the Job that is there for it if there is one, and
    by the Job that reads their headers before. Each rule names its ports, but for those between pods of the
    release."""
    downloads = any(pod.component == "models" for pod in release.pods())
    for policy in release.of_kind("NetworkPolicy"):
        own = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in policy["spec"].get("egress", []):
            blocks = [peer["ipBlock"]["cidr"] for peer in rule.get("to", []) if "ipBlock" in peer]
            if not blocks:
                continue
            if not _ports(rule):
                yield f"{own} pods may send to {blocks} at all ports"
            fetches = own == "fit" or (own == "models" if downloads else own in SERVING)
            if not (fetches and _ports(rule) == [443]) and not all(map(_is_private, blocks)):
                yield f"{own} pods may send to {blocks} at {_ports(rule)}"


def other_namespaces_are_named_with_a_port(release: Release) -> Iterator[str]:
    for policy in release.of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            for peer in rule.get("to", []):
                if "namespaceSelector" not in peer:
                    continue
                if not (_ports(rule) and peer["namespaceSelector"].get("matchLabels")):
                    yield f"NetworkPolicy/{policy['metadata']['name']} lets pods send to another namespace"


def the_api_server_is_reached_by_those_who_need_it(release: Release) -> Iterator[str]:
    needs = TALKS_TO_THE_API_SERVER | {"head"}
    for policy in release.of_kind("NetworkPolicy"):
        component = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in policy["spec"].get("egress", []):
            ports = {port["port"] for port in rule.get("ports", [])}
            if 6443 in ports and component not in needs:
                yield f"NetworkPolicy/{policy['metadata']['name']} lets {component} pods reach the API server"


def the_head_is_reached_by_routers_at_the_planners_port_only(release: Release) -> Iterator[str]:
    """Ray's own pods aside, which take ports as they find them free."""
    planner = [
        port["containerPort"]
        for pod in release.pods()
        for container in pod.containers
        for port in container.get("ports", [])
        if (pod.component, port["name"]) == ("head", "planner")
    ]
    for policy in release.of_kind("NetworkPolicy"):
        own = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in policy["spec"].get("ingress", []) if own == "head" else []:
            others = _components(rule.get("from", []))
            if others != {"worker"} and (others, _ports(rule)) != ({"router"}, planner):
                yield f"the head is open to {sorted(others)} at {_ports(rule) or 'all ports'}"
        for rule in policy["spec"].get("egress", []) if own != "worker" else []:
            if "head" in _components(rule.get("to", [])) and (own, _ports(rule)) != ("router", planner):
                yield f"{own} pods may send to the head at {_ports(rule) or 'all ports'}"


def _is_private(cidr: str) -> bool:
    """Whether all its addresses are private, or shared within a provider's network (RFC 6598)."""
    network = ip_network(cidr)
    shared = isinstance(network, IPv4Network) and network.subnet_of(IPv4Network("100.64.0.0/10"))
    return shared or network.is_private


def _components(peers: list[Object]) -> set[str]:
    """Which pods a rule is for; "*" for what is not one component's pods."""
    labels = [each.get("podSelector", {}).get("matchLabels", {}) for each in peers]
    return {each.get("app.kubernetes.io/component", "*") for each in labels}


def _ports(rule: Object) -> list[int]:
    return [port["port"] for port in rule.get("ports", [])]


def _selects(selector: Object, pod: Pod) -> bool:
    return bool(selector["matchLabels"].items() <= pod.labels.items())


POLICIES: tuple[Policy, ...] = (
    no_pod_is_privileged,
    no_token_where_none_is_needed,
    rights_are_the_least,
    limits_are_everywhere,
    images_are_named_exactly,
    no_secret_is_in_a_variable_or_an_argument,
    files_of_secrets_are_read_by_their_group_alone,
    what_serves_is_probed,
    what_serves_has_a_disruption_budget,
    every_pod_has_a_network_policy,
    nothing_is_sent_beyond_private_addresses,
    other_namespaces_are_named_with_a_port,
    the_api_server_is_reached_by_those_who_need_it,
    the_head_is_reached_by_routers_at_the_planners_port_only,
)
