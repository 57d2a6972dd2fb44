"""Where the secrets of tenants are kept."""

import os
import stat
from pathlib import Path

import pytest
from gpubroker_server.adapters.secret_files import SecretFiles
from gpubroker_server.ports.secrets import SecretStore
from gpubroker_server.ports.store import StoreUnavailable


@pytest.fixture
def secrets(tmp_path: Path) -> SecretStore:
    return SecretFiles(tmp_path / "secrets")


async def test_a_secret_belongs_to_one_tenant_and_is_replaced_and_dropped(secrets: SecretStore) -> None:
    assert await secrets.names("acme") == []
    await secrets.put("acme", "B", "first")
    await secrets.put("acme", "A", "two\nlines, and \u00fcml\u00e4uts")
    await secrets.put("zeta", "B", "of another")
    await secrets.put("acme", "B", "second")
    assert await secrets.names("acme") == ["A", "B"]
    assert await secrets.read("acme", ["A", "B", "C"]) == {
        "A": "two\nlines, and \u00fcml\u00e4uts",
        "B": "second",
    }
    assert await secrets.drop("acme", "B")
    assert not await secrets.drop("acme", "B")
    assert await secrets.read("acme", ["B"]) == {}
    assert await secrets.read("zeta", ["B", "../acme/A"]) == {"B": "of another"}


async def test_a_power_cut_loses_no_secret_that_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new name is in a folder, which is synced after it."""
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    root = tmp_path / "secrets"
    await SecretFiles(root).put("acme", "A", "text")
    assert synced[1:] == [str(folder) for folder in (root / "acme", root, tmp_path)]


async def test_other_users_can_read_neither_files_nor_names(tmp_path: Path) -> None:
    root = tmp_path / "secrets"
    await SecretFiles(root).put("acme", "A", "text")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*"))}
    assert modes == {"secrets": 0o700, "acme": 0o700, "A": 0o600}


async def test_another_process_on_the_same_directory_sees_the_same(tmp_path: Path) -> None:
    await SecretFiles(tmp_path / "secrets").put("acme", "A", "text")
    assert await SecretFiles(tmp_path / "secrets").read("acme", ["A"]) == {"A": "text"}


async def test_unusable_secret_directory_is_named_without_what_it_keeps(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("in the way")
    with pytest.raises(StoreUnavailable, match=str(tmp_path / "secrets")) as refused:
        await SecretFiles(tmp_path / "secrets").put("acme", "A", "plain-text")
    assert "plain-text" not in str(refused.value)


async def test_every_character_of_a_secret_is_kept(secrets: SecretStore) -> None:
    text = "-----BEGIN KEY-----\r\nabc\r\n\r tail\n\x00\u2028\U0001f511"
    await secrets.put("acme", "KEY", text)
    assert (await secrets.read("acme", ["KEY"]))["KEY"] == text


async def test_damaged_secret_is_named_with_a_remedy_and_without_what_it_keeps(tmp_path: Path) -> None:
    secrets = SecretFiles(tmp_path)
    await secrets.put("acme", "KEY", "x")
    (tmp_path / "acme" / "KEY").write_bytes(b"plain-text \xff")
    with pytest.raises(StoreUnavailable, match=r"acme/KEY.*secrets set KEY") as refused:
        await secrets.read("acme", ["KEY"])
    assert "plain-text" not in str(refused.value)


@pytest.mark.parametrize(("tenant", "name"), [("acme", "../zeta/KEY"), ("..", "KEY"), ("acme", "")])
async def test_no_name_leads_out_of_the_directory(tmp_path: Path, tenant: str, name: str) -> None:
    with pytest.raises(ValueError, match="no name of a secret"):
        await SecretFiles(tmp_path / "secrets").put(tenant, name, "text")
    assert os.listdir(tmp_path) == []
