"""Certificates, and the errors of trainers and engines on TLS problems, on loopback, where TLS is optional. See also
tests/deploy/test_hosts.py."""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

import slipstream
from slipstream.config import EmbeddedConfig, GatewayConfig, HttpConfig
from slipstream.deploy.processes import certificates
from slipstream.errors import ConfigError, GatewayLost, SlipstreamError, TlsError, Unauthorized
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.engine_stream import check_access
from slipstream.gateway.server import is_free, running
from slipstream.runtime import event_loop, tls
from tests.gateway.scripted import ScriptedEngine, attached

TOKEN = "secret-of-a-test"
CAP = 1 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("ours"), ["node1/10.1.2.3", "10.1.2.4"])


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("others"), ["node1"])


def secured(files, host="127.0.0.1"):
    certificate, key = files.of("node1")
    return GatewayConfig(host=host, certificate=certificate, key=key, ca=files.ca)


async def refusals(address, token, ca, identity=tls.ANONYMOUS):
    """Return the errors of a trainer, of an engine's access check, and of an engine that attaches."""

    async def trainer():
        fleet = GatewayFleet(address, token, 5.0, CAP, ca=ca, identity=identity)
        try:
            await fleet.refresh()
        finally:
            await fleet.close()

    async def engine():
        async with attached(ScriptedEngine("a"), address, token, patience=60.0, ca=ca, identity=identity):
            pass

    told = []
    for attempt in (trainer, lambda: check_access(address, token, CAP, ca, identity), engine):
        try:
            await asyncio.wait_for(attempt(), 30)
            told.append(None)
        except SlipstreamError as error:
            told.append(error)
    return told


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_trainer_and_engine_over_tls(files, host):
    if host == "::1" and not is_free(host, 0):
        pytest.skip("this machine has no IPv6")

    async def main():
        async with running(secured(files, host), TOKEN) as address:
            assert await refusals(address, TOKEN, files.ca) == [None, None, None]

    event_loop.run(main())


@pytest.mark.parametrize(
    ("token", "ca", "kind", "said"),
    [
        ("wrong", "ours", Unauthorized, "token missing or wrong"),
        (TOKEN, "others", TlsError, "was not signed by"),
        (TOKEN, "", TlsError, "requires TLS"),
    ],
)
def test_refused_by_a_gateway_with_tls(files, others, token, ca, kind, said):
    async def main():
        async with running(secured(files), TOKEN) as address:
            for error in await refusals(address, token, {"ours": files.ca, "others": others.ca, "": ""}[ca]):
                assert type(error) is kind and said in str(error) and address in str(error)

    event_loop.run(main())


def test_a_gateway_that_requires_certificates_of_both_sides(files, others):
    config = secured(files).replace(mutual_tls=True)

    async def main():
        async with running(config, TOKEN) as address:
            assert await refusals(address, TOKEN, files.ca, tls.Identity(*files.of("10.1.2.4"))) == [None, None, None]
            for identity, said in (
                (tls.ANONYMOUS, "none was shown"),
                (tls.Identity(*others.of("node1")), f"{others.of('node1')[0]} was not accepted"),
            ):
                for error in await refusals(address, TOKEN, files.ca, identity):
                    assert type(error) is TlsError and "requires a certificate" in str(error) and said in str(error)
            (error, *_) = await refusals(address, "wrong", files.ca, tls.Identity(*files.of("node1")))
            assert type(error) is Unauthorized

    event_loop.run(main())
    with pytest.raises(ConfigError, match="mutual_tls needs certificate, key and ca"):
        GatewayConfig(mutual_tls=True)


