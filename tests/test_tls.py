"""Certificates, and what a trainer and an engine are told when they and the gateway do not agree on TLS. On loopback, where TLS is a
choice; tests/topology/test_hosts.py has machines."""

import asyncio
import contextlib
import socket
import ssl
import subprocess

import pytest

from slipstream import portal, tls
from slipstream.config import EngineConfig, GatewayConfig, HttpConfig
from slipstream.errors import ConfigError, GatewayLost, SlipstreamError, TlsError, Unauthorized
from slipstream.gateway.attach import knock
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.server import is_free, running
from slipstream.topology import certificates
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
    return GatewayConfig(host, certificate=certificate, key=key, ca=files.ca)


async def refusals(address, token, ca):
    """What a trainer, an engine that asks first and an engine that attaches are told."""

    async def trainer():
        fleet = GatewayFleet(address, token, 5.0, CAP, ca=ca)
        try:
            await fleet.refresh()
        finally:
            await fleet.close()

    async def engine():
        async with attached(ScriptedEngine("a"), address, token, patience=60.0, ca=ca):
            pass

    told = []
    for attempt in (trainer, lambda: knock(address, token, CAP, ca), engine):
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

    portal.run(main())


@pytest.mark.parametrize(
    ("token", "ca", "kind", "said"),
    [
        ("wrong", "ours", Unauthorized, "token missing or wrong"),
        (TOKEN, "others", TlsError, "was not signed by"),
        (TOKEN, "", TlsError, "speaks TLS, and this side does not"),
    ],
)
def test_refused_by_a_gateway_with_tls(files, others, token, ca, kind, said):
    async def main():
        async with running(secured(files), TOKEN) as address:
            for error in await refusals(address, token, {"ours": files.ca, "others": others.ca, "": ""}[ca]):
                assert type(error) is kind and said in str(error) and address in str(error)

    portal.run(main())


def test_tls_against_a_gateway_without(files):
    async def main():
        async with running(GatewayConfig(), TOKEN) as address:
            for error in await refusals(address, TOKEN, files.ca):
                assert type(error) is TlsError and f"{address} does not speak TLS" in str(error)

    portal.run(main())


def test_a_certificate_for_another_name(tmp_path):
    """Those of ours are always for loopback; one that is not is refused there."""
    certificate, key = str(tmp_path / "one.pem"), str(tmp_path / "one.key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=server"]
    command += ["-addext", "subjectAltName=DNS:elsewhere", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)

    async def main():
        async with running(GatewayConfig(certificate=certificate, key=key, ca=certificate), TOKEN) as address:
            for error in await refusals(address, TOKEN, certificate):
                assert type(error) is TlsError and "is not for '127.0.0.1'" in str(error)

    portal.run(main())


def test_nobody_there_is_no_matter_of_tls(files):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    async def main():
        fleet = GatewayFleet(address, TOKEN, 5.0, CAP, ca=files.ca)
        with pytest.raises(GatewayLost, match=address):
            await fleet.refresh()
        await fleet.close()
        await knock(address, TOKEN, CAP, files.ca)  # it may come yet

    portal.run(main())


def test_the_token_is_not_sent_in_the_clear():
    for address in ("10.9.8.7:1", "node1:1", "[2001:db8::1]:1"):
        with pytest.raises(ConfigError, match="no token is sent there in the clear"):
            portal.run(_fleet(address, ""))
    with pytest.raises(ConfigError, match="not an address"):
        portal.run(_fleet("nowhere", ""))


def test_files_that_cannot_be_read(files, tmp_path):
    with pytest.raises(ConfigError, match=r"the CA .*none cannot be loaded"):
        portal.run(_fleet("127.0.0.1:1", str(tmp_path / "none")))
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ConfigError, match="junk cannot be loaded"):
        portal.run(_fleet("127.0.0.1:1", str(tmp_path / "junk")))
    foreign = GatewayConfig(certificate=files.of("node1")[0], key=files.of("10.1.2.4")[1], ca=files.ca)

    async def main():
        async with running(foreign, TOKEN):
            pass

    with pytest.raises(ConfigError, match="and its key"):
        portal.run(main())


async def _fleet(address, ca):
    await GatewayFleet(address, TOKEN, 1.0, CAP, ca=ca).close()


@pytest.mark.parametrize(
    "listening",
    [
        lambda host, **tls: GatewayConfig(host=host, **({"ca": "ca"} | tls if tls else {})),
        lambda host, **tls: HttpConfig(host=host, **tls),
        lambda host, **tls: EngineConfig(listen=host, **tls),
    ],
)
def test_beyond_loopback_only_with_tls_and_only_where_others_can_dial(listening):
    for host in ("10.0.0.1", "node1", "0.0.0.0", ""):
        with pytest.raises(ConfigError, match="needs TLS"):
            listening(host)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ConfigError, match="every address"):
            listening(host, certificate="c", key="k")
    with pytest.raises(ConfigError, match="together; key is not given"):
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
    with pytest.raises(ConfigError, match=r"'node1', which on this machine is 127\.0\.1\.1"):
        tls.check_dialable("listen", "node1")
    with pytest.raises(ConfigError, match="does not know that name"):
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
    for name in ("a", "b", "10.0.0.1"):
        tls.server_context(*made.of(name))
        verified = subprocess.run(
            ["openssl", "verify", "-x509_strict", "-CAfile", made.ca, made.of(name)[0]], capture_output=True, text=True
        )
        assert verified.returncode == 0, verified.stderr
    assert len({tls.fingerprint(made.of(name)[0]) for name in ("a", "b")}) == 2


@pytest.mark.parametrize("name", ["", "a b", "-x", "a\nDNS:evil", "../up", "a/b c", "ca", "*", "a,DNS:evil"])
def test_names_that_no_machine_has(tmp_path, name):
    with pytest.raises(ConfigError, match="machine"):
        certificates.make(tmp_path / "c", [name])
    assert not (tmp_path / "c").exists()


def test_without_openssl_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="`openssl`, which is not installed"):
        certificates.make(tmp_path / "c", ["a"])


def test_a_certificate_names_its_machine_and_loopback(files):
    """As any client sees it that knows the CA."""
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
