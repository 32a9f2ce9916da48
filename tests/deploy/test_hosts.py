"""Several machines: gateway, two engines and a trainer, each with its own address, and TLS between them."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.deploy.processes import certificates
from slipstream.deploy.slurm.job import JobNode
from slipstream.deploy.slurm.node import NodeRole
from slipstream.errors import ConfigError
from slipstream.model.checkpoints.sample_model import write_sample_config
from tests.deploy import host_trainer
from tests.deploy.lan import Machine, environment, lan

NODES = ("node1", "node2", "node3", "node4")
OPTIONS = ("max_num_seqs=8", "max_model_len=64")
TRAINER = str(Path(host_trainer.__file__))


@dataclass(frozen=True)
class Network:
    directory: Path
    machines: dict[str, Machine]
    model: Path
    files: certificates.Certificates
    """Not valid for the address of node1, only for its name."""
    other_ca: str


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    write_sample_config(directory := tmp_path_factory.mktemp("model"))
    return directory


@pytest.fixture(scope="module")
def expected(model):
    """The tokens of an engine in this process with the weights of each seed."""
    with slipstream.inprocess(model, engine=EmbeddedConfig(max_num_seqs=8, max_model_len=64)) as bridge:

        def of(seed):
            bridge.sync(host_trainer.weights(model, seed))
            return host_trainer.answers(bridge)

        return [of(seed) for seed in host_trainer.SEEDS]


@pytest.fixture(scope="module")
def network(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("network")
    with lan(directory, *NODES) as machines:
        files = certificates.make(directory / "certificates", NODES)
        other = certificates.make(directory / "other", ["node1"])
        yield Network(directory, {machine.name: machine for machine in machines}, model, files, other.ca)


@dataclass(frozen=True)
class Up:
    address: str
    url: str
    run_dir: Path
    seen: Path
    """Return all recorded traffic."""

    @property
    def token(self):
        return (self.run_dir / "token").read_text()


@pytest.fixture(scope="module")
def up(network):
    """A gateway with HTTP on node1, engines on node2 and node3, started by commands."""
    run_dir, seen = network.directory / "run", network.directory / "seen"
    node1 = network.machines["node1"]
    certificate, key = network.files.of("node1")
    tls = ["--certificate", certificate, "--key", key, "--ca", network.files.ca]
    front = ["--http", "0", "host=node1", f"certificate={certificate}", f"key={key}"]
    processes = []
    try:
        sniffer = subprocess.Popen(
            [*node1.switch, sys.executable, str(Path(TRAINER).with_name("host_sniffer.py")), str(seen)],
            stdout=subprocess.PIPE,
        )
        processes.append(sniffer)
        assert sniffer.stdout.readline() == b"listening\n"
        command = node1.slipstream("gateway", "--run-dir", str(run_dir), "--host", "node1", *tls, *front)
        processes.append(node1.start(command, network.directory / "gateway.log"))
        eventually(lambda: (run_dir / "gateway.json").exists(), network.directory / "gateway.log")
        facts = json.loads((run_dir / "gateway.json").read_text())
        for name in ("node2", "node3"):
            certificate, key = network.files.of(name)
            how = ["--gateway", facts["address"], "--token-file", str(run_dir / "token"), "--ca", network.files.ca]
            listen = [f"listen={name}", f"certificate={certificate}", f"key={key}", *OPTIONS]
            machine = network.machines[name]
            command = machine.slipstream("engine", "--model", str(network.model), "--name", name, *how, *listen)
            processes.append(machine.start(command, network.directory / f"{name}.log"))
        yield Up(facts["address"], facts["http"], run_dir, seen)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def eventually(done, log, seconds=60):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_sync_and_generate_across_machines(network, up, expected):
    node4, out = network.machines["node4"], network.directory / "trained.json"
    credentials = {"SLIPSTREAM_TOKEN": up.token, "SLIPSTREAM_CA": network.files.ca}
    command = node4.command(sys.executable, TRAINER, str(network.model), "2", str(out), up.address)
    done = node4.run(command, **credentials)
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.read_text())

    assert up.address.startswith("node1:")
    assert expected[0] != expected[1]
    assert facts["tokens"] == [{"node2": tokens, "node3": tokens} for tokens in expected]
    assert set(facts["transports"]) == {"tcp"} and len(facts["transports"]) == 4

    # A tampered link fails with the engine's address in the error, and the policy is unchanged.
    for what, said in {
        "secret": "rejected the connection: the link's secret is wrong",
        "certificate": "has another certificate than the gateway announced",
        "plaintext": "announced no certificate; refusing to send weights unencrypted",
    }.items():
        kind, text = facts["refused"][what]
        assert kind == "TransferError" and said in text and "10.77.0." in text
    assert facts["after"] == [facts["version"], expected[1]]

    # Neither the token nor the weights are visible on the network.
    seen = up.seen.read_bytes()
    trained = host_trainer.weights(network.model, 1)
    embedding = np.asarray(trained["model"]["embed_tokens"]["weight"])
    assert facts["num_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(trained)), "one engine passed them on"
    assert len(seen) > facts["num_bytes"] and b"node1" in seen  # the host name (SNI) is not encrypted
    assert up.token.encode() not in seen
    assert not any(row.tobytes() in seen for row in embedding)


COMMANDS = """
import contextlib, io, json, os, sys
from slipstream.cli.main import main
for arguments, variables in json.load(sys.stdin):
    sys.argv[1:] = arguments
    os.environ.update(variables)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


