"""What processes tell each other: a codec that runs nothing, signatures, and ports that strangers reach in vain."""
from __future__ import annotations

import ast
import math
import os
import pickle
import random
import subprocess
import time
from pathlib import Path

import harness
import pytest
import torch

import globaltensor as gt
from globaltensor.layouts.layout import layout
from globaltensor.pipelining.stage_comm import TensorMeta
from globaltensor.runtime import codec
from globaltensor.runtime.secret import share_secret
from globaltensor.tensors.convert import PartInfo

SEED = int(os.environ.get("SEED", "0"))
P22 = gt.placement("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
HERE = layout(P22, (gt.sbp.split(1), gt.sbp.partial_max))

VALUES = [
    None, True, 0, -1, 1 << 80, 0.1, -0.0, math.inf, "", "ä\n\0", (), [], {}, set(), (1, [2, (3,)]),
    {"a": 1, 2: None, (3, "x"): {"b": [True]}}, {1, (2, 3)}, 1 - 2j, torch.bfloat16, torch.Size([2, 3]),
    gt.sbp.broadcast, P22, HERE, TensorMeta(HERE, (2, 3), torch.float32, True),
    PartInfo((2,), (), torch.int64, 5, None),
]
TENSORS = [torch.arange(6.).view(2, 3), torch.zeros(0, 3), torch.tensor(5, dtype=torch.uint8), torch.ones(3).bfloat16(),
           torch.arange(6).view(2, 3).T, torch.tensor([1 + 2j])]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_message_is_what_was_sent(value):
    back = codec.decode_message(codec.encode_message(value, 3), 3)
    assert back == value and type(back) is (tuple if isinstance(value, torch.Size) else type(value))


@pytest.mark.parametrize("t", TENSORS, ids=lambda t: f"{t.dtype} {list(t.shape)}")
def test_a_tensor_is_what_was_sent(t):
    back = codec.decode_message(codec.encode_message([t]))[0]
    assert back.dtype == t.dtype and torch.equal(back, t)
    back.add_(1)                                     # in memory of its own


def test_not_a_number_is_what_was_sent():
    assert math.isnan(codec.decode_message(codec.encode_message(math.nan)))


@pytest.mark.parametrize("value", [object(), len, torch.nn.Linear(2, 2), b"bytes", Path("x")],
                         ids=lambda value: type(value).__name__)
def test_other_types_are_refused_by_the_sender(value):
    with pytest.raises(TypeError, match="is not among what processes tell each other"):
        codec.encode_message((1, value))


def test_ten_thousand_mutated_messages_are_refused():
    print("SEED", SEED)
    draw = random.Random(SEED)
    for _ in range(10_000):
        data = bytearray(codec.encode_message(draw.choice(VALUES + TENSORS), 1))
        before = bytes(data)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            data[at:at + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 3))
            data = data or bytearray(b"0")
        if bytes(data) != before:
            with pytest.raises(gt.errors.TransportError, match="wrong signature"):
                codec.decode_message(bytes(data), 1)


def test_signed_nonsense_is_a_value_or_one_error():
    """Where there is no secret anybody can sign: whatever they do, nothing but TransportError comes of it."""
    print("SEED", SEED)
    draw = random.Random(SEED)
    words = ['"tensor"', '"dtype"', '"placement"', '"Layout"', '"dict"', '"TensorMeta"', "[", "]", ",", "1e999", "-1",
             "{}", '"float32"', '"system"', "null", "[[", '"Sbp"', '"S"', "99999999999999999999", '"complex"', '"set"']
    refused = 0
    for k in range(10_000):
        text = codec.encode_message(draw.choice(VALUES + TENSORS))[32:].decode()
        if k % 2:
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(words) + text[at + draw.randint(0, 4):]
        else:
            text = "[" + ",".join(draw.choices(words, k=draw.randint(1, 6))) + "]"
        try:
            codec.decode_message(codec._sign(text.encode(), "") + text.encode())
        except gt.errors.TransportError:
            refused += 1
    assert refused > 5_000
    for text in ("[" * 100_000, '["tensor",["dtype","float32"],["tuple",1000000000000],"AAAA"]',
                 '["dtype","float32.x"]', '["dtype","load"]', pickle.dumps(1).decode("latin1")):
        with pytest.raises(gt.errors.TransportError):
            codec.decode_message(codec._sign(text.encode(), "") + text.encode())


