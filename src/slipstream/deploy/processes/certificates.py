"""A private CA for one fleet, and a TLS certificate for each of its machines.

DIR/ca.pem       the CA certificate, which trainers and engines trust; not secret
DIR/ca.key       signs further certificates; no running process reads it
DIR/node01.pem   certificate of the machine node01
DIR/node01.key   its private key, for that machine only"""

from __future__ import annotations

import inspect
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from slipstream.config import LOOPBACK
from slipstream.errors import ConfigError
from slipstream.runtime.private_files import private_directory

DAYS = 365
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
_MAX_COMMON_NAME = 64
_CLOCK_SKEW = timedelta(hours=1)
"""Certificates are valid from this long before they are made, for machines whose clocks are slow."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of a fleet's certificates and keys."""

    directory: Path

    @property
    def ca(self) -> str:
        return str(self.directory / "ca.pem")

    def of(self, host: str) -> tuple[str, str]:
        """Return the `(certificate, key)` files of a host."""
        return str(self.directory / f"{host}.pem"), str(self.directory / f"{host}.key")


def make(directory: Path, hosts: Sequence[str], days: int = DAYS) -> Certificates:
    """Make a certificate for each host: a name, an IP address, or several of one machine as `node01/10.0.0.1`.

    Files are named after the first name of a host. Every certificate is also valid for loopback. Existing files are kept, so
    hosts can be added later."""
    groups = {group.split("/")[0]: group.split("/") for group in hosts}
    names = {first: [_general_name(name) for name in (*group, *LOOPBACK)] for first, group in groups.items()}
    private_directory(directory, "the directory of certificates")
    files = Certificates(directory)
    if not (directory / "ca.pem").exists():
        _make_ca(files, days)
    for first, alternatives in names.items():
        if not (directory / f"{first}.pem").exists():
            _make_host(files, first, alternatives, days)
    return files


def _make_ca(files: Certificates, days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject("slipstream")
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(name, key.public_key(), name, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    _write(files.of("ca"), builder.sign(key, hashes.SHA256()), key)


def _make_host(files: Certificates, host: str, names: Sequence[x509.GeneralName], days: int) -> None:
    ca = x509.load_pem_x509_certificate(Path(files.ca).read_bytes())
    ca_key = serialization.load_pem_private_key(Path(files.of("ca")[1]).read_bytes(), password=None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_subject(host), key.public_key(), ca.subject, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(digital_signature=True), critical=True)
    # A machine is a server to some and, with mutual TLS, a client that shows its certificate to others.
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    issuer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer)
    builder = builder.add_extension(authority, critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(list(dict.fromkeys(names))), critical=False)
    _write(files.of(host), builder.sign(ca_key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_MAX_COMMON_NAME])])


def _key_usage(**allowed: bool) -> x509.KeyUsage:
    usages = list(inspect.signature(x509.KeyUsage).parameters)  # each must be given
    return x509.KeyUsage(**dict.fromkeys(usages, False) | allowed)


def _write(files: tuple[str, str], certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Write the key first, readable by its owner only, then the certificate by a rename, so that a certificate never exists
    without its key."""
    certificate_file, key_file = map(Path, files)
    key_file.unlink(missing_ok=True)
    with open(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    part = certificate_file.with_suffix(".part")
    part.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    part.rename(certificate_file)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is neither a host name nor an IP address")
    if name == "ca":
        raise ConfigError(
            "a host cannot be named 'ca': the CA's own files have that name; give the host's address instead"
        )
    return x509.DNSName(name)
