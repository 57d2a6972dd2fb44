"""The messages of Triton's gRPC protocol that the service reads or writes itself, as protobuf classes.

The table holds the fields that are used, by the names and numbers of `grpc_service.proto` and
`model_config.proto`. Tensors are never parsed: the data plane passes a ModelInferRequest on as bytes.
"""

from types import SimpleNamespace
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_Fields = dict[str, tuple[int, str]]
"""Maps a field name to the number and the type of the field. `repeated T` is a list; `map T` has string
keys."""

_MESSAGES: Final[dict[str, _Fields]] = {
    "Health": {"status": (1, "int32")},  # ServerLive, ServerReady and Health/Check: 1 is well
    "SettingsRequest": {"settings": (1, "repeated bytes")},  # TraceSetting and LogSettings
    "LoadParameters": {"parameters": (3, "repeated LoadParameter")},
    "LoadParameter": {"key": (1, "repeated string")},  # all keys of one parameter, though the last one counts
    "RepositoryModelLoadRequest": {"model_name": (2, "string"), "parameters": (3, "map Parameter")},
    "RepositoryModelUnloadRequest": {"model_name": (2, "string"), "parameters": (3, "map Parameter")},
    "Parameter": {"bool_param": (1, "bool"), "string_param": (3, "string")},
    "RepositoryIndexResponse": {"models": (1, "repeated ModelIndex")},
    "ModelIndex": {
        "name": (1, "string"),
        "version": (2, "string"),
        "state": (3, "string"),
        "reason": (4, "string"),
    },
    "ModelMetadataRequest": {"name": (1, "string")},
    "ModelMetadataResponse": {"inputs": (4, "repeated Tensor")},
    "Tensor": {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "repeated int64")},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "inputs": (5, "repeated Tensor"),
        "raw_input_contents": (7, "repeated bytes"),
    },
    "ModelStreamInferResponse": {"error_message": (1, "string")},
    "ModelConfigRequest": {"name": (1, "string")},
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelConfig": {
        "version_policy": (3, "VersionPolicy"),
        "max_batch_size": (4, "int32"),
        "instance_group": (7, "repeated InstanceGroup"),
        "ensemble_scheduling": (15, "Ensemble"),
    },
    "InstanceGroup": {"kind": (4, "InstanceKind")},
    "VersionPolicy": {"latest": (1, "Latest"), "all": (2, "All"), "specific": (3, "Specific")},
    "Latest": {"num_versions": (1, "uint32")},
    "All": {},
    "Specific": {"versions": (1, "repeated int64")},
    "Ensemble": {"step": (1, "repeated Step")},
    "Step": {"model_name": (1, "string")},
    "ModelStatisticsResponse": {"model_stats": (1, "repeated ModelStatistics")},
    "ModelStatistics": {
        "name": (1, "string"),
        "version": (2, "string"),
        "last_inference": (3, "uint64"),
        "inference_count": (4, "uint64"),
        "execution_count": (5, "uint64"),
        "inference_stats": (6, "InferStatistics"),
        "batch_stats": (7, "repeated InferBatchStatistics"),
        "memory_usage": (8, "repeated MemoryUsage"),
        "response_stats": (9, "map InferResponseStatistics"),
    },
    "InferStatistics": {
        "success": (1, "StatisticDuration"),
        "fail": (2, "StatisticDuration"),
        "queue": (3, "StatisticDuration"),
        "compute_input": (4, "StatisticDuration"),
        "compute_infer": (5, "StatisticDuration"),
        "compute_output": (6, "StatisticDuration"),
        "cache_hit": (7, "StatisticDuration"),
        "cache_miss": (8, "StatisticDuration"),
    },
    "InferResponseStatistics": {
        "compute_infer": (1, "StatisticDuration"),
        "compute_output": (2, "StatisticDuration"),
        "success": (3, "StatisticDuration"),
        "fail": (4, "StatisticDuration"),
        "empty_response": (5, "StatisticDuration"),
        "cancel": (6, "StatisticDuration"),
    },
    "InferBatchStatistics": {
        "batch_size": (1, "uint64"),
        "compute_input": (2, "StatisticDuration"),
        "compute_infer": (3, "StatisticDuration"),
        "compute_output": (4, "StatisticDuration"),
    },
    "StatisticDuration": {"count": (1, "uint64"), "ns": (2, "uint64")},
    "MemoryUsage": {"type": (1, "string"), "id": (2, "int64"), "byte_size": (3, "uint64")},
}

_ENUMS: Final = {"InstanceKind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")}
"""The values of each enum, counted from 0."""

_PACKAGE: Final = "gpubroker"
"""The package differs from Triton's own, which a process may have from tritonclient as well."""


def _file() -> Any:
    file = FileDescriptorProto(name="triton_messages.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            if kind.startswith("map "):
                entry = message.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _add(entry, "key", 1, "string")
                _add(entry, "value", 2, kind.removeprefix("map "))
                kind = f"repeated {name}.{entry.name}"
            _add(message, field, number, kind)
    return file


def _add(message: Any, name: str, number: int, kind: str) -> None:
    base_kind = kind.removeprefix("repeated ")
    label = FieldDescriptorProto.LABEL_OPTIONAL if base_kind == kind else FieldDescriptorProto.LABEL_REPEATED
    field = message.field.add(name=name, number=number, label=label)
    if base_kind in _ENUMS:
        field.type, field.type_name = FieldDescriptorProto.TYPE_ENUM, f".{_PACKAGE}.{base_kind}"
    elif base_kind[0].isupper():
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{base_kind}"
    else:
        field.type = getattr(FieldDescriptorProto, f"TYPE_{base_kind.upper()}")


_pool: Any = DescriptorPool()
_pool.Add(_file())

messages: Any = SimpleNamespace(
    **{name: GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}
)
"""The message classes, by name: `messages.RepositoryIndexResponse`."""
