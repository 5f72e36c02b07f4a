"""A state as a tree: nested dicts, lists and tuples of tensors, plain values and objects with a state_dict.

`flatten` separates tensors by name, objects by path, and the rest, encoded as JSON. A name is the path of keys,
"model/blocks.0.q.weight"; "/" and "%" within a key are written %2F and %25, an empty key %. `decode` is the inverse.

JSON has fewer types than Python. Strings, ints, finite floats (Python writes enough digits to read back the same bits),
True, False, None and lists stand for themselves; every object of JSON is a tag and a tagged value:

    {"dict": {"a": 1}}   {"items": [[0, 1]]}  a dict with int keys   {"counter": [[30, 1]]}  a collections.Counter
    {"tuple": [1, 2]}    {"float": "7ff0000000000000"}  the bits of inf, -inf or nan    {"tensor": "model/weight"}
"""
from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from globaltensor.errors import GlobalTensorError
from globaltensor.runtime.memory import missing
from globaltensor.tensors.global_tensor import GlobalTensor

_FLOAT_BITS = re.compile("[0-9a-f]{16}")


class StateError(GlobalTensorError, TypeError):
    """A state with something in it that a checkpoint cannot hold."""


@dataclass
class FlatState:
    """A state, flattened."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)        # path -> an object with a state_dict
    state: Any = None                                            # the rest, encoded


def join_path(path: str, key: str | int) -> str:
    """The path of an item of the value at `path`."""
    # so that no two paths are one: "a/b" is a key here, and two keys there; the empty key gets a name, too
    text = str(key).replace("%", "%25").replace("/", "%2F") or "%"
    return f"{path}/{text}" if path else text


def is_object(value: Any) -> bool:
    """Does it have a state of its own: a module, an optimizer, a scheduler, a sampler?"""
    return not isinstance(value, torch.Tensor) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def state_of(value: Any) -> Any:
    """The state_dict of an object; of a module with the tensors themselves, so that tied ones can be recognised."""
    return value.state_dict(keep_vars=True) if isinstance(value, nn.Module) else value.state_dict()


def flatten(state: Any) -> FlatState:
    """Flatten a state. Raises StateError, naming the path, for what a checkpoint cannot hold."""
    flat = FlatState()
    flat.state = _encode(state, "", flat, None)
    return flat


def _encode(value: Any, path: str, flat: FlatState, owner: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):                     # numpy's float64 is one
        # JSON has no infinities, and a NaN keeps its bits
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, torch.Tensor):
        return {"tensor": _tensor_name(value, path, flat)}
    if kind is list:
        return [_encode(v, join_path(path, i), flat, owner) for i, v in enumerate(value)]
    if kind in (tuple, torch.Size):
        return {"tuple": [_encode(v, join_path(path, i), flat, owner) for i, v in enumerate(value)]}
    if kind is Counter:
        return {"counter": [[_checked_key(k, path), _encode(v, join_path(path, k), flat, owner)]
                            for k, v in value.items()]}
    if kind in (dict, OrderedDict) or isinstance(value, dict) and owner is not None:
        items = [(_checked_key(k, path), _encode(v, join_path(path, k), flat, owner)) for k, v in value.items()]
        return {"dict": dict(items)} if all(type(k) is str for k in value) else {"items": [list(i) for i in items]}
    if is_object(value) and owner is None:
        flat.objects[path] = value
        return _encode(state_of(value), path, flat, value)
    within = f", in the state_dict of a {type(owner).__name__}" if owner is not None else ""
    raise StateError(f"{path or 'the state'} is a {kind.__module__}.{kind.__name__}{within}",
                     "a checkpoint holds tensors, numbers, strings, None, dicts, lists, tuples, and objects with a "
                     "state_dict",
                     "torch.from_numpy(x) for an array, int(x) for a NumPy integer, list(x) for a set")


def _checked_key(key: Any, path: str) -> str | int:
    if type(key) not in (str, int):
        raise StateError(f"{path or 'the state'} is a dict with the key {key!r:.80}, a {type(key).__name__}",
                         "keys in a checkpoint are strings or ints", "{str(k): v for k, v in x.items()}")
    return key


def _tensor_name(t: torch.Tensor, path: str, flat: FlatState) -> str:
    if path in flat.tensors:
        raise StateError(f"two tensors of the state are called {path!r}",
                         "keys such as 1 and '1' of one dict make the same name", "other keys")
    if not isinstance(t, GlobalTensor) and (lack := missing(t)) is not None:
        raise StateError(f"{path or 'the state'} is {lack[0]}",
                         "a checkpoint holds global tensors, and plain ones with their elements in memory", lack[1])
    flat.tensors[path] = t
    return path


def decode(node: Any, tensor: Callable[[str], Any], path: str = "") -> Any:
    """The value that was encoded; `tensor(name)` gives its tensors. Raises ValueError for an invalid encoding."""
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, list):
        return [decode(v, tensor, join_path(path, i)) for i, v in enumerate(node)]
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"{path!r} of its state is not an encoded value: {node!r:.80}")
    [(tag, inner)] = node.items()
    # what a manifest says is checked: a tensor is called by its path, and by no other's
    if tag == "tensor" and inner == path:
        return tensor(path)
    if tag == "dict" and isinstance(inner, dict):
        return {k: decode(v, tensor, join_path(path, k)) for k, v in inner.items()}
    if tag == "tuple" and isinstance(inner, list):
        return tuple(decode(v, tensor, join_path(path, i)) for i, v in enumerate(inner))
    if tag == "float" and isinstance(inner, str) and _FLOAT_BITS.fullmatch(inner):
        return struct.unpack(">d", bytes.fromhex(inner))[0]
    if tag in ("items", "counter") and isinstance(inner, list) and all(
            isinstance(i, list) and len(i) == 2 and type(i[0]) in (str, int) for i in inner):
        items = {k: decode(v, tensor, join_path(path, k)) for k, v in inner}
        return Counter(items) if tag == "counter" else items
    raise ValueError(f"{path!r} of its state is not an encoded value: {node!r:.80}")


def at_path(value: Any, path: str) -> Any:
    """The subtree at a path, or KeyError."""
    for part in path.split("/") if path else ():
        items = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}
        value = {join_path("", k): v for k, v in items.items()}[part]
    return value
