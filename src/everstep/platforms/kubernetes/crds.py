"""Has the definitions of our kinds: the one source of their fields, defaults, bounds and rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from everstep.platforms.kubernetes.kinds import API_VERSION, GROUP, VERSION, Kind, Object

COUNT_MAX: Final = 10_000
STAGES_MAX: Final = 1_024
Schema = dict[str, Any]


def _text(most: int = 253, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def _whole(least: int | None = None, most: int | None = None, default: int | None = None, **more: Any) -> Schema:
    bounds = {"minimum": least, "maximum": most, "default": default}
    return {"type": "integer", **{k: v for k, v in bounds.items() if v is not None}, **more}


def _one_of(default: str | None, *words: str) -> Schema:
    return {"type": "string", "enum": list(words), **({"default": default} if default is not None else {})}


def _struct(fields: dict[str, Schema], required: tuple[str, ...] = (), *rules: tuple[str, str]) -> Schema:
    out: Schema = {"type": "object", "properties": fields}
    if required:
        out["required"] = list(required)
    if rules:
        out["x-kubernetes-validations"] = [{"rule": rule, "message": message} for rule, message in rules]
    return out


_OPEN: Final[Schema] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TIME: Final[Schema] = {"type": "string", "format": "date-time"}
_MONEY: Final[Schema] = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,6})?$", "maxLength": 20}
_LONG: Final[Schema] = {"type": "integer", "format": "int64"}


_PRICE: Final = _struct({"onDemandHourly": _MONEY, "spotHourly": _MONEY})


def _role(least: int) -> Schema:
    return _struct(
        {
            "replicas": _whole(least, COUNT_MAX, 1),
            "minReplicas": _whole(least, COUNT_MAX),
            "maxReplicas": _whole(1, COUNT_MAX),
            "restartLimit": _whole(0, None, 10),
            "template": _OPEN,
            "price": _PRICE,
        },
        ("template",),
        (
            "!has(self.minReplicas) || self.replicas == 0 || self.minReplicas <= self.replicas",
            "replicas is below minReplicas",
        ),
        ("!has(self.maxReplicas) || self.replicas <= self.maxReplicas", "replicas is above maxReplicas"),
    )


_ELASTICITY: Final = _struct(
    {
        "maxWaitSeconds": _whole(0, None, 3600),
        "onWaitTimeout": _one_of("Suspend", "Suspend", "Fail", "Run"),
        "recovery": _one_of("RunWithAvailable", "WaitForAll", "RunWithAvailable"),
        "globalBatch": _one_of(None, "Fixed", "ScaleWithWorkers"),
        "failTolerance": _whole(0),
        "stabilizationSeconds": _whole(0, None, 30),
    }
)
_SPOT: Final = _struct(
    {
        "policy": _one_of("OnDemandOnly", "OnDemandOnly", "PreferSpot", "SpotOnly"),
        "roles": {
            "type": "array",
            "items": _one_of(None, "worker", "ps", "master"),
            "maxItems": 3,
            "x-kubernetes-list-type": "set",
        },
        "reliableRoles": {
            "type": "array",
            "items": _one_of(None, "worker", "ps", "master"),
            "maxItems": 3,
            "x-kubernetes-list-type": "set",
        },
        "fallbackAfterSeconds": _whole(0),
        "onReclaimNotice": _one_of("CheckpointAndDrain", "CheckpointAndDrain", "Drain", "Ignore"),
        "checkpointDeadlineSeconds": _whole(1, None, 15),
        "extraTaintKeys": {"type": "array", "items": _text(), "maxItems": 32},
        "extraNodeConditions": {"type": "array", "items": _text(316), "maxItems": 32},
    }
)
_SPEC: Final = _struct(
    {
        "mode": _one_of("AllReduce", "AllReduce", "ParameterServer", "Hybrid", "Pipeline"),
        "stages": _whole(1, STAGES_MAX),
        "suspend": {"type": "boolean", "default": False},
        "managedBy": _text(),
        "out": _text(1024),
        "script": _text(1024),
        "args": {"type": "array", "items": _text(4096), "maxItems": 256},
        "settings": _OPEN,
        "master": _struct(
            {
                "template": _OPEN,
                "restartLimit": _whole(0, None, 10),
                "volume": _struct({"size": _text(32, default="1Gi"), "storageClassName": _text()}),
                "price": _PRICE,
            }
        ),
        "worker": _role(0),
        "ps": _role(1),
        "psProtection": _struct(
            {
                "strategy": _one_of("None", "None", "Backup", "Parity"),
                "dataShards": _whole(1, 64),
                "parityShards": _whole(1, 16),
            },
            (),
            (
                "self.strategy != 'Parity' || (has(self.dataShards) && has(self.parityShards))",
                "Parity needs dataShards and parityShards",
            ),
        ),
        "elasticity": _ELASTICITY,
        "spot": _SPOT,
        "scheduling": _struct(
            {
                "gang": _one_of("None", "None", "Volcano", "SchedulerPlugins", "Native"),
                "queue": _text(),
                "priorityClassName": _text(),
                "schedulerName": _text(),
            }
        ),
        "cost": _struct(
            {
                "currency": _text(8, default="USD"),
                "budget": _MONEY,
                "spotNodeSelector": {
                    "type": "object",
                    "additionalProperties": _text(63),
                    "maxProperties": 8,
                },
            }
        ),
        "cleanPodPolicy": _one_of("Running", "None", "Running", "All"),
        "ttlSecondsAfterFinished": _whole(0),
        "activeDeadlineSeconds": _whole(1),
    },
    ("worker",),
    ("self.mode == oldSelf.mode", "mode is immutable"),
    (
        "!(self.mode in ['ParameterServer', 'Hybrid']) || has(self.ps)",
        "modes ParameterServer and Hybrid need ps",
    ),
    ("!has(self.stages) || self.mode == 'Pipeline'", "stages are of mode Pipeline"),
    (
        "has(self.stages) == has(oldSelf.stages) && (!has(self.stages) || self.stages == oldSelf.stages)",
        "stages are immutable: everstep resume changes them",
    ),
    (
        "has(self.managedBy) == has(oldSelf.managedBy) && "
        "(!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
        "managedBy is immutable",
    ),
)
_CONDITIONS: Final[Schema] = {
    "type": "array",
    "items": _struct(
        {
            "type": _text(316),
            "status": _one_of(None, "True", "False", "Unknown"),
            "reason": _text(1024),
            "message": _text(32768),
            "lastTransitionTime": _TIME,
            "observedGeneration": _LONG,
        },
        ("type", "status"),
    ),
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
    "maxItems": 20,
}
_WHOLE: Final[Schema] = {"type": "integer"}
_ROLE_STATUS: Final = _struct(
    {
        "desired": _WHOLE,
        "active": _WHOLE,
        "ready": _WHOLE,
        "pending": _WHOLE,
        "draining": _WHOLE,
        "succeeded": _WHOLE,
        "failed": _WHOLE,
        "restarts": _WHOLE,
        "selector": {"type": "string"},
    }
)
_STATUS: Final = _struct(
    {
        "observedGeneration": _LONG,
        "phase": {"type": "string"},
        "conditions": _CONDITIONS,
        "podsMade": _LONG,
        "worker": _ROLE_STATUS,
        "ps": _ROLE_STATUS,
        "master": _struct({"address": {"type": "string"}, "ready": {"type": "boolean"}, "restarts": _WHOLE}),
        "counted": {"type": "array", "items": {"type": "string"}, "maxItems": 20_000},
        "membershipEpoch": _LONG,
        "startTime": _TIME,
        "completionTime": _TIME,
        "waitingSince": _TIME,
        "progress": _struct({"step": _LONG, "samples": _LONG, "percent": _whole(0, 100), "time": _TIME}),
        "speed": _struct(
            {
                "time": _TIME,
                "words": {"type": "string"},
                "members": {
                    "type": "array",
                    "items": {"type": "object", "additionalProperties": _text(1024), "maxProperties": 16},
                    "maxItems": 50,
                    "x-kubernetes-list-type": "atomic",
                },
            }
        ),
        "checkpoint": _struct({"number": _LONG, "step": _LONG, "time": _TIME, "trigger": {"type": "string"}}),
        "disruptions": {
            "type": "array",
            "items": _struct(
                {
                    "pod": {"type": "string"},
                    "node": {"type": "string"},
                    "source": {"type": "string"},
                    "noticeTime": _TIME,
                    "checkpointed": {"type": "boolean"},
                }
            ),
            "maxItems": 50,
            "x-kubernetes-list-type": "atomic",
        },
        "cost": _struct(
            {
                "spotPodSeconds": _LONG,
                "onDemandPodSeconds": _LONG,
                "unpricedPodSeconds": _LONG,
                "spent": {"type": "string"},
                "onDemandEquivalent": {"type": "string"},
                "savedPercent": {"type": "string"},
                "time": _TIME,
            }
        ),
        "currentScaleRequest": {"type": "string"},
        "out": _struct(
            {
                "of": {"type": "string"},
                "time": _TIME,
                "failures": _WHOLE,
                "failedPod": {"type": "string"},
            }
        ),
    }
)


def _request(more: dict[str, Schema], required: tuple[str, ...], *rules: tuple[str, str]) -> tuple[Schema, Schema]:
    spec = _struct(
        {
            "jobName": _text(minLength=1),
            "role": _one_of("worker", "worker", "ps"),
            "timeoutSeconds": _whole(1, None, 600),
            "ttlSecondsAfterFinished": _whole(0, None, 86400),
            "count": _whole(1, COUNT_MAX),
            **more,
        },
        required,
        ("self == oldSelf", "spec is immutable; create a new request"),
        *rules,
    )
    status = _struct(
        {
            "phase": {"type": "string"},
            "conditions": _CONDITIONS,
            "fromReplicas": _WHOLE,
            "toReplicas": _WHOLE,
            "pods": {"type": "array", "items": {"type": "string"}, "maxItems": COUNT_MAX},
            "startTime": _TIME,
            "completionTime": _TIME,
        }
    )
    return spec, status


def _columns(*columns: tuple[str, str, str]) -> list[Schema]:
    return [{"name": name, "type": of, "jsonPath": path} for name, of, path in columns]


_REQUEST_COLUMNS: Final = _columns(
    ("Job", "string", ".spec.jobName"),
    ("Role", "string", ".spec.role"),
    ("JobPhase", "string", ".status.phase"),
    ("From", "integer", ".status.fromReplicas"),
    ("To", "integer", ".status.toReplicas"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def _definition(
    kind: Kind, plural: str, short: str, spec: Schema, status: Schema, columns: list[Schema], scale: Schema | None
) -> Object:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.value,
                "listKind": f"{kind.value}List",
                "plural": plural,
                "singular": kind.value.lower(),
                "shortNames": [short],
                "categories": ["all", "training"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}, **({"scale": scale} if scale else {})},
                    "additionalPrinterColumns": columns,
                    "schema": {
                        "openAPIV3Schema": _struct(
                            {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": spec,
                                "status": status,
                            },
                            ("spec",),
                        )
                    },
                }
            ],
        },
    }


def definitions() -> tuple[Object, ...]:
    """Return the CustomResourceDefinitions: of jobs, and of requests to scale one out or in."""
    job_columns = _columns(
        ("JobPhase", "string", ".status.phase"),
        ("Workers", "integer", ".spec.worker.replicas"),
        ("Ready", "integer", ".status.worker.ready"),
        ("PS", "integer", ".status.ps.ready"),
        ("Step", "integer", ".status.progress.step"),
        ("Age", "date", ".metadata.creationTimestamp"),
    )
    scale = {
        "specReplicasPath": ".spec.worker.replicas",
        "statusReplicasPath": ".status.worker.active",
        "labelSelectorPath": ".status.worker.selector",
    }
    out = _request({}, ("jobName", "count"))
    names = {"podNames": {"type": "array", "items": _text(), "maxItems": 1000, "minItems": 1}}
    exactly = "has(self.count) != has(self.podNames)", "set exactly one of count and podNames"
    inwards = _request(names, ("jobName",), exactly)
    return (
        _definition(Kind.JOB, "elasticjobs", "ej", _SPEC, _STATUS, job_columns, scale),
        _definition(Kind.SCALE_OUT, "scaleouts", "so", *out, _REQUEST_COLUMNS, None),
        _definition(Kind.SCALE_IN, "scaleins", "si", *inwards, _REQUEST_COLUMNS, None),
    )


def printed() -> str:
    """Return the definitions as YAML, for ``kubectl apply``."""
    return f"# The kinds of {API_VERSION}, printed by `everstep crd print`.\n" + documents(definitions())


def documents(things: Iterable[Object]) -> str:
    """Return objects as documents of YAML."""
    import yaml

    return "---\n".join(yaml.dump(each, Dumper=_plain_dumper(), sort_keys=False) for each in things)


def _plain_dumper() -> type:
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes each schema out where it is used: no anchors, which some tools do not read."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    return Plain
