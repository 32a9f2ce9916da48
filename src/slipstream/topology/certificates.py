"""A small CA for one fleet, and a certificate for each of its machines, made with the `openssl` command.

DIR/ca.pem       what trainers and engines trust; may be known to anybody
DIR/ca.key       signs further certificates; needed by nobody who runs
DIR/node01.pem   what the machine node01 shows
DIR/node01.key   its key, for that machine"""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import LOOPBACK
from slipstream.errors import ConfigError

DAYS = 365
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
_CONFIG = """
[req]
prompt = no
distinguished_name = subject
[subject]
CN = {subject}
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[machine]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Where the files of a fleet are."""

    directory: Path

    @property
    def ca(self) -> str:
        return str(self.directory / "ca.pem")

    def of(self, host: str) -> tuple[str, str]:
        """`(certificate, key)` of whoever listens there."""
        return str(self.directory / f"{host}.pem"), str(self.directory / f"{host}.key")


def make(directory: Path, hosts: Sequence[str], days: int = DAYS) -> Certificates:
    """A certificate for each host: a name, an address, or several of one machine as `node01/10.0.0.1`, whose files have the
    first one's name. Every certificate is for loopback, too. What is there is kept, so that hosts can be added."""
    names = {group.split("/")[0]: group.split("/") for group in hosts}
    for name in (name for group in names.values() for name in group):
        _kind(name)
    if shutil.which("openssl") is None:
        raise ConfigError(
            "certificates are made with the command `openssl`, which is not installed; make them elsewhere, or install it"
        )
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    if not (directory / "ca.pem").exists():
        _make(directory, "ca", "slipstream", ["localhost"], days)
    for first, group in names.items():
        if not (directory / f"{first}.pem").exists():
            _make(directory, first, group[0], [*group, *LOOPBACK], days)
    return Certificates(directory)


def _make(directory: Path, name: str, subject: str, names: Sequence[str], days: int) -> None:
    key, certificate = directory / f"{name}.key", directory / f"{name}.pem"
    key.unlink(missing_ok=True)
    key.touch(mode=0o600, exist_ok=False)  # openssl writes into it; nobody else ever reads it
    with tempfile.TemporaryDirectory() as scratch:
        config, request, signed = (Path(scratch) / file for file in ("openssl.cnf", "request.pem", "signed.pem"))
        kinds = ", ".join(dict.fromkeys(f"{_kind(each)}:{each}" for each in names))
        config.write_text(_CONFIG.format(subject=subject[:64], names=kinds))
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        _openssl("req", "-new", "-sha256", "-config", config, "-key", key, "-out", request)
        is_ca = name == "ca"
        signer: list[str | Path] = (
            ["-signkey", key] if is_ca else ["-CA", directory / "ca.pem", "-CAkey", directory / "ca.key"]
        )
        section = "authority" if is_ca else "machine"
        serial = f"0x{secrets.token_hex(16)}"
        _openssl("x509", "-req", "-sha256", "-in", request, *signer, "-set_serial", serial, "-days", str(days),
                 "-extfile", config, "-extensions", section, "-out", signed)  # fmt: skip
        part = certificate.with_suffix(".part")
        shutil.copyfile(signed, part)
        part.rename(certificate)  # whoever finds it finds all of it, and its key


def _kind(name: str) -> str:
    """`IP` or `DNS`, as a certificate says it."""
    try:
        ipaddress.ip_address(name)
        return "IP"
    except ValueError:
        pass
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is neither the name nor the address of a machine")
    if name == "ca":
        raise ConfigError("a machine cannot be called 'ca' here: that is the name of the CA's files; give its address")
    return "DNS"


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ConfigError(f"`openssl {arguments[0]}` failed: {done.stderr.strip()}")
