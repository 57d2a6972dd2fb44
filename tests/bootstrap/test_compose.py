"""Settings become what the core and the adapters are told."""

from pathlib import Path
from typing import Any

import pytest
from gpubroker.wire.policy import GpuKind, TaskMaximum
from gpubroker_server.adapters.ray.options import AgentConfig, RayOptions
from gpubroker_server.bootstrap.compose import (
    defaults_of,
    host_use,
    inventory_rules_of,
    policy_of,
    ray_options_of,
    simulated_devices,
)
from gpubroker_server.core.admission.defaults import NamedDefaults
from gpubroker_server.core.domain.device import SHIPPED_KINDS
from gpubroker_server.core.domain.policy import CustomLimit, Pool, TenantPolicy
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, NodeRules
from gpubroker_server.settings.loading import SettingsRefused, load_settings


def test_what_is_kept_from_leases_comes_from_the_settings() -> None:
    settings = load_settings(
        device_reserve_mb=256, declared_foreign_mb={"n1": Mib(2048), "NVIDIA L4": Mib(512)}
    )
    kinds = tuple(sorted(SHIPPED_KINDS))
    assert inventory_rules_of(settings) == InventoryRules(
        "local", Mib(256), {"n1": Mib(2048), "NVIDIA L4": Mib(512)}, kinds=kinds
    )


def test_an_autoscaler_is_named_by_the_policy_or_is_that_of_ray() -> None:
    joined = {"address": "head:6379", "autoscale": True}
    assert policy_of(load_settings()).autoscaler == ""
    assert policy_of(load_settings(ray=joined)).autoscaler == "Ray"
    named = load_settings(ray=joined, policy={"autoscaler": "slurm", "autoscaler_tasks": 5})
    assert (policy_of(named).autoscaler, policy_of(named).autoscaler_tasks) == ("slurm", 5)


def test_a_power_alone_ranks_a_kind() -> None:
    settings = load_settings(kinds={"L4": 100, "T4": {"context_mb": 300}})
    rules = inventory_rules_of(settings)
    assert {*rules.kinds} == {*SHIPPED_KINDS, GpuKind("L4", 100), GpuKind("T4", 0, Mib(300))}


def test_nodes_have_settings_of_their_own() -> None:
    unequal = {
        "n1": {
            "cpu": 60,
            "memory_mb": "100GiB",
            "max_runs": 9,
            "reserve_mb": "1GiB",
            "labels": {"zone": "a"},
        },
        "n2": {"reserve_cpu": 2, "reserve_memory_mb": 4096, "reserve_mb": {0: "2GiB", "GPU-a": 0, "*": 256}},
    }
    assert inventory_rules_of(load_settings(nodes=unequal)).nodes == {
        "n1": NodeRules(60.0, Mib(102_400), 9, reserve_mb={"*": Mib(1024)}, labels={"zone": "a"}),
        "n2": NodeRules(
            reserve_cpu=2.0,
            reserve_memory_mb=Mib(4096),
            reserve_mb={"0": Mib(2048), "GPU-a": Mib(0), "*": Mib(256)},
        ),
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": {"n1": {"reserve_mb": {"0": -1}}}}, r"nodes\.n1\.reserve_mb\.0"),
        ({"nodes": {"n1": {"cpus": 4}}}, 'did you mean "cpu"'),
        ({"node_labels": {"n1": {"zone": "a"}}}, 'it is now "nodes.NAME.labels"'),
    ],
)
def test_wrong_settings_of_nodes_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsRefused, match=said):
        load_settings(**settings)


def test_a_kind_that_is_set_takes_no_other_away_and_null_takes_it_out() -> None:
    settings = load_settings(kinds={"H100": {"context_mb": 500}, "A100": 700, "L40": None, "none": None})
    kinds = {kind.name: (kind.power, kind.context_mb) for kind in inventory_rules_of(settings).kinds}
    assert kinds == {
        "H200": (2500, 0),
        "H100": (2000, 500),
        "A100": (700, 0),
        "5090": (419, 0),
        "4090": (330, 0),
    }


def test_an_empty_cohort_is_none() -> None:
    policy = policy_of(load_settings(policy={"tenants": {"acme": {"cohort": ""}}}))
    assert policy.tenants == (TenantPolicy("acme"),)


def test_negative_foreign_memory_is_refused_by_name() -> None:
    with pytest.raises(SettingsRefused, match=r"declared_foreign_mb\.n1"):
        load_settings(declared_foreign_mb={"n1": -1})


