"""Explain why a connection failed, and what to do."""

import os
import socket
import ssl
from pathlib import Path

import httpx

from gpubroker.errors import Unreachable
from gpubroker.transport.connection import LOOPBACK, Connection
from gpubroker.transport.exchange import UNTRUSTED, WRONG_SCHEME

_LOOK_SECONDS = 1.0
_CERTIFICATES = "SSL_CERT_FILE"


def unreachable(connection: Connection, error: Exception) -> Unreachable:
    """Return the exception that says why there was no answer. May connect once more, to find out whether the
    address speaks TLS."""
    where, fault = f"{connection.url} ({connection.source})", _tls_fault(error)
    if isinstance(fault, ssl.SSLCertVerificationError):
        return Unreachable(f"the certificate of {where} {_distrust(fault)}", code=UNTRUSTED)
    if isinstance(fault, ssl.SSLError) and fault.reason == "WRONG_VERSION_NUMBER":
        detail = (
            f"{where} does not speak TLS; write http:// instead of https://, or put a proxy with TLS there"
        )
        return Unreachable(detail, code=WRONG_SCHEME)
    is_cut_off = isinstance(error, httpx.ReadError | httpx.RemoteProtocolError)
    if is_cut_off and connection.url.startswith("http://") and _speaks_tls(connection.url):
        return Unreachable(f"{where} speaks TLS; write https:// instead of http://", code=WRONG_SCHEME)
    host = httpx.URL(connection.url).host
    remedy = "`gpubroker serve` starts one here" if host in LOOPBACK else f"is {host} its right name?"
    return Unreachable(
        f"no answer from {where}: {str(error) or type(error).__name__}; is the service running? {remedy}",
        code="unreachable",
    )


def check_scheme(connection: Connection, response: httpx.Response) -> None:
    """Refuse an answer that shows that the address is wrong: a redirection, or the answer of a TLS server to
    a request without TLS. Raises Unreachable."""
    where = f"{connection.url} ({connection.source})"
    if response.has_redirect_location:
        location = response.headers["location"][:200]
        raise Unreachable(f"{where} sends clients on to {location}; use that address", code=WRONG_SCHEME)
    says_https = response.status_code == 400 and b"HTTPS" in response.content[:1000]
    if says_https and "json" not in response.headers.get("content-type", ""):
        raise Unreachable(f"{where} speaks TLS; write https:// instead of http://", code=WRONG_SCHEME)


def trusted_certificates() -> ssl.SSLContext:
    """Return the certificate authorities that `SSL_CERT_FILE` or `SSL_CERT_DIR` names, else those of certifi;
    also for an address of this machine. Raises Unreachable if the file has no certificates."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        file = os.environ.get(_CERTIFICATES, "")
        why = error.strerror if not Path(file).is_file() else "it has no certificates in PEM"
        raise Unreachable(
            f"{_CERTIFICATES} names {file!r}, which cannot be used: {why}; name a file with the certificates "
            "of authorities, in PEM, or unset it",
            code=UNTRUSTED,
        ) from error


def _tls_fault(error: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS error that caused an error of httpx; None if there is none."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def _distrust(fault: ssl.SSLCertVerificationError) -> str:
    message = fault.verify_message
    match fault.verify_code:  # OpenSSL's X509_V_ERR_*
        case 62 | 64:
            return f"is for another name: {message}; use a name that it has"
        case 10:
            return f"has expired: {message}; have it renewed"
        case _:
            return f"is not trusted: {message}; name the file of its authority in {_CERTIFICATES}"


def _speaks_tls(url: str) -> bool:
    address = httpx.URL(url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is sent over this connection
    try:
        with socket.create_connection((address.host, address.port or 80), _LOOK_SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=address.host).close()
    except OSError:
        return False
    return True
