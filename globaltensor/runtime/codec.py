"""What processes tell each other, as bytes: values of a few types, with a keyed hash.

Not pickle: to read a pickle is to run what its writer wants, and whoever reaches a port of a job can write to it. A
message here is 32 bytes of HMAC-SHA256, then JSON. What JSON lacks is a list that begins with a tag:

    ["list", ...] ["tuple", ...] ["set", ...] ["dict", [key, value], ...] ["complex", re, im]
    ["dtype", "float32"] ["tensor", dtype, shape, base64 of its bytes] [name of a message class, its fields ...]

The key is GLOBALTENSOR_SECRET, which `globaltensor run` draws for each job on one host (docs/security.md).
"""
from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from globaltensor.errors import TransportError
from globaltensor.layouts.layout import Layout, layout
from globaltensor.layouts.placement import placement
from globaltensor.layouts.sbp import Sbp
from globaltensor.runtime.memory import flat_bytes

SECRET = "GLOBALTENSOR_SECRET"                       # the variable that holds the key
_SIGNATURE = hashlib.sha256().digest_size
_PLAIN = (bool, int, float, str, type(None))         # what JSON has; it reads back NaN and infinity too

N = TypeVar("N", bound=type)

# By tag: how to take a value of that class apart, and how to make it of its parts, which are checked there.
_classes: dict[str, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    "list": (tuple, lambda *parts: list(parts)),
    "tuple": (tuple, lambda *parts: parts),
    "set": (tuple, lambda *parts: set(parts)),
    "complex": (lambda z: (z.real, z.imag), lambda re, im: complex(float(re), float(im))),
    "Sbp": (lambda s: (s.kind, s.dim, s.op), lambda kind, dim, op: _read_sbp(kind, dim, op)),
    "placement": (lambda p: (p.type, p.ranks, p.axis_names), placement),
    "Layout": (lambda own: (own.placement, own.sbp), lambda where, sbp: _layout_of_parts(where, sbp)),
    "dtype": (lambda d: (str(d).removeprefix("torch."),), lambda name: _read_dtype(name)),
    "tensor": (lambda t: _tensor_parts(t), lambda *parts: _read_tensor(*parts)),
}


def message(cls: N) -> N:
    """A class decorator: tuples with these field names may be sent."""
    assert cls.__name__ not in _classes, cls
    _classes[cls.__name__] = (tuple, cls)
    return cls


def encode_message(value: object, sender: object = "") -> bytes:
    """The message of a value. TypeError for a value of a type that is not in the table above."""
    text = json.dumps(_node(value), separators=(",", ":")).encode()
    return _sign(text, sender) + text


def decode_message(data: bytes, sender: object = "") -> Any:
    """The value of a message of that sender.

    Raises TransportError for bytes that do not come from a process with the same key, or are no such message.
    """
    signature, text = data[:_SIGNATURE], data[_SIGNATURE:]
    if not hmac.compare_digest(signature, _sign(text, sender)):
        if _secret() and not hmac.compare_digest(signature, _sign(text, sender, "")):
            raise TransportError("a message with a wrong signature", "a process without the secret of this job writes "
                                 f"to its ports, or {SECRET} is not the same everywhere",
                                 f"the same {SECRET} on all hosts; docs/security.md")
        raise TransportError("a message with a wrong signature", "some ranks have a secret to sign with, others have "
                             "none: a rank takes that of its host where LOCAL_WORLD_SIZE is WORLD_SIZE",
                             "the same WORLD_SIZE and LOCAL_WORLD_SIZE for all ranks; for several hosts the same "
                             f"{SECRET} on all; docs/security.md")
    try:
        return _read_node(json.loads(text))
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError, OverflowError) as error:
        raise TransportError("a message that cannot be read", f"{type(error).__name__}: {error}",
                             "the same version of globaltensor on all hosts") from None


def _secret() -> str:
    return os.environ.get(SECRET, "")


def _sign(text: bytes, sender: object, secret: str | None = None) -> bytes:
    """Under a key that is this job's own even where jobs have one secret: a message of one is none of another."""
    job = f"{os.environ.get('MASTER_PORT', '')} {os.environ.get('TORCHELASTIC_RUN_ID', '')} {sender}\n"
    return hmac.digest((_secret() if secret is None else secret).encode(), job.encode() + text, "sha256")


def _node(value: object) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, dict):
        return ["dict", *([_node(k), _node(v)] for k, v in value.items())]
    tag = "tensor" if kind is torch.Tensor else "tuple" if kind is torch.Size else kind.__name__
    if tag not in _classes:
        raise TypeError(f"a {kind.__name__} is not among what processes tell each other")
    return [tag, *map(_node, _classes[tag][0](value))]


def _read_node(node: Any) -> Any:
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise ValueError("an object of JSON")
        return node
    tag, *parts = node
    if tag == "dict":
        return {_read_node(k): _read_node(v) for k, v in parts}
    return _classes[tag][1](*map(_read_node, parts))


def _read_sbp(kind: str, dim: int, op: str) -> Sbp:
    if kind not in ("S", "B", "P") or type(dim) is not int or type(op) is not str:
        raise ValueError(f"no sbp: {kind!r}, {dim!r}, {op!r}")
    return Sbp(kind, dim, op)


def _layout_of_parts(where: Any, sbp: Any) -> Layout:
    if not (isinstance(where, placement) and isinstance(sbp, tuple) and len(sbp) == where.ndim
            and all(isinstance(s, Sbp) for s in sbp)):
        raise ValueError(f"no layout: {where!r}, {sbp!r}")
    return layout(where, sbp)


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {name!r}")
    return dtype


def _tensor_parts(t: torch.Tensor) -> tuple[Any, ...]:
    raw = flat_bytes(t.cpu().contiguous()).numpy()
    return t.dtype, tuple(t.shape), base64.b64encode(raw.tobytes()).decode()


def _read_tensor(dtype: torch.dtype, shape: tuple[int, ...], text: str) -> torch.Tensor:
    raw = bytearray(base64.b64decode(text, validate=True))
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")).reshape(shape)
