"""The Helm chart: its rendered objects are valid and consistent, and the service accepts their settings."""

import base64
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.helm.kuberay import RAY_CLUSTER
from windlass.service.installation.settings import Settings, load_settings

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: Helm, as a library")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="it has Kubernetes' schemas")
jsonschema = pytest.importorskip("jsonschema")

REPOSITORY = Path(__file__).parents[3]
CHART = REPOSITORY / "helm/windlass"
RELEASE, NAMESPACE = "box1", "research"
# The oldest version that the chart supports, and a newer one.
KUBERNETES_VERSIONS = ("1.28", "1.34")

DATABASE = {"existingSecret": "windlass-database"}
# Values that administrators may give; each must lint, render, and be valid.
CASES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "no GPU": {"box": {"gpus": 0}},
    "several GPUs and SSDs": {
        "box": {
            "gpus": 4,
            "runtimeClassName": "nvidia",
            "ssds": [{"hostPath": "/nvme0/w"}, {"hostPath": "/nvme1/w"}, {"existingClaim": "nvme2"}],
            "nodeSelector": {"kubernetes.io/hostname": "box-1"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        }
    },
    "PostgreSQL": {"database": DATABASE, "api": {"replicas": 3}, "home": {"accessMode": "ReadWriteMany"}},
    "claims and Secrets that exist": {
        "home": {"existingClaim": "home"},
        "ray": {"existingTokenSecret": "token"},
        "imagePullSecrets": ["registry"],
    },
    "no NetworkPolicy": {"networkPolicy": {"enabled": False}},
    "a NetworkPolicy for nobody": {"networkPolicy": {"from": []}},
    "metrics": {
        "metrics": {
            "annotations": True,
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "keySecret": {"name": "key"}},
        }
    },
    "every setting": {
        "settings": {
            "num_cpu_optimizers": 1,
            "compute_threads": 1,
            "optimizer_threads": 1,
            "cpu_ranks": 2,
            "gpu_memory_gib": 20.5,
            "max_file_mib": 1048576,
            "keep_jobs_days": 90,
            "keep_checkpoints_days": 0.5,
            "keep_files_days": 30,
            "ssd_endurance_tbw": 600,
            "webhook_private_addresses": True,
            "log_format": "text",
        },
    },
}
# Set by other values of the chart, or useless there: `windlass up` measures, and TLS ends at an Ingress.
SET_ELSEWHERE = {"home", "host", "host_names", "port", "database_url", "ray_address", "ssd_dirs", "host_memory_gib"}
# In a cluster of Kubernetes, boxes are its nodes.
NOT_SET = {"models_dir", "measure", "tls_certificate", "tls_key", "cluster_host", "cluster_port", "box_lease_minutes"}
NOT_SET |= {"link_host", "link_ports"}

Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The objects of one release."""

    objects: list[Object]
    notes: str

    def one(self, kind: str, name: str = "box1-windlass") -> Object:
        found = [each for each in self.objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        assert len(found) == 1, f"{kind} {name}: {len(found)}"
        return found[0]

    def kinds(self) -> list[str]:
        return [each["kind"] for each in self.objects]

    @property
    def head(self) -> Object:
        """The pod group of the head node."""
        group: Object = self.one("RayCluster")["spec"]["headGroupSpec"]
        return group

    @property
    def box(self) -> Object:
        """The pod group of the only worker."""
        (group,) = self.one("RayCluster")["spec"]["workerGroupSpecs"]
        return dict(group)

    def pods(self) -> dict[str, Object]:
        """The pod templates, by component."""
        templates = (self.one("Deployment", "box1-windlass-api")["spec"], self.head, self.box)
        return {
            each["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: each["template"]
            for each in templates
        }

    def container(self, name: str) -> Object:
        (found,) = [c for pod in self.pods().values() for c in pod["spec"]["containers"] if c["name"] == name]
        return dict(found)

    def environment(self, container: str) -> dict[str, str]:
        """The environment of the container; Secrets appear as a mark."""
        found: dict[str, str] = {}
        for source in self.container(container).get("envFrom", []):
            found |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in self.container(container)["env"]:
            secret = variable.get("valueFrom", {}).get("secretKeyRef")
            found[variable["name"]] = variable["value"] if secret is None else f"<{secret['name']}.{secret['key']}>"
        return found


def render(values: dict[str, Any] | None = None) -> Rendered:
    with helm.Chart.load(CHART) as chart:
        files: dict[str, str] = chart.render(values=values or {}, name=RELEASE, namespace=NAMESPACE)
    notes = files.pop("windlass/templates/NOTES.txt")
    objects = [each for file in files.values() for each in yaml.safe_load_all(file) if each]
    return Rendered(objects, notes)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Rendered:
    return render(CASES[request.param])


@pytest.fixture(scope="module")
def default() -> Rendered:
    return render()


@pytest.mark.parametrize("name", CASES)
def test_chart_lints(name: str) -> None:
    report = helm.lint(CHART, CASES[name], strict=True, kube_version=f"v{KUBERNETES_VERSIONS[0]}.0")
    assert report["errors"] == []
    # Only an information message: there is no icon.
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.short("*-1.34", "every setting-1.28")
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_objects_are_valid(case: Rendered, version: str) -> None:
    """By Kubernetes' own schemas, which in strict form refuse unknown fields."""
    for each in case.objects:
        if each["apiVersion"] in ("ray.io/v1", "monitoring.coreos.com/v1"):
            continue
        kubernetes_validate.validate(each, version, strict=True)
    for pod in case.pods().values():
        # Schemas are looked up by kind, and a pod template is not an object of its own.
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
        kubernetes_validate.validate(template, version, strict=True)


