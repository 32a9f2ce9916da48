"""TLS for the gateway, the HTTP server and weight transfers over TCP.

A server beyond loopback needs a certificate (PEM files; `deploy/processes/certificates.py` makes them). Clients verify the
gateway's against the CA that they were given; with `mutual_tls` the gateway verifies theirs against the same CA. An engine's
certificate for weights must have the fingerprint that the trainer received through the gateway."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from slipstream.config import LOOPBACK
from slipstream.errors import ConfigError, TlsError

PROBE_SECONDS = 5.0
_WRONG_NAME = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


class Identity(NamedTuple):
    """The certificate and private key, PEM files, that a client shows to the gateway; empty for none."""

    certificate: str = ""
    key: str = ""


ANONYMOUS = Identity()


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_chain(context, certificate, key)
    return context


def _load_chain(context: ssl.SSLContext, certificate: str, key: str) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load the certificate {certificate} with the key {key}: {error}") from None


def client_context(ca: str, identity: Identity = ANONYMOUS) -> ssl.SSLContext:
    """Return a client context that trusts certificates signed by this CA, or any certificate without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if identity.certificate or identity.key:
        _load_chain(context, *identity)
    if not ca:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot load the CA {ca}: {error}") from None
    return context


def fingerprint(certificate: str) -> str:
    """Return the SHA-256 fingerprint of the first certificate in a PEM file."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    body = Path(certificate).read_text().partition(begin)[2].partition(end)[0]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(begin + body + end)).hexdigest()


def host_of(address: str) -> tuple[str, int]:
    """Split an address: `10.0.0.1:8471` is `("10.0.0.1", 8471)`. Also takes `node01:8471` and `[::1]:8471`."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise ConfigError(f"{address!r} is not an address like 127.0.0.1:8471")
    return host, port


def check_dialable(what: str, host: str) -> None:
    """Raise `ConfigError` if a host name for others resolves to loopback here, as a machine's own may (127.0.1.1)."""
    if host in LOOPBACK:
        return
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"{what} is {host!r}, which this machine cannot resolve: {error}") from None
    if all(str(address).startswith("127.") or address == "::1" for address in addresses):
        raise ConfigError(
            f"{what} is {host!r}, which resolves to {', '.join(map(str, addresses))} on this machine, so other machines cannot "
            "reach it; use its network address, or fix /etc/hosts"
        )


def diagnose_tls(address: str, ca: str, identity: Identity = ANONYMOUS) -> TlsError | None:
    """Diagnose why a gateway does not answer: return an error if TLS is the reason. Probes the address for a few seconds.

    A gateway that dies during the handshake looks like one without TLS; the second probe finds nobody, or its successor."""
    return _probe(address, ca, identity) and _probe(address, ca, identity)


def _probe(address: str, ca: str, identity: Identity) -> TlsError | None:
    host, port = host_of(address)
    context, is_accepted = client_context(ca, identity), True
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            uses_tls = True
            with contextlib.suppress(TimeoutError):
                is_accepted = _greets(secure)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _WRONG_NAME:
            return TlsError(
                f"the certificate of the gateway at {address} is not valid for {host!r} ({error.verify_message}); connect by a "
                f"name in the certificate, or make a new one: slipstream certificates --hosts {host}"
            )
        return TlsError(
            f"the certificate of the gateway at {address} was not signed by {ca} ({error.verify_message}); use the CA named in "
            "gateway.json of the gateway's run directory"
        )
    except (ssl.SSLError, ConnectionResetError):
        uses_tls = False
    except OSError:  # nothing listens
        return None
    if ca and not uses_tls:
        return TlsError(
            f"a CA was given ({ca}), but the server at {address} does not use TLS; check the port, and that the gateway was "
            "started with a certificate"
        )
    if uses_tls and not ca:
        return TlsError(
            f"the gateway at {address} requires TLS; pass the CA of the run (ca=, --ca or SLIPSTREAM_CA), or connect by its "
            "run directory"
        )
    if not is_accepted:
        shown = f"the certificate {identity.certificate} was not accepted" if identity.certificate else "none was shown"
        return TlsError(
            f"the gateway at {address} requires a certificate signed by its CA (mutual_tls), and {shown}; pass this machine's "
            "certificate and key, which `slipstream certificates` makes, or connect by the run directory"
        )
    return None


def _greets(secure: ssl.SSLSocket) -> bool:
    """Whether the gateway sends its first bytes. It closes the connection instead if it does not accept our certificate."""
    try:
        return secure.recv(1) != b""
    except (ssl.SSLError, ConnectionError):
        return False
