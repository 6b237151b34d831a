"""The fields and types of a RayCluster, by the reference of KubeRay's API (`ray.io/v1`).

Pods in it are Kubernetes' own objects, and checked as such; here they are any object. Source:
https://github.com/ray-project/kuberay/blob/master/docs/reference/api.md
"""

from typing import Any

_STRING = {"type": "string"}
_STRINGS = {"type": "object", "additionalProperties": _STRING}
_BOOLEAN = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_OBJECT = {"type": "object"}


def _fields(fields: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


_HEAD_GROUP = _fields(
    {
        "template": _OBJECT,
        "headService": _OBJECT,
        "enableIngress": _BOOLEAN,
        "rayStartParams": _STRINGS,
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    },
    "template",
)
_WORKER_GROUP = _fields(
    {
        "groupName": _STRING,
        "replicas": _COUNT,
        "minReplicas": _COUNT,
        "maxReplicas": _COUNT,
        "numOfHosts": _COUNT,
        "idleTimeoutSeconds": _COUNT,
        "suspend": _BOOLEAN,
        "scaleStrategy": _fields({"workersToDelete": {"type": "array", "items": _STRING}}),
        "rayStartParams": _STRINGS,
        "template": _OBJECT,
    },
    "groupName",
    "minReplicas",
    "maxReplicas",
    "template",
)
_SPEC = _fields(
    {
        "suspend": _BOOLEAN,
        "managedBy": _STRING,
        "autoscalerOptions": _OBJECT,
        "headServiceAnnotations": _STRINGS,
        "enableInTreeAutoscaling": _BOOLEAN,
        "gcsFaultToleranceOptions": _OBJECT,
        "headGroupSpec": _HEAD_GROUP,
        "rayVersion": _STRING,
        "workerGroupSpecs": {"type": "array", "items": _WORKER_GROUP},
    },
    "headGroupSpec",
)
RAY_CLUSTER = _fields(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": _SPEC,
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
