"""JWTs of a real issuer on this machine as tokens."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from gpubroker import Broker, Refused
from gpubroker_server.adapters.oidc import UNKNOWN_KEY_SECONDS, JwtVerifier
from gpubroker_server.bootstrap.jwt_access import JwtAccess, jwt_access_of
from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.core.admission.claims import OidcIssuer
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.http.problems import Problem
from gpubroker_server.settings.loading import load_settings
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from tests.bootstrap.refusals import WAITING
from tests.chaos.forked import ForkedService
from tests.gateway.harness import until


class StoppedClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> Instant:
        return Instant(self.seconds)


class Issuer:
    """An OpenID Connect issuer: a discovery document, keys, and signed JWTs."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.fetches = 0
        self.is_away = False
        self.add_key("first")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def add_key(self, kid: str, *, elliptic: bool = False) -> None:
        self.keys[kid] = (
            ec.generate_private_key(ec.SECP256R1()) if elliptic else rsa.generate_private_key(65537, 2048)
        )

    def token(self, kid: str = "first", *, key: Any = None, algorithm: str = "", **claims: Any) -> str:
        signer = self.keys[kid] if key is None else key
        named = algorithm or ("ES256" if isinstance(signer, ec.EllipticCurvePrivateKey) else "RS256")
        given = {"iss": self.url, "aud": "gpubroker", "sub": "ada", "tenant": "acme", "exp": 2**31}
        given |= {"scope": "tasks:read", **claims}
        return jwt.encode(given, signer, named, headers={"kid": kid})

    def __enter__(self) -> "Issuer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(issuer) -> type[BaseHTTPRequestHandler]:  # noqa: N805  # the handler has a self of its own
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body: Any = {"jwks_uri": f"{issuer.url}/keys"}
                issuer.fetches += self.path != "/keys"
                if self.path == "/keys":
                    body = {"keys": [issuer._published(kid) for kid in issuer.keys]}
                    body["keys"].append({"kty": "unheard-of", "kid": "odd"})
                data = json.dumps(body).encode()
                self.send_response(500 if issuer.is_away else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Write nothing to the terminal."""

        return Handler

    def _published(self, kid: str) -> dict[str, Any]:
        key = self.keys[kid].public_key()
        form = ECAlgorithm if isinstance(key, ec.EllipticCurvePublicKey) else RSAAlgorithm
        return {**form.to_jwk(key, as_dict=True), "kid": kid, "use": "sig"}


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer() as running:
        yield running


class Gate:
    """What a gateway has of an issuer: keys that are kept fresh, and the access of JWTs."""

    def __init__(self, issuer: Issuer) -> None:
        self.clock = StoppedClock()
        self.verifier = JwtVerifier([OidcIssuer(issuer=issuer.url, audience="gpubroker")], self.clock)
        self.access = JwtAccess(self.verifier, self.clock)

    def refused(self, token: str) -> str:
        with pytest.raises(Problem) as problem:
            self.access.identity_of(token)
        return f"{problem.value.kind.status} {problem.value.detail}"

    async def fetched(self, times: int) -> None:
        await until(lambda: self.verifier.changes == times)


@pytest.fixture
async def gate(issuer: Issuer) -> AsyncIterator[Gate]:
    """A gate that has fetched the keys once."""
    made = Gate(issuer)
    keeping = asyncio.create_task(made.access.keep_keys_fresh())
    await made.fetched(1)
    yield made
    keeping.cancel()


@pytest.mark.parametrize("elliptic", [False, True], ids=["RSA", "elliptic curve"])
async def test_a_jwt_of_the_issuer_has_the_rights_of_its_claims(elliptic: bool) -> None:
    with Issuer() as issuer:
        issuer.add_key("signs", elliptic=elliptic)
        made = Gate(issuer)
        keeping = asyncio.create_task(made.access.keep_keys_fresh())
        await made.fetched(1)
        identity = made.access.identity_of(issuer.token("signs", scope="tasks:read tasks:write"))
        keeping.cancel()
    assert identity is not None
    assert (identity.name, identity.tenant, identity.scopes) == ("ada", "acme", ("tasks:read", "tasks:write"))


async def test_other_tokens_are_left_to_others(gate: Gate) -> None:
    assert gate.access.identity_of("gpb_abcdefgh") is None


async def test_a_jwt_that_is_not_valid_is_refused_with_the_reason(issuer: Issuer, gate: Gate) -> None:
    stranger = rsa.generate_private_key(65537, 2048)
    faults = {
        issuer.token(exp=1): "has expired",
        issuer.token(aud="another"): "Audience",
        issuer.token(iss="https://elsewhere"): 'the issuer of the JWT is "https://elsewhere"; accepted are',
        issuer.token(key=stranger): "Signature verification failed",
        issuer.token(key="secret" * 8, algorithm="HS256"): "alg",
        issuer.token(scope="openid"): "gives no scope here",
        "a.b.c": "is no readable JWT",
    }
    for token, why in faults.items():
        assert gate.refused(token).startswith("401 ")
        assert why in gate.refused(token)


async def test_a_new_key_is_fetched_and_the_request_comes_again(issuer: Issuer, gate: Gate) -> None:
    issuer.add_key("second")
    token = issuer.token("second")
    assert gate.refused(token).startswith('401 the JWT is signed with the key "second"')
    gate.clock.seconds += UNKNOWN_KEY_SECONDS
    assert gate.refused(token).startswith("503 the key that signed the JWT is being fetched")
    await gate.fetched(2)
    assert gate.access.identity_of(token) is not None


async def test_a_key_that_was_withdrawn_ends_the_jwts_that_it_signed(issuer: Issuer, gate: Gate) -> None:
    issuer.add_key("second")
    token = issuer.token("first")
    assert gate.access.identity_of(token) is not None
    del issuer.keys["first"]
    gate.clock.seconds += UNKNOWN_KEY_SECONDS
    assert gate.refused(issuer.token("second")).startswith("503")
    await gate.fetched(2)
    assert 'key "first"' in gate.refused(token)


async def test_keys_stay_valid_while_the_issuer_is_away(issuer: Issuer, gate: Gate) -> None:
    issuer.is_away = True
    gate.clock.seconds += UNKNOWN_KEY_SECONDS
    issuer.add_key("second")
    assert gate.refused(issuer.token("second")).startswith("503")
    await until(lambda: issuer.fetches == 2)
    assert gate.access.identity_of(issuer.token("first")) is not None


def test_a_file_of_certificates_that_is_missing_stops_the_start(tmp_path: Path) -> None:
    given = {"issuer": "https://login.lab", "audience": "gpubroker", "ca_file": str(tmp_path / "ca.pem")}
    with pytest.raises(StartRefused, match=r"oidc: a ca_file .*ca\.pem.* cannot be read"):
        jwt_access_of(load_settings(data_dir=tmp_path, oidc=[given]), StoppedClock())


def test_a_service_takes_jwts_beside_its_own_tokens(issuer: Issuer, tmp_path: Path) -> None:
    groups = {"scope_claim": "groups", "scopes": {"users": ["tasks:read", "tasks:write"]}}
    oidc = [{"issuer": issuer.url, "audience": "gpubroker", "max_priority": "batch", **groups}]
    with ForkedService(tmp_path / "data", **WAITING, oidc=oidc) as service:
        with Broker(service.broker.connection.url, issuer.token(groups=["users"])) as ada:
            task = ada.submit("tests.e2e.work:add", 1, 2)
            assert service.broker.get(task.id).tenant == "acme"
            with pytest.raises(Refused, match="priority 95 is above 54"):
                ada.submit("tests.e2e.work:add", 1, 2, priority="critical")
            with pytest.raises(Refused, match="lacks the scope cluster:read"):
                ada.nodes()
        other = Broker(service.broker.connection.url, issuer.token(groups=["others"]))
        with other, pytest.raises(Refused, match="has others, which gives no scope here"):
            list(other.list())
