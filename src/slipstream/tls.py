"""TLS, the same for the gateway, the HTTP front and weights over tcp: what is shown, what is trusted, and what is wrong.

Whoever listens beyond loopback shows a certificate (PEM files; `topology/certificates.py` makes them). The gateway's must be
signed by the CA that a trainer or an engine was given. An engine's, for weights, must have the fingerprint that came through
the gateway."""

from __future__ import annotations

import hashlib
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.config import LOOPBACK
from slipstream.errors import ConfigError, TlsError

PROBE_SECONDS = 5.0
_WRONG_NAME = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate {certificate} and its key {key} cannot be loaded: {error}") from None
    return context


def client_context(ca: str) -> ssl.SSLContext:
    """Trusts what this CA signed; without one, anybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not ca:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the CA {ca} cannot be loaded: {error}") from None
    return context


def fingerprint(certificate: str) -> str:
    """Of the first certificate in a PEM file."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    body = Path(certificate).read_text().partition(begin)[2].partition(end)[0]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(begin + body + end)).hexdigest()


def host_of(address: str) -> tuple[str, int]:
    """`("10.0.0.1", 8471)` of `10.0.0.1:8471`; also `node01:8471`, `[::1]:8471`."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise ConfigError(f"{address!r} is not an address like 127.0.0.1:8471")
    return host, port


def check_dialable(what: str, host: str) -> None:
    """`ConfigError` if a name that others are to dial is loopback here, as a machine's own name often is (127.0.1.1)."""
    if host in LOOPBACK:
        return
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"{what} is {host!r}, and this machine does not know that name: {error}") from None
    if all(str(address).startswith("127.") or address == "::1" for address in found):
        raise ConfigError(
            f"{what} is {host!r}, which on this machine is {', '.join(map(str, found))}: nobody else can reach it. Name its "
            "address in the network, or mend /etc/hosts"
        )


def disagreement(address: str, ca: str) -> TlsError | None:
    """Why a gateway that is there does not answer, if TLS is the reason: looks for itself, and waits a few seconds at most."""
    host, port = host_of(address)
    try:
        with (
            socket.create_connection((host, port), timeout=PROBE_SECONDS) as plain,
            client_context(ca).wrap_socket(plain, server_hostname=host),
        ):
            spoken = True
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _WRONG_NAME:
            return TlsError(
                f"the certificate of the gateway at {address} is not for {host!r} ({error.verify_message}); dial a name that "
                f"it has, or make one with it: slipstream certificates --hosts {host}"
            )
        return TlsError(
            f"the certificate of the gateway at {address} was not signed by {ca} ({error.verify_message}); is that the CA of "
            "this run? The gateway's own is named in gateway.json of its run directory"
        )
    except (ssl.SSLError, ConnectionResetError):
        spoken = False
    except OSError:  # nobody there
        return None
    if ca and not spoken:
        return TlsError(
            f"what listens at {address} does not speak TLS, and a CA was given ({ca}); is it the right port, and was the "
            "gateway started with a certificate?"
        )
    if spoken and not ca:
        return TlsError(
            f"the gateway at {address} speaks TLS, and this side does not: name the CA of the run (ca=, --ca or "
            "SLIPSTREAM_CA), or join by its run directory"
        )
    return None