def test_a_number_alone_is_what_the_cluster_has_of_a_custom_resource() -> None:
    customs = {"licence": 4, "fpga": {"limit": 2, "per": "node", "priority_threshold": "interactive"}}
    settings = load_settings(policy={"custom_limits": customs, "maximum": {"gpus": 8}})
    policy = policy_of(settings)
    assert policy.custom_limits == (CustomLimit("fpga", 2.0, True, 79), CustomLimit("licence", 4.0))
    assert policy.maximum == TaskMaximum(gpus=8)
    assert inventory_rules_of(settings).node_custom == (("fpga", 2.0),)


def test_defaults_of_model_types_come_from_the_settings() -> None:
    settings = load_settings(model_types={"llm": {"priority": "interactive", "gpu_mb": 8192}})
    assert defaults_of(settings).model_types == {"llm": NamedDefaults(priority=79, gpu_mb=8192)}
    learned = load_settings(model_types={"llm": {"gpu_mb": "learned"}})
    assert defaults_of(learned).model_types == {"llm": NamedDefaults(gpu_mb="learned")}


def test_instances_of_simulated_devices_have_a_parent() -> None:
    half = {"kind": "half", "memory_mb": 500, "count": 2}
    devices = simulated_devices(load_settings(simulated_devices=[{"memory_mb": 1000, "instances": [half]}]))
    assert [(device.uuid, device.kind, device.parent) for device in devices] == [
        ("GPU-sim-local-0", "simulated", ""),
        ("MIG-sim-local-1", "half", "GPU-sim-local-0"),
        ("MIG-sim-local-2", "half", "GPU-sim-local-0"),
    ]


def test_simulated_devices_have_other_uuids_on_each_node(tmp_path: Path) -> None:
    half = {"kind": "half", "memory_mb": 500, "count": 1}
    devices = simulated_devices(load_settings(simulated_devices=[{"memory_mb": 1000, "instances": [half]}]))
    config = RayOptions(tmp_path, devices=devices).agent_config("")
    found = [
        [(one.uuid, one.parent) for one in config.on_node(name).simulated or ()] for name in ("n1", "n2")
    ]
    assert found == [
        [(f"GPU-sim-{name}-0", ""), (f"MIG-sim-{name}-1", f"GPU-sim-{name}-0")] for name in ("n1", "n2")
    ]
    assert RayOptions(tmp_path).agent_config("").on_node("n1").simulated is None


def test_what_is_filled_in_stays_within_what_one_task_may_ask_for() -> None:
    most = {"timeout_seconds": 60, "max_retries": 1, "grace_seconds": 5}
    usual = {"max_retries": 9, "timeout_seconds": 10}
    chosen: dict[str, Any] = {
        "policy": {"maximum": most},
        "defaults": {"max_retries": 2},
        "model_types": {"llm": usual},
    }
    defaults = defaults_of(load_settings(**chosen))
    assert (defaults.timeout_seconds, defaults.max_retries, defaults.grace_seconds) == (60, 1, 5)
    assert defaults.model_types["llm"] == NamedDefaults(max_retries=1, timeout_seconds=Seconds(10))


def test_pools_and_limits_of_running_tasks_come_from_the_settings() -> None:
    running = {"tenants": {"acme": 4, "*": 8}, "labels": {"team=vision": 2}}
    lab = {"kinds": ["A100"], "nodes": {"zone": ["b", "a"]}, "fractions": False, "gpus": 4}
    scratch = {"custom": {"storage_gb": 500}}
    policy = policy_of(
        load_settings(
            policy={"max_running": running, "custom_limits": {"storage_gb": 2000}},
            pools={"lab": lab, "scratch": scratch},
        )
    )
    assert policy.pools == (
        Pool("lab", ("A100",), {"zone": ("b", "a")}, fractions=False, gpus=4),
        Pool("scratch", custom={"storage_gb": 500.0}),
    )
    assert policy.pools[0].labels == (("zone", ("a", "b")),)
    assert policy.custom_limits == (
        CustomLimit("label:team=vision", 2),
        CustomLimit("pool:lab:gpus", 4),
        CustomLimit("pool:scratch:custom/storage_gb", 500),
        CustomLimit("storage_gb", 2000),
        CustomLimit("tenant:*", 8),
        CustomLimit("tenant:acme", 4),
    )


def test_each_agent_is_told_which_directories_to_watch() -> None:
    options = ray_options_of(load_settings(fleet={"watched_directories": ["/data", "/scratch"]}))
    config = options.agent_config("")
    assert AgentConfig.from_json(config.to_json()) == config
    assert config.watched_directories == ("/data", "/scratch")


def test_directory_that_cannot_be_measured_hides_no_other_and_no_memory(
    tmp_path: Path,
) -> None:
    bad = tmp_path / ("x" * 300)  # its name is too long: an OSError, as of a file system that fails
    for directories in ((bad, tmp_path), (tmp_path / "none", tmp_path)):
        use = host_use(directories)
        assert use.disk_percent is not None
        assert use.memory_percent is not None
    assert host_use([bad]).disk_percent is None
