"""Rules of linear algebra, Fourier transforms and searches: batches are split, matrices and spectra are whole."""
from __future__ import annotations

from collections.abc import Callable

from globaltensor.rules.call import Call
from globaltensor.rules.families import Family, dim_labels, fixed
from globaltensor.rules.language import Rule
from globaltensor.rules.parse import rule


def solved(call: Call) -> Rule:
    """A x = b, or x A = b, of a batch of either; the matrix is given back with its factors."""
    a, b = call.shapes
    vectors = len(b) == 1 or b == a[:-1]             # as torch tells them from matrices
    batch = " ".join(dim_labels(len(a) - 2))
    if not vectors and a[:-2] != b[:-2]:             # they broadcast
        return fixed("a*! m! n!, b*! p! q! -> c*! r! s!, a*! m! n!, a*! t!, a*!", "A*b;A;A;A")(call)
    x = "n!" if vectors else "n! k" if call["left"] else "k n!"
    return rule(f"{batch} m! n!, {batch} {x} -> {batch} {x}, {batch} m! n!, {batch} p!, {batch}", "A*b;A;A;A")


def solved_triangular(call: Call) -> Rule:
    """A x = b, or x A = b, of a batch of both, or of the latter alone, with a triangular A."""
    a, b = call.shapes
    if a[:-2] not in ((), b[:-2]):                   # they broadcast
        return fixed("a*! m! n!, b*! p! q! -> c*! r! s!", "A*b")(call)
    batch, x = dim_labels(len(b) - 2), "n! k" if call["left"] else "k n!"
    of_b = " ".join([*batch, x])
    return rule(f"{' '.join(batch[:len(a) - 2])} m! n!, {of_b} -> {of_b}", "A*b")


def by_cholesky(call: Call) -> Rule:
    """A x = b, of a batch of both, by the Cholesky factor of A."""
    b, a = call.shapes
    if a[:-2] != b[:-2]:                             # they broadcast
        return fixed("b*! p! q!, a*! m! n! -> c*! r! s!", "a*B")(call)
    return fixed("b* n! k, b* m! n! -> b* n! k", "a*B")(call)


def by_factors(call: Call) -> Rule:
    """A x = b, or x A = b, by the factors of A and their pivots."""
    x = "n! k" if call["left"] else "k n!"
    return fixed(f"b* m! n!, b* m!, b* {x} -> b* {x}", "A*B*c")(call)


def unpacked(call: Call) -> Rule:
    """The permutation and both factors of a batch; what is not asked for has no elements."""
    of_pivots = "b* m! q!" if call["unpack_pivots"] else "p!"
    of_data = "b* m! k!, b* k! n!" if call["unpack_data"] else "l!, u!"
    algebra = f"{'B' if call['unpack_pivots'] else ''};" + ("A;A" if call["unpack_data"] else ";")
    return fixed(f"b* m! n!, b* k! -> {of_pivots}, {of_data}", algebra)(call)


def reflected(call: Call) -> Rule:
    """A matrix times the product of reflections, from the left or the right."""
    x = "m! k" if call["left"] else "k m!"
    return fixed(f"b* p! q!, b* t!, b* {x} -> b* {x}", "A*B*c")(call)


def renormed(call: Call) -> Rule:
    """The norm of each slice along a dim is bounded."""
    n = call.tensors[0].dim()
    slices = " ".join(f"d{i}" if i == call["dim"] % n else f"d{i}!" for i in range(n))
    return rule(f"{slices} -> {slices}")


def trilinear(call: Call) -> Rule:
    """A product of three operands, each of which is repeated along some dims, summed over others."""
    n = len(call["expand1"]) + call.tensors[0].dim()
    sides = [" ".join(f"d{i}" for i in range(n) if i not in call[name]) for name in
             ("expand1", "expand2", "expand3", "sumdim")]
    return rule(f"{', '.join(sides[:3])} -> {sides[3]}", "a*b*c")


def factors(full: str, values: str, has_all: Callable[[Call], bool]) -> Family:
    """The factors of a batch of matrices: all of them (`full`), or the others without elements (`values`)."""
    return lambda call: fixed(f"b* m! n! -> {full if has_all(call) else values}")(call)


def transformed(call: Call) -> Rule:
    """Fourier transforms along dims that stay whole, one of which may get another size."""
    n = call.tensors[0].dim()
    whole = {d % n for d in call["dim"]}
    rhs = " ".join(f"e{d}!" if d in whole else f"d{d}" for d in range(n))
    batch = " ".join(f"d{d}" for d in range(n) if d not in whole)
    return rule(f"{rhs.replace('e', 'd')} -> {rhs}", "a", nonempty=batch)        # the kernels take no empty batch


def searched(call: Call) -> Rule:
    """searchsorted: one sorted row for all values, or one for each row of values. What a part of a row counts adds up.
    A sorter, which is like the row, has numbers of the whole one."""
    row, values = ("k", "d*") if len(call.shapes[0]) == 1 else ("b* k", "b* q")
    row += "" if call.get("sorter") is None else "!"
    return fixed(f"{row}, {values}, {row} -> {values}")(call)
