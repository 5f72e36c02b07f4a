"""Checkpoints in a store that a URL names: the same promises as those of a folder. S3 is moto's, on the loopback."""
from __future__ import annotations

import itertools
import warnings
from importlib.util import find_spec

import pytest
import torch
from harness import PROGRAMS, RUN, environment, good, results
from shards import B, place

import globaltensor as gt
from globaltensor.checkpoint import folders
from globaltensor.checkpoint.manifest import CheckpointError
from globaltensor.checkpoint.remote import RemotePath, folder_at
from globaltensor.layouts.sbp import split as S

STORES = ("memory", "file", "s3")
LACKING = [name for name in ("moto", "s3fs", "flask") if find_spec(name) is None]
ACCOUNT = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3():
    """The endpoint of a server of S3's protocol, which has one bucket."""
    if LACKING:
        pytest.skip(f"not installed: {', '.join(LACKING)} (pip install 'moto[server]' s3fs)")
    from moto.server import ThreadedMotoServer
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ACCOUNT, "AWS_ENDPOINT_URL": address}.items():
            patch.setenv(name, value)
        import s3fs
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        yield address
    server.stop()


_numbers = itertools.count()


@pytest.fixture(params=STORES)
def url(request, tmp_path):
    """A folder in each kind of store that nobody has written into."""
    if request.param == "file":
        return f"file://{tmp_path}/run"
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/run-{next(_numbers)}"
    return f"memory://run-{next(_numbers)}"


def state(value: float, sbp=B):
    where = place([0, 1, 2])
    return {"x": gt.full((6, 4), float(value), placement=where, sbp=sbp), "step": int(value)}


def value_of(state):
    [value] = set(state["x"].full_tensor().flatten().tolist())
    return value, state["step"]


def listed(url):
    """What the folder holds, the names of versions without their tokens."""
    folder = folder_at(url)
    return sorted(path.name[:13] if path.name.startswith("step") else path.name for path in folder.iterdir())


def the_version(url):
    return folders.latest(folder_at(url))[0]


def test_versions(url):
    fresh = state(0)
    assert gt.resume(fresh, url) is fresh, "nothing is there yet"
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        gt.load(state(0), url)
    for value in (1.0, 2.0, 3.0):
        saved = gt.save(state(value, S(0)), url, keep=2, asynchronous=value == 2)
        assert saved.wait().name.startswith(f"step-{int(value):08d}")
    assert listed(url) == ["latest", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in the_version(url).iterdir()) == [
        "manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(3))], "no lease, no marks"
    for sbp in (B, S(0), S(1)):
        assert value_of(gt.load(state(0, sbp), url)) == (3, 3) == value_of(gt.resume(state(0, sbp), url))
    version = next(path for path in folder_at(url).iterdir() if path.name.startswith("step-00000002"))
    assert value_of(gt.load(state(0), str(version))) == (2, 2), "a version has a name, too"


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("spoil, words", [
    (lambda folder: flip(folder / "rank-00001.safetensors"), "the piece [2:4, 0:4] of 'x'"),
    (lambda folder: flip(folder / "manifest.json"), "manifest.json is damaged"),
    (lambda folder: flip(folder.parent / "latest"), "is damaged"),
    (lambda folder: (folder / "rank-00002.safetensors").unlink(), "rank-00002.safetensors is missing"),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    (lambda folder: (folder / "rank-00000.safetensors").write_bytes(b"short"), "rank-00000.safetensors is damaged"),
], ids=["a bit", "a bit of the manifest", "a bit of latest", "a file", "the manifest", "cut"])
def test_damage_is_refused_and_changes_nothing(spoil, words, url):
    gt.save(state(1, S(0)), url)
    gt.save(state(2, S(0)), url)
    spoil(the_version(url))
    into = state(0)
    with pytest.raises(CheckpointError) as error:
        gt.load(into, url)
    assert words in str(error.value), error.value
    assert value_of(into) == (0, 0)


class Dead(Exception):
    pass


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.long)])
def test_a_writer_that_dies_at_any_write_leaves_a_whole_version(kind, request, monkeypatch):
    """Before its n-th write, for every n: from then on nothing that it does reaches the store."""
    if kind == "s3":
        request.getfixturevalue("s3")
    outcomes = []
    for n in range(100):
        url = f"{kind}://bucket/dies-{kind}-{n}"
        gt.save(state(1, S(0)), url)
        with monkeypatch.context() as patch:
            left = itertools.count(n, -1)
            for name in ("write_bytes", "upload", "unlink", "remove"):
                patch.setattr(RemotePath, name, mortal(getattr(RemotePath, name), left))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    gt.save(state(2, S(0)), url, keep=1).wait()
                except CheckpointError as error:
                    told = [error]
            if not told:
                break
            assert all("Dead" in str(one) for one in told), told
        outcomes.append(value_of(gt.load(state(0), url)))
        assert outcomes[-1] in ((1, 1), (2, 2))
        assert value_of(gt.resume(state(0), url)) in ((1, 1), (2, 2))
        with monkeypatch.context() as patch:         # its process has ended
            patch.setattr(folders, "writer", lambda path: "")
            gt.save(state(3, S(0)), url, keep=1).wait()
        assert value_of(gt.load(state(0), url)) == (3, 3)
        assert len(listed(url)) == 2, "what the dead writer left is cleared"
    print(outcomes)
    assert 8 <= n < 99 and outcomes[0] == (1, 1) and outcomes[-1] == (2, 2), outcomes


