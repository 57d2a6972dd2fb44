"""Settings become what the core and the adapters are told."""

import pytest

from service.bootstrap.compose import inventory_rules_of
from service.core.reconcile import InventoryRules
from service.settings import SettingsRefused, load_settings


def test_what_is_kept_from_leases_comes_from_the_settings() -> None:
    settings = load_settings(device_reserve_mb=256, declared_foreign_mb={"n1": 2048, "NVIDIA L4": 512})
    assert inventory_rules_of(settings) == InventoryRules("local", 256, {"n1": 2048, "NVIDIA L4": 512})


def test_negative_foreign_memory_is_refused_by_name() -> None:
    with pytest.raises(SettingsRefused, match=r"declared_foreign_mb\.n1"):
        load_settings(declared_foreign_mb={"n1": -1})