def test_the_ray_cluster_has_the_fields_that_kuberay_knows(case: Rendered) -> None:
    jsonschema.validate(case.one("RayCluster"), RAY_CLUSTER)


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda spec: spec.update(workerGroups=[]), "'workerGroups' was unexpected"),
        (lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), "0 is not of type 'string'"),
        (lambda spec: spec["workerGroupSpecs"][0].update(replicas="1"), "'1' is not of type 'integer'"),
    ],
)
def test_the_check_of_ray_clusters_finds_what_is_wrong(default: Rendered, break_it: Any, complaint: str) -> None:
    cluster = json.loads(json.dumps(default.one("RayCluster")))
    break_it(cluster["spec"])
    with pytest.raises(jsonschema.ValidationError, match=complaint):
        jsonschema.validate(cluster, RAY_CLUSTER)


def test_chart_names_and_selectors_match(case: Rendered) -> None:
    """Every object that a pod uses is in the release, and each selector finds its pods."""
    made = {(each["kind"], each["metadata"]["name"]) for each in case.objects}
    assert len(made) == len(case.objects)
    for pod in case.pods().values():
        spec = pod["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in made
        volumes = {volume["name"] for volume in spec["volumes"]}
        claims = [v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v]
        assert all(("PersistentVolumeClaim", name) in made for name in claims if name.startswith(RELEASE))
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            secrets = [v["valueFrom"]["secretKeyRef"]["name"] for v in container["env"] if "valueFrom" in v]
            assert all(("Secret", name) in made for name in secrets if name.startswith(RELEASE))
    labels = {name: pod["metadata"]["labels"] for name, pod in case.pods().items()}
    assert _selected(case.one("Service")["spec"]["selector"], labels) == {"api"}
    assert _selected(case.one("Deployment", "box1-windlass-api")["spec"]["selector"]["matchLabels"], labels) == {"api"}
    for each in case.objects:
        if each["kind"] == "ServiceMonitor":
            service = {"service": case.one("Service")["metadata"]["labels"]}
            assert _selected(each["spec"]["selector"]["matchLabels"], service) == {"service"}


def _selected(selector: dict[str, str], labels: dict[str, dict[str, str]]) -> set[str]:
    return {name for name, found in labels.items() if selector.items() <= found.items()}


def test_pods_have_minimal_rights(case: Rendered) -> None:
    for pod in case.pods().values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # All pods run as one user, who alone may use their sockets and shared memory.
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1000
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert case.one("ServiceAccount")["automountServiceAccountToken"] is False


def test_the_environment_is_what_settings_take(case: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("api", "dispatcher"):
        environment = case.environment(name)
        assert environment.pop("WINDLASS_HOME") == "/data/home"
        environment.pop("WINDLASS_HOST", None)  # a public address is accepted only with API keys
        with monkeypatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, "postgresql://host/name" if value.startswith("<") else value)
            settings = load_settings(tmp_path)
        assert settings.host_memory_gib == 48
        assert [str(path) for path in settings.ssd_dirs] == [f"/ssds/{i}" for i in range(len(settings.ssd_dirs))]
        mounts = [mount["mountPath"] for mount in case.container("dispatcher")["volumeMounts"]]
        assert {str(path) for path in settings.ssd_dirs} == {path for path in mounts if path.startswith("/ssds/")}


def test_numbers_and_lists_reach_the_environment_as_they_were_given() -> None:
    values = {"settings": {"max_file_mib": 1048576, "gpu_memory_gib": 20.5, "ssd_endurance_tbw": [600, 1200.5]}}
    environment = render(values).environment("api")
    assert environment["WINDLASS_MAX_FILE_MIB"] == "1048576"
    assert environment["WINDLASS_GPU_MEMORY_GIB"] == "20.5"
    assert environment["WINDLASS_SSD_ENDURANCE_TBW"] == "600,1200.5"


def test_every_setting_has_a_chart_value() -> None:
    with helm.Chart.load(CHART) as chart:
        settings = chart.schema["properties"]["settings"]["properties"].keys()
    assert set(Settings.model_fields) - settings - SET_ELSEWHERE - NOT_SET == set()
    assert settings & (SET_ELSEWHERE | NOT_SET) == set()


def test_settings_of_threads_are_for_the_box_alone() -> None:
    """They are compared with the machine's cores, and the API's machine may have fewer."""
    rendered = render({"settings": {"compute_threads": 12, "num_cpu_optimizers": 2, "optimizer_threads": 2}})
    assert rendered.environment("dispatcher")["WINDLASS_COMPUTE_THREADS"] == "12"
    assert rendered.environment("ray-worker")["WINDLASS_OPTIMIZER_THREADS"] == "2"
    assert [name for name in rendered.environment("api") if name.endswith(("THREADS", "OPTIMIZERS"))] == []


@pytest.mark.parametrize(
    ("num_gpus", "settings", "num_devices"),
    [(0, {}, 1), (1, {}, 1), (4, {}, 4), (0, {"cpu_ranks": 2}, 2), (4, {"cpu_ranks": 2}, 4)],
)
def test_ray_offers_the_devices_of_the_box(num_gpus: int, settings: Object, num_devices: int) -> None:
    rendered = render({"box": {"gpus": num_gpus, "cpus": 24}, "settings": settings})
    options = rendered.box["rayStartParams"]
    # KubeRay puts it into a shell's command line.
    (resources,) = shlex.split(options["resources"])
    assert json.loads(resources) == {"device": num_devices}
    assert (options["num-gpus"], options["num-cpus"]) == (str(num_gpus), "24")
    limits = rendered.container("ray-worker")["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 0) == num_gpus
    assert (rendered.head["rayStartParams"]["num-cpus"], rendered.head["rayStartParams"]["num-gpus"]) == ("0", "0")
    assert "resources" not in rendered.head["rayStartParams"]


def test_the_dispatcher_stands_beside_the_box_s_ray_node(default: Rendered) -> None:
    """One pod, with the same sockets, shared memory, SSDs, home and processes; Ray's container is the first."""
    pod = default.box["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["ray-worker", "dispatcher"]
    ray, dispatcher = pod["containers"]
    assert ray["volumeMounts"] == dispatcher["volumeMounts"]
    assert {"/data", "/dev/shm", "/tmp", "/ssds/0"} == {mount["mountPath"] for mount in ray["volumeMounts"]}
    assert pod["shareProcessNamespace"] is True
    assert ray["image"] == dispatcher["image"] == default.container("ray-head")["image"] == "windlass:0.1.0"
    # KubeRay's name for the head's service.
    assert default.environment("dispatcher")["WINDLASS_RAY_ADDRESS"] == "box1-windlass-head-svc:6379"
    group = default.box
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 1


def test_kuberay_s_own_labels_are_left_alone(default: Rendered) -> None:
    for name in ("box", "head"):
        assert default.pods()[name]["metadata"]["labels"] == {
            "app.kubernetes.io/instance": RELEASE,
            "app.kubernetes.io/component": name,
        }


def test_shared_memory_has_the_size_that_jobs_are_told() -> None:
    rendered = render({"box": {"memoryGib": 100, "sharedMemoryGib": 80}})
    volumes = {volume["name"]: volume for volume in rendered.box["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "80Gi"}
    assert rendered.environment("dispatcher")["WINDLASS_HOST_MEMORY_GIB"] == "80"
    assert rendered.container("ray-worker")["resources"]["limits"]["memory"] == "100Gi"


def test_directories_of_the_node_must_exist_and_claims_are_mounted() -> None:
    rendered = render({"box": {"ssds": [{"hostPath": "/nvme0/w"}, {"existingClaim": "nvme1"}]}})
    volumes = {volume["name"]: volume for volume in rendered.box["template"]["spec"]["volumes"]}
    assert volumes["ssd-0"]["hostPath"] == {"path": "/nvme0/w", "type": "Directory"}
    assert volumes["ssd-1"]["persistentVolumeClaim"] == {"claimName": "nvme1"}
    assert "box.nodeSelector names no node" in rendered.notes
    pinned = {"ssds": [{"hostPath": "/nvme0/w"}], "nodeSelector": {"kubernetes.io/hostname": "box-1"}}
    assert "box.nodeSelector" not in render({"box": pinned}).notes


def test_the_database_s_url_comes_from_its_secret_and_not_to_jobs() -> None:
    rendered = render({"database": {"existingSecret": "pg", "key": "uri"}})
    for name in ("api", "dispatcher"):
        assert rendered.environment(name)["WINDLASS_DATABASE_URL"] == "<pg.uri>"
    for name in ("ray-worker", "ray-head"):
        assert "WINDLASS_DATABASE_URL" not in rendered.environment(name)


def test_every_ray_process_asks_for_the_token(default: Rendered) -> None:
    for name in ("ray-worker", "ray-head", "dispatcher"):
        environment = default.environment(name)
        assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN"]) == (
            "token",
            "<box1-windlass-ray-token.token>",
        )
    assert "RAY_AUTH_TOKEN" not in default.environment("api")
    tokens = [base64.b64decode(render().one("Secret", "box1-windlass-ray-token")["data"]["token"]) for _ in range(2)]
    assert len(set(tokens)) == 2
    assert all(len(token) == 48 for token in tokens)
    given = render({"ray": {"existingTokenSecret": "mine"}})
    assert "Secret" not in given.kinds()
    assert given.environment("ray-head")["RAY_AUTH_TOKEN"] == "<mine.token>"


def test_the_api_is_where_the_home_can_be_mounted() -> None:
    """A volume that only one node can mount pins the API to the worker's node; any other leaves it free."""
    pod = render().pods()["api"]["spec"]
    (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    box = render().pods()["box"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"] == box
    shared = render({"home": {"accessMode": "ReadWriteMany"}, "database": DATABASE})
    assert "affinity" not in shared.pods()["api"]["spec"]
    assert shared.one("PersistentVolumeClaim", "box1-windlass-home")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_probes_ask_for_health_by_a_host_that_the_service_takes(default: Rendered) -> None:
    api = default.container("api")
    paths = {name: api[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    for name in paths:
        assert api[f"{name}Probe"]["httpGet"]["httpHeaders"] == [{"name": "Host", "value": "localhost"}]


def test_the_api_is_told_its_names() -> None:
    environment = render({"api": {"hostNames": ["windlass.example.org"]}}).environment("api")
    assert environment["WINDLASS_HOST"] == "0.0.0.0"
    assert environment["WINDLASS_HOST_NAMES"].split(",") == [
        "box1-windlass",
        "box1-windlass.research",
        "box1-windlass.research.svc",
        "box1-windlass.research.svc.cluster.local",
        "windlass.example.org",
    ]


def test_network_policies_let_in_whom_they_name() -> None:
    policies = [each for each in render().objects if each["kind"] == "NetworkPolicy"]
    api, ray = (policy["spec"] for policy in policies)
    assert api["ingress"] == [{"ports": [{"port": "http"}], "from": [{"podSelector": {}}]}]
    assert ray["ingress"] == [{"from": [{"podSelector": ray["podSelector"]}]}]
    values = {"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]}
    (changed, _) = (each for each in render({"networkPolicy": values}).objects if each["kind"] == "NetworkPolicy")
    assert changed["spec"]["ingress"][0]["from"] == values["from"]
    (closed, _) = (each for each in render({"networkPolicy": {"from": []}}).objects if each["kind"] == "NetworkPolicy")
    assert closed["spec"]["ingress"] == []
    assert "NetworkPolicy" not in render({"networkPolicy": {"enabled": False}}).kinds()


def test_metrics_scraper_uses_an_api_key() -> None:
    monitor = {"enabled": True, "interval": "15s", "labels": {"release": "p"}, "keySecret": {"name": "key", "key": "k"}}
    rendered = render({"metrics": {"serviceMonitor": monitor}})
    found = rendered.one("ServiceMonitor")
    (endpoint,) = found["spec"]["endpoints"]
    assert endpoint == {
        "port": "http",
        "path": "/metrics",
        "interval": "15s",
        "authorization": {"credentials": {"name": "key", "key": "k"}},
    }
    assert found["metadata"]["labels"]["release"] == "p"
    assert "ServiceMonitor" not in render().kinds()
    annotated = render({"metrics": {"annotations": True}, "api": {"port": 9000}}).pods()["api"]["metadata"][
        "annotations"
    ]
    assert (annotated["prometheus.io/scrape"], annotated["prometheus.io/port"]) == ("true", "9000")


def test_changed_settings_start_the_api_again() -> None:
    checksums = {
        render({"settings": {"max_file_mib": mib}}).pods()["api"]["metadata"]["annotations"]["checksum/settings"]
        for mib in (1, 2)
    }
    assert len(checksums) == 2


def test_long_release_names_leave_room_for_kuberay_s() -> None:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values={}, name="a" * 53, namespace=NAMESPACE)
    (cluster,) = yaml.safe_load_all(files["windlass/templates/raycluster.yaml"])
    assert len(cluster["metadata"]["name"]) <= 40


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"box": {"gpu": 1}}, "additional properties 'gpu' not allowed"),
        ({"box": {"gpus": -1}}, "/box/gpus"),
        ({"box": {"cpus": "8"}}, "got string, want integer"),
        ({"box": {"ssds": []}}, "/box/ssds"),
        ({"box": {"ssds": [{"hostPath": "nvme0"}]}}, "/box/ssds/0"),
        ({"box": {"ssds": [{"hostPath": "/nvme0", "existingClaim": "nvme0"}]}}, "/box/ssds/0"),
        ({"settings": {"host": "0.0.0.0"}}, "additional properties 'host' not allowed"),
        ({"settings": {"log_format": "xml"}}, "/settings/log_format"),
        ({"settings": {"max_file_mib": 0.5}}, "/settings/max_file_mib"),
        ({"home": {"accessMode": "ReadOnlyMany"}}, "/home/accessMode"),
        ({"userId": 0}, "/userId"),
        ({"database": {"url": "postgresql://user:password@host/name"}}, "additional properties 'url' not allowed"),
        ({"home": {"accessMode": "ReadWriteMany"}}, "SQLite must not lie on a network's file system"),
        ({"api": {"replicas": 2}}, "api.replicas is 2: more than one needs PostgreSQL"),
        ({"box": {"memoryGib": 48}}, "box.sharedMemoryGib is 48: must be less than box.memoryGib, which is 48"),
        ({"box": {"ssds": [{"hostPath": "/nvme0"}, {"hostPath": "/nvme0"}]}}, "names a place twice"),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "/metrics asks for an API key"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm.HelmError) as caught:
        render(values)
    assert complaint in str(caught.value)


def test_the_image_holds_every_package() -> None:
    """Every copied path must exist."""
    copied = {
        source
        for line in (REPOSITORY / "helm/Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    }
    assert all((REPOSITORY / source).exists() for source in copied)
    packages = {
        path.resolve().relative_to(REPOSITORY).name
        for path in (REPOSITORY / "src/windlass").iterdir()
        if path.is_symlink()
    }
    assert packages | {"src", "pyproject.toml", "README.md", "LICENSE"} <= copied