def mortal(function, left):
    def do(self, *args, **options):
        if next(left) <= 0:
            raise Dead(self.name)
        return function(self, *args, **options)
    return do


def test_another_writer_is_waited_for(url, monkeypatch):
    from globaltensor.checkpoint.lease import Lease
    gt.save(state(1), url)
    folder = folder_at(url)
    other = Lease(folders.temporary_name(folder / "step-00000002"))
    monkeypatch.setattr(folders, "PATIENCE", 0.3)
    with pytest.warns(UserWarning, match="saves into"), pytest.raises(CheckpointError, match="is being written by"):
        gt.save(state(2), url)
    other.give_up()
    assert value_of(gt.load(state(0), url)) == (1, 1)
    assert gt.save(state(2), url).wait().name.startswith("step-0000000")
    assert len(listed(url)) == 3, "what was given up is cleared"


@pytest.mark.parametrize("do, words", [
    (lambda: gt.save({}, "nowhere://x/y"), "no checkpoints in nowhere://x/y"),
    (lambda: gt.load({}, "nowhere://x/y"), "no checkpoints in nowhere://x/y"),
    (lambda: gt.resume({}, "nowhere://x/y"), "no checkpoints in nowhere://x/y"),
    (lambda: gt.save({}, "memory://x/model.pt"), 'with fsspec.open("memory://x/model.pt", "wb") as file: gt.save'),
])
def test_what_no_url_can_be(do, words):
    with pytest.raises(gt.GlobalTensorError) as error:
        do()
    assert words in str(error.value)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_processes_share_a_store_or_are_told(kind, request, tmp_path):
    more = {"AWS_ENDPOINT_URL": request.getfixturevalue("s3"), **ACCOUNT} if kind == "s3" else {}
    good([*RUN, "-n", "2", PROGRAMS / "remote.py", f"{kind}://bucket/processes", tmp_path], environment(**more))
    seen = results(tmp_path)
    assert sorted(seen) == [0, 1]
    for one in seen.values():
        if kind == "memory":
            assert "the processes do not share this folder" in one["error"]
        else:
            assert one["number"] == 2 and one["x"] == (torch.arange(12.0).view(6, 2) * 2).tolist()
            assert one["path"].startswith("s3://bucket/processes/step-00000002-")
