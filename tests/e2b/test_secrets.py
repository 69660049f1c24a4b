"""Secrets through E2B's own SDK: they are kept, described, and never shown."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from e2b import Sandbox, Secret
from e2b.exceptions import SandboxException, SecretException, SecretNotFoundException

from tests.support.servers import RealServer

pytestmark = pytest.mark.real

VALUE = "the-value-that-is-never-shown"


@pytest.fixture
def at(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> RealServer:
    monkeypatch.setenv("E2B_API_KEY", "any")
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    return server


@pytest.fixture
def name(at: RealServer) -> Iterator[str]:
    found = f"s-{secrets.token_hex(4)}"
    yield found
    if Secret.exists(found):
        Secret.destroy(found)


def test_a_secret_is_kept_found_and_replaced_by_its_next_version(name: str) -> None:
    made = Secret.create(name.upper(), VALUE, metadata={"for": "tests"})
    assert (made.name, made.version, made.metadata) == (name, 1, {"for": "tests"})
    assert made.secret_id.startswith("sec_")
    for key in (name, name.upper(), made.secret_id):
        assert Secret.get_info(key).secret_id == made.secret_id
    assert VALUE not in repr(made) and not hasattr(made, "value")
    with pytest.raises(SecretException, match="409"):
        Secret.create(name, "other")
    second = Secret.update(name, "second")
    assert (second.version, second.metadata) == (2, {"for": "tests"})
    third = Secret.update(made.secret_id, "third", metadata={"b": "2"})
    assert (third.version, third.metadata) == (3, {"b": "2"})
    assert third.created_at == made.created_at and third.updated_at >= made.updated_at


def test_secrets_are_listed_page_by_page(at: RealServer) -> None:
    names = [f"s-{secrets.token_hex(4)}" for _ in range(3)]
    for each in names:
        Secret.create(each, VALUE)
    pages = Secret.list(limit=2)
    found = []
    while pages.has_next:
        items = pages.next_items()
        assert len(items) <= 2
        found += [item.name for item in items]
    assert set(names) <= set(found) and len(found) == len(set(found))
    for each in names:
        Secret.destroy(each)


def test_an_unknown_secret_is_not_found(at: RealServer) -> None:
    assert Secret.exists("nosuch") is False
    with pytest.raises(SecretNotFoundException):
        Secret.get_info("nosuch")
    with pytest.raises(SecretNotFoundException):
        Secret.update("nosuch", "x")
    assert Secret.destroy("nosuch") is False


def test_values_are_in_files_of_the_server_alone(name: str, at: RealServer) -> None:
    Secret.create(name, VALUE)
    folder = at.base / "data" / "secrets"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    for wrong in ("sec_mine", "a{b}", "x" * 129):
        with pytest.raises(SecretException, match="400"):
            Secret.create(wrong, VALUE)
    with pytest.raises(SecretException, match=r"413|400"):
        Secret.create(f"{name}-2", "x" * 70_000)


def test_a_reference_to_a_secret_is_refused(name: str) -> None:
    with pytest.raises(SandboxException, match=r"400: envVars.*no network"):
        Sandbox.create(envs={"TOKEN": Secret.fill(name)})
