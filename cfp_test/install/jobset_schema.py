"""The part of JobSet's and Kubernetes' schemas that docs/launching.md uses.

Written after the reference of jobset.x-k8s.io/v1alpha2 and of batch/v1: names, types
and choices of the fields, and no others.
"""

from typing import Any

_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_COUNT = {"type": "integer", "minimum": 0}


def _object(required: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


_FIELD = _object("fieldPath", fieldPath={"type": "string"})
_VARIABLE = {
    "oneOf": [
        _object("name value", name={"type": "string"}, value={"type": "string"}),
        _object(
            "name valueFrom",
            name={"type": "string"},
            valueFrom=_object("fieldRef", fieldRef=_FIELD),
        ),
    ]
}
_CONTAINER = _object(
    "name image command",
    name=_NAME,
    image={"type": "string", "minLength": 1},
    command=_list({"type": "string"}),
    env=_list(_VARIABLE),
    ports=_list(
        _object(
            "containerPort",
            containerPort={"type": "integer", "minimum": 1, "maximum": 65535},
        )
    ),
    resources=_object(
        limits={
            "type": "object",
            "propertyNames": {"enum": ["nvidia.com/gpu", "cpu", "memory"]},
            "additionalProperties": {"type": "integer", "minimum": 1},
        }
    ),
    volumeMounts=_list(
        _object("name mountPath", name=_NAME, mountPath={"type": "string"})
    ),
)
_POD = _object(
    "containers restartPolicy",
    restartPolicy={"enum": ["Never", "OnFailure"]},
    containers=_list(_CONTAINER),
    volumes=_list(
        _object(
            "name",
            name=_NAME,
            emptyDir=_object(medium={"enum": ["", "Memory"]}),
        )
    ),
)
_JOB = _object(
    "template",
    parallelism=_COUNT,
    completions=_COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=_COUNT,
    activeDeadlineSeconds={"type": "integer", "minimum": 1},
    template=_object("spec", spec=_POD),
)
JOBSET = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_object("name", name=_NAME),
    spec=_object(
        "replicatedJobs",
        network=_object(
            enableDNSHostnames={"type": "boolean"},
            publishNotReadyAddresses={"type": "boolean"},
        ),
        failurePolicy=_object(maxRestarts=_COUNT),
        replicatedJobs=_list(
            _object(
                "name template",
                name=_NAME,
                replicas=_COUNT,
                template=_object("spec", spec=_JOB),
            )
        ),
    ),
)