def test_a_message_counts_for_its_sender_its_job_and_its_secret(monkeypatch):
    data = codec.encode_message("x", 0)
    assert codec.decode_message(data, 0) == "x"
    with pytest.raises(gt.errors.TransportError, match="wrong signature"):
        codec.decode_message(data, 1)
    for variable in ("MASTER_PORT", codec.SECRET):
        with monkeypatch.context() as inside, pytest.raises(gt.errors.TransportError, match="wrong signature"):
            inside.setenv(variable, "another")
            codec.decode_message(data, 0)
    for theirs, mine in (("", "of the host"), ("of the host", "")):      # one signs, the other has nothing to sign with
        monkeypatch.setenv(codec.SECRET, theirs)
        data = codec.encode_message("x", 0)
        monkeypatch.setenv(codec.SECRET, mine)
        with pytest.raises(gt.errors.TransportError, match="the same WORLD_SIZE and LOCAL_WORLD_SIZE for all ranks"):
            codec.decode_message(data, 0)


def test_nothing_in_the_package_reads_pickles():
    package = Path(gt.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = ([a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else
                     [node.attr] if isinstance(node, ast.Attribute) else [])
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle", "broadcast_object_list",
                        "all_gather_object"} & set(names), f"{path}:{node.lineno}"


def test_the_secret_of_a_user_is_in_a_file_that_nobody_else_reads(monkeypatch, tmp_path, recwarn):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def secret():
        monkeypatch.setenv(codec.SECRET, "")         # which is undone at the end, whatever is written there
        share_secret(one_host=True, first=True)
        return os.environ[codec.SECRET]

    first = secret()
    assert len(first) == 64 and secret() == first
    file = tmp_path / "state" / "globaltensor" / "secret"
    assert file.stat().st_mode & 0o777 == 0o600 and [p.name for p in file.parent.iterdir()] == ["secret"]
    file.chmod(0o644)
    with pytest.raises(gt.errors.TransportError, match="others can read or replace"):
        secret()
    assert not recwarn.list
    monkeypatch.setenv(codec.SECRET, "")
    with pytest.warns(UserWarning, match="is not signed\n.*several hosts"):
        share_secret(one_host=False, first=True)


# ----------------------------------------------------------------------------------------------------- attacks


def listening(pids: set[int]) -> dict[int, str]:
    """The TCP ports that these processes listen at, with their addresses in hexadecimal, as Linux shows them."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(link))
            except FileNotFoundError:
                pass
    found = {}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                address, port = words[1].split(":")
                found[int(port, 16)] = address
    return found


def family(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid}.union(*(family(int(child)) for child in children))


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.processes
def test_another_user_at_every_port_of_a_job(tmp_path):
    mark = tmp_path / "open" / "mark"
    mark.parent.mkdir()
    mark.parent.chmod(0o777)
    job = harness.Started([*harness.RUN, "-n", 2, harness.PROGRAMS / "attacked.py", tmp_path])
    limit = time.monotonic() + 60
    while len(list(tmp_path.glob("started *"))) < 2 and time.monotonic() < limit and job.process.poll() is None:
        time.sleep(0.05)
    ports = listening(family(job.process.pid))
    assert ports and set(ports.values()) <= LOOPBACK, ports
    attack = subprocess.run([harness.PYTHON, harness.PROGRAMS / "attack.py", *map(str, ports)], cwd="/", text=True,
                            env=harness.environment(MARK=str(mark)), capture_output=True, timeout=60)
    (tmp_path / "attacked").touch()
    code, out, err = job.end()
    assert attack.returncode == 0 and "wrote" in attack.stdout, attack.stdout + attack.stderr
    assert code == 0 and out.count("4.0") == 2, out + err
    assert not mark.exists(), mark.read_text()


@pytest.mark.processes
def test_a_stranger_who_joins_as_a_rank_is_refused():
    program = [harness.PROGRAMS / "values.py", "/nonexistent"]
    env = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(harness.free_port()))
    ranks = [harness.Started([harness.PYTHON, *program], harness.environment(RANK=str(r), LOCAL_RANK=str(r), **env,
                                                                             GLOBALTENSOR_SECRET=f"secret of {r}"))
             for r in range(2)]
    for code, out, err in [rank.end() for rank in ranks]:
        assert code == 1 and ("a message with a wrong signature" in err or "lost touch" in err), out + err