def refusals(network, up, cases):
    """Ask for the status, and join as an engine, at each of `cases`: address, token and CA. All in one process on node4, as
    starting a command takes long. The gateway is contacted before the model is loaded: there is no model."""
    asked = []
    for address, token, ca in cases:
        variables = {"SLIPSTREAM_TOKEN": token, "SLIPSTREAM_CA": ca}
        commands = (["status"], ["engine", "--model", str(network.directory / "none")])
        asked += [[[*command, "--gateway", address], variables] for command in commands]
    command = network.machines["node4"].command(sys.executable, "-c", COMMANDS)
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, timeout=240, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 2 * len(cases)
    return list(zip(answers[::2], answers[1::2], strict=True))


def test_refused_connections_have_a_reason(network, up):
    port = up.address.rpartition(":")[2]
    ca, number = network.files.ca, f"10.77.0.1:{port}"
    cases = {
        (up.address, "wrong", ca): f"Unauthorized: the gateway at node1:{port}: token missing or wrong",
        (up.address, up.token, network.other_ca): (
            f"TlsError: the certificate of the gateway at node1:{port} was not signed by"
        ),
        (number, up.token, ca): f"TlsError: the certificate of the gateway at {number} is not valid for '10.77.0.1'",
        (up.address, up.token, ""): (
            f"ConfigError: the gateway at node1:{port} is beyond loopback, where the token must not travel in the clear; "
            "give the run's CA (ca=, --ca or SLIPSTREAM_CA), or join by its run directory"
        ),
    }
    for answers, said in zip(refusals(network, up, cases), cases.values(), strict=True):
        for code, text in answers:
            assert code in (1, 2) and f"slipstream: {said}" in text


def test_plaintext_is_refused_with_a_reason(network, up):
    """Our clients refuse plaintext beyond loopback; behind a tunnel they cannot know."""
    node4, greeting = network.machines["node4"], b"PRI * HTTP/2.0"
    assert greeting not in up.seen.read_bytes()
    dig = node4.command(sys.executable, str(Path(TRAINER).with_name("host_tunnel.py")), up.address)
    with subprocess.Popen(dig, stdout=subprocess.PIPE, text=True, env=environment()) as tunnel:
        try:
            near = f"127.0.0.1:{int(tunnel.stdout.readline())}"
            ((asked, joined),) = refusals(network, up, [(near, up.token, "")])
        finally:
            tunnel.terminate()
    for code, text in (asked, joined):
        said = f"slipstream: TlsError: the gateway at {near} requires TLS; pass the CA of the run"
        assert code in (1, 2) and said in text
    # The connection was plaintext, and the token was not sent.
    eventually(lambda: greeting in up.seen.read_bytes(), network.directory / "gateway.log")
    assert up.token.encode() not in up.seen.read_bytes()


def test_plaintext_gets_no_answer(network, up):
    """A foreign client without TLS."""
    script = (
        "import grpc, sys\nfrom slipstream.gateway import slipstream_pb2 as pb, slipstream_pb2_grpc as stubs\n"
        "try:\n    stubs.GatewayStub(grpc.insecure_channel(sys.argv[1])).Status(pb.StatusRequest(), timeout=20,"
        " metadata=(('authorization', 'Bearer ' + sys.argv[2]),))\n"
        "except grpc.RpcError as error:\n    print(error.code().name)\n"
    )
    node4 = network.machines["node4"]
    done = node4.run(node4.command(sys.executable, "-c", script, up.address, up.token))
    assert done.stdout == "UNAVAILABLE\n", done.stderr