def test_a_run_directory_holds_what_mutual_tls_needs(files, tmp_path):
    """The gateway as a process, with HTTP; trainer and command line join by its directory."""
    certificate, key = files.of("node1")
    command = [
        sys.executable,
        "-m",
        "slipstream.cli",
        "gateway",
        "--run-dir",
        str(tmp_path),
        "--http",
        "0",
        "--mutual-tls",
    ]
    with subprocess.Popen([*command, "--certificate", certificate, "--key", key, "--ca", files.ca]) as gateway:
        try:
            while not (tmp_path / "gateway.json").exists():
                assert gateway.poll() is None
                time.sleep(0.02)
            with slipstream.connect(tmp_path) as bridge:
                assert bridge.status().engines == ()
                headers = {"Authorization": f"Bearer {(tmp_path / 'token').read_text()}"}
                assert httpx.get(f"{bridge.http_url}/ready", headers=headers, timeout=60).status_code == 503
                address = json.loads((tmp_path / "gateway.json").read_text())["address"]
                token = (tmp_path / "token").read_text()
            with slipstream.connect(address, token=token, ca=files.ca, certificate=certificate, key=key) as bridge:
                assert bridge.version == -1
            with pytest.raises(TlsError, match="none was shown"):
                slipstream.connect(address, token=token, ca=files.ca)
        finally:
            gateway.kill()


def test_tls_against_a_gateway_without(files):
    async def main():
        async with running(GatewayConfig(), TOKEN) as address:
            for error in await refusals(address, TOKEN, files.ca):
                assert type(error) is TlsError and f"{address} does not use TLS" in str(error)

    event_loop.run(main())


def test_a_gateway_that_dies_during_the_handshake_is_not_one_without_tls(files):
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        diagnosis = pool.submit(tls.diagnose_tls, address, files.ca)
        peer, _ = listening.accept()
        listening.close()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        peer.close()
        assert diagnosis.result(timeout=60) is None


def test_a_certificate_for_another_name(tmp_path):
    """Our certificates are always valid for loopback; one that is not is refused there."""
    authority = trustme.CA()
    ca, certificate, key = (str(tmp_path / name) for name in ("ca.pem", "one.pem", "one.key"))
    authority.cert_pem.write_to_path(ca)
    issued = authority.issue_cert("elsewhere")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)

    async def main():
        async with running(GatewayConfig(certificate=certificate, key=key, ca=ca), TOKEN) as address:
            for error in await refusals(address, TOKEN, ca):
                assert type(error) is TlsError and "is not valid for '127.0.0.1'" in str(error)

    event_loop.run(main())


def test_nobody_there_is_no_matter_of_tls(files):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    async def main():
        fleet = GatewayFleet(address, TOKEN, 5.0, CAP, ca=files.ca)
        with pytest.raises(GatewayLost, match=address):
            await fleet.refresh()
        await fleet.close()
        await check_access(address, TOKEN, CAP, files.ca)  # the gateway may start later

    event_loop.run(main())


def test_the_token_is_not_sent_in_the_clear():
    for address in ("10.9.8.7:1", "node1:1", "[2001:db8::1]:1"):
        with pytest.raises(ConfigError, match="in the clear"):
            event_loop.run(_fleet(address, ""))
    with pytest.raises(ConfigError, match="not an address"):
        event_loop.run(_fleet("nowhere", ""))


def test_files_that_cannot_be_read(files, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot load the CA .*none"):
        event_loop.run(_fleet("127.0.0.1:1", str(tmp_path / "none")))
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ConfigError, match=r"cannot load the CA .*junk"):
        event_loop.run(_fleet("127.0.0.1:1", str(tmp_path / "junk")))
    foreign = GatewayConfig(certificate=files.of("node1")[0], key=files.of("10.1.2.4")[1], ca=files.ca)

    async def main():
        async with running(foreign, TOKEN):
            pass

    with pytest.raises(ConfigError, match="with the key"):
        event_loop.run(main())


async def _fleet(address, ca):
    await GatewayFleet(address, TOKEN, 1.0, CAP, ca=ca).close()


