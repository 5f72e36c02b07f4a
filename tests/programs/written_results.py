"""Writes whose result is moved, and bincount, in real processes; also on a placement that leaves a process out."""
import torch

import globaltensor as gt

S, B = gt.sbp.split, gt.sbp.broadcast
draw = torch.Generator().manual_seed(1)
t, x = torch.randn(7, 5, generator=draw), torch.randn(900, 5, generator=draw)
i = torch.randint(0, 6, (900,), generator=draw)
PROGRAMS = [lambda t, i, x: t.index_add_(0, i, x), lambda t, i, x: t.index_put_((i,), x, accumulate=True),
            lambda t, i, x: t.scatter_reduce_(0, i[:, None].expand(-1, 5), x, "amax"),
            lambda t, i, x: t.scatter_add_(0, i[:, None].expand(-1, 5), x)]

for ranks in ([2, 0, 1], [2, 0]):
    where = gt.placement("cpu", ranks)
    for number, program in enumerate(PROGRAMS):
        want = program(t.clone(), i, x)
        for _ in range(3):                           # by Python, then by what was cached
            for of_t in (B, S(0), S(1)):
                got = program(gt.from_full(t, where, of_t), gt.from_full(i, where, S(0)), gt.from_full(x, where, S(0)))
                torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-4, msg=lambda m: f"{number} {m}")
            plain = t.clone()
            program(plain, gt.from_full(i, where, S(0)), gt.from_full(x, where, S(0)))
            torch.testing.assert_close(plain, want, rtol=1e-4, atol=1e-4)
    for w in (None, x[:, 0]):
        got = torch.bincount(gt.from_full(i, where, S(0)), w if w is None else gt.from_full(w, where, S(0)), 9)
        torch.testing.assert_close(got.full_tensor(), torch.bincount(i, w, 9), rtol=1e-4, atol=1e-4)
print("done")