def test_http_beyond_loopback_is_https(network, up):
    node4 = network.machines["node4"]
    assert up.url.startswith("https://node1:")

    def curl(*arguments):
        command = ["curl", "-sS", "--max-time", "20", "-o", "-", "-w", "%{http_code}", *arguments]
        return node4.run(node4.command(*command))

    authorised = ["-H", f"Authorization: Bearer {up.token}"]
    good = curl("--cacert", network.files.ca, *authorised, f"{up.url}/v1/models")
    assert good.returncode == 0 and good.stdout.endswith("200")
    assert curl("--cacert", network.files.ca, f"{up.url}/v1/models").stdout.endswith("401")
    assert "certificate" in curl("--cacert", network.other_ca, *authorised, f"{up.url}/v1/models").stderr
    assert curl(*authorised, f"{up.url.replace('https', 'http')}/v1/models").returncode != 0


# --- SLURM ------------------------------------------------------------------------------------------------------------

SRUN = """\
import json, os, subprocess, sys, time
from slipstream.deploy.slurm.job import expand
nodes, command = json.load(open({nodes!r})), [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
started = [
    subprocess.Popen(
        [*nodes[name], *command],
        env={{**os.environ, "SLURM_NODEID": str(index), "SLURMD_NODENAME": name, "SLURM_LOCALID": "0"}},
    )
    for index, name in enumerate(expand(os.environ["SLURM_JOB_NODELIST"]))
]
while None in (codes := [process.poll() for process in started]) and not any(codes):
    time.sleep(0.05)
for process, code in zip(started, codes):
    if code is None:
        process.terminate()  # a failure ends the others
        process.wait()
sys.exit(max(code or 0 for code in codes))
"""


def cluster_in(directory, nodes):
    """A directory for PATH with `slipstream`, and an `srun` that runs a command on each node."""
    (directory / "nodes.json").write_text(json.dumps(nodes))
    programs = {
        "srun": SRUN.format(nodes=str(directory / "nodes.json")),
        "slipstream": "from slipstream.cli.main import main; main()",
    }
    for name, text in programs.items():
        (directory / name).write_text(f"#!{sys.executable}\n{text}")
        (directory / name).chmod(0o755)
    return directory


def sbatch(cluster, *arguments, **variables):
    """Print a script with `slipstream slurm`, and run it as a job."""
    own = environment(variables)
    own["PATH"] = f"{cluster}:{own['PATH']}"
    options = ["--run-dir", str(cluster / "runs"), *(word for option in OPTIONS for word in ("--engine", option))]
    script = subprocess.run(
        ["slipstream", "slurm", *options, *arguments], env=own, capture_output=True, text=True, check=True
    )
    job = {"SLURM_JOB_NAME": "slipstream", "SLURM_JOB_ID": "77"}
    done = subprocess.run(
        ["bash", "-c", script.stdout], env={**own, **job}, capture_output=True, text=True, timeout=1200, check=False
    )
    return done, cluster / "runs" / "slipstream-77-0"


def test_a_slurm_job_on_two_nodes(network, expected, tmp_path):
    cluster = cluster_in(tmp_path, {name: machine.command() for name, machine in network.machines.items()})
    out = cluster / "trained.json"
    trainer = ["--", sys.executable, TRAINER, str(network.model), "1", str(out)]
    options = ["--model", str(network.model), "--inference-nodes", "1"]
    done, run_dir = sbatch(cluster, *options, *trainer, SLURM_JOB_NODELIST="node[1-2]", KILL_AN_ENGINE="1")
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.read_text())
    assert facts["tokens"] == [{"node2-0": tokens} for tokens in expected]
    assert set(facts["transports"]) == {"tcp"}
    assert facts["killed"] == {"node2-0": expected[1]}  # restarted on its node, and repaired
    assert not (run_dir / "gateway.json").exists() and not (run_dir / "token").exists()
    assert run_dir.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="was used by another attempt"):
        NodeRole(JobNode(("node1", "node2"), 0, 1), run_dir, network.model, ["true"]).run()


def test_a_slurm_job_on_one_machine_ends_as_its_trainer_does(model, tmp_path):
    """Without a network. The trainer is a command that lists the engines."""
    cluster, out = cluster_in(tmp_path, {"node4": []}), tmp_path / "status"
    command = f'slipstream status --run-dir "$SLIPSTREAM_RUN_DIR" > {out} && exit 3'
    options = ["--model", str(model), "--inference-nodes", "0", "--engines-per-node", "2"]
    done, run_dir = sbatch(cluster, *options, "--", "sh", "-c", command, SLURM_JOB_NODELIST="node4")
    assert done.returncode == 3, done.stderr
    assert {"node4-0", "node4-1"} <= set(out.read_text().split())
    assert not (run_dir / "gateway.json").exists() and not (run_dir / "token").exists()