@pytest.mark.parametrize(
    "listening",
    [
        lambda host, **tls: GatewayConfig(host=host, **({"ca": "ca"} | tls if tls else {})),
        lambda host, **tls: HttpConfig(host=host, **tls),
        lambda host, **tls: EmbeddedConfig(listen=host, **tls),
    ],
)
def test_beyond_loopback_only_with_tls_and_only_where_others_can_dial(listening):
    for host in ("10.0.0.1", "node1", "0.0.0.0", ""):
        with pytest.raises(ConfigError, match="TLS is required"):
            listening(host)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ConfigError, match="wildcard"):
            listening(host, certificate="c", key="k")
    with pytest.raises(ConfigError, match=r"needs certificate, key(, ca)?; key is not set"):
        listening("127.0.0.1", certificate="c")
    assert listening("10.0.0.1", certificate="c", key="k") and listening("127.0.0.1", certificate="c", key="k")


def test_a_name_that_is_loopback_here_is_not_announced(files, monkeypatch):
    known = {"node1": "127.0.1.1", "node2": "10.0.0.2"}

    def resolve(name, *_, **__):
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    tls.check_dialable("listen", "node2")
    tls.check_dialable("listen", "localhost")
    with pytest.raises(ConfigError, match=r"'node1', which resolves to 127\.0\.1\.1"):
        tls.check_dialable("listen", "node1")
    with pytest.raises(ConfigError, match="cannot resolve"):
        tls.check_dialable("listen", "node3")


# --- certificates -----------------------------------------------------------------------------------------------------


def test_keys_are_private_and_hosts_can_be_added(tmp_path):
    made = certificates.make(tmp_path / "c", ["a", "10.0.0.1"])
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    assert set(before) == {f"{name}.{kind}" for name in ("ca", "a", "10.0.0.1") for kind in ("pem", "key")}
    assert all((tmp_path / "c" / name).stat().st_mode & 0o077 == 0 for name in before if name.endswith("key"))
    assert (tmp_path / "c").stat().st_mode & 0o077 == 0
    certificates.make(tmp_path / "c", ["a", "b"])
    after = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    assert set(after) - set(before) == {"b.pem", "b.key"} and {**after, **before} == after
    store = Store(x509.load_pem_x509_certificates(Path(made.ca).read_bytes()))
    verifier = PolicyBuilder().store(store).build_server_verifier(x509.DNSName("localhost"))
    for name in ("a", "b", "10.0.0.1"):
        tls.server_context(*made.of(name))
        verifier.verify(x509.load_pem_x509_certificate(Path(made.of(name)[0]).read_bytes()), [])
    assert len({tls.fingerprint(made.of(name)[0]) for name in ("a", "b")}) == 2


@pytest.mark.parametrize("name", ["", "a b", "-x", "a\nDNS:evil", "../up", "a/b c", "ca", "*", "a,DNS:evil"])
def test_invalid_host_names_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="host"):
        certificates.make(tmp_path / "c", [name])
    assert not (tmp_path / "c").exists()


def test_a_certificate_names_its_machine_and_loopback(files):
    """Checked with a standard client context."""
    server = tls.server_context(*files.of("node1"))
    for name, fits in {"node1": True, "10.1.2.3": True, "localhost": True, "node2": False, "10.1.2.4": False}.items():
        assert _shakes_hands(ssl.create_default_context(cafile=files.ca), name, server) is fits


def _shakes_hands(trusting, name, showing):
    incoming, outgoing, received, sent = (ssl.MemoryBIO() for _ in range(4))
    client = trusting.wrap_bio(incoming, outgoing, server_hostname=name)
    server = showing.wrap_bio(received, sent, server_side=True)
    for _ in range(5):
        try:
            client.do_handshake()
            return True
        except ssl.SSLWantReadError:
            received.write(outgoing.read())
        except ssl.SSLCertVerificationError:
            return False
        with contextlib.suppress(ssl.SSLWantReadError):
            server.do_handshake()
        incoming.write(sent.read())
    raise AssertionError("no end of it")
