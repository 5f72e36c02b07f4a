"""What several threads of one process may do at once, as with plain tensors: `threads.py CASE`."""
import sys
import threading

import torch
from torch import nn

import globaltensor as gt

P = gt.placement("cpu", [0, 1])
B, S = gt.sbp.broadcast, gt.sbp.split
SEED = 20_261_128


def at_once(*jobs):
    """Run jobs on threads of their own; what one of them raises is raised here."""
    wrong = []

    def guarded(job):
        try:
            job()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "a thread hangs"
    if wrong:
        raise wrong[0]


def readers_of_one_view(make, times=400):
    """Two threads read one boxed view after each write, and nobody writes meanwhile."""
    x = gt.from_full(torch.zeros(16, 16), P, S(0))
    v, meet = make(x), threading.Barrier(3, timeout=30)
    assert v.origin is not None

    def read():
        for i in range(times):
            meet.wait()
            assert v.sum().item() == i * v.numel()
            meet.wait()

    def write():
        for i in range(times):
            x.fill_(float(i))
            meet.wait()
            meet.wait()

    at_once(read, read, write)


def a_write_elsewhere(times=500):
    """Two threads read a view, one writes to other rows of its base."""
    x = gt.from_full(torch.ones(16, 16), P, S(0))
    v, other = x[2], x[9]

    def read():
        for _ in range(times):
            assert (v * 1).sum().item() == 16

    def write():
        for _ in range(times):
            other.add_(1)

    at_once(read, read, write)


def views_of_one_view(times=600):
    x = gt.from_full(torch.arange(256.).reshape(16, 16), P, S(0))

    def read():
        for _ in range(times):
            y = x[2]
            assert y[3].item() == 35 and y.detach()[4].item() == 36

    at_once(read, read)


def gradients_of_each(rows, width, passes, times):
    """Each trains a weight of its own: a read of its gradients leaves alone those that the other one is adding to."""
    def train():
        w = gt.from_full(torch.ones(rows, width), P, B).requires_grad_()
        x = gt.from_full(torch.ones(4, rows), P, S(0))
        for _ in range(times):
            for _ in range(passes):
                (x @ w).sum().backward()
            assert w.grad.sum().item() == passes * 4 * rows * width
            w.grad = None

    at_once(train, train)


def read_by_another():
    """What a thread has left waiting is settled for whoever reads it."""
    w, u = (gt.from_full(torch.ones(6, 8), P, B).requires_grad_() for _ in range(2))
    x = gt.from_full(torch.ones(4, 6), P, S(0))
    at_once(lambda: (x @ w + x @ u).sum().backward())
    with gt.record() as moves:
        assert w.grad.sbp == (B,) and u.grad.sbp == (B,)
    assert len([move for move in moves if move.bytes]) == 1, moves


def models(steps=12):
    """A model and its optimizer on each of three threads; alone, each gives the same losses."""
    def train(seed, plain, losses):
        generator = torch.Generator().manual_seed(seed)
        xs = [torch.randn(3 + i % 5, 6, generator=generator, dtype=torch.float64) for i in range(steps)]
        m = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).double()
        with torch.no_grad():
            for p in m.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        m = m if plain else gt.to_global(m, P, B)
        o = torch.optim.AdamW(m.parameters(), lr=0.01)
        for x in xs:
            y = m(x if plain else gt.from_full(x, P, S(0)))
            loss = (y.softmax(1) ** 2).mean() + y[1].sum() * 0.01
            o.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
            losses.append(float(loss.detach()))

    wanted, seen = ([[] for _ in range(3)] for _ in range(2))
    for k, losses in enumerate(wanted):
        train(SEED + k, True, losses)
    at_once(*(lambda k=k: train(SEED + k, False, seen[k]) for k in range(3)))
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-9, atol=1e-9)


def specs_at_new_sizes(times=400):
    """Views at sizes that were never seen: native code makes their specs where nobody has the interpreter's lock."""
    def read(k):
        for n in range(2, times, 3):
            x = gt.from_full(torch.ones(n + k, 4), P, S(0))
            assert x.t()[1].sum().item() == n + k

    at_once(*(lambda k=k: read(k) for k in range(3)))


CASES = {
    "a view": lambda: readers_of_one_view(lambda x: x[2]),
    "a view of a view": lambda: readers_of_one_view(lambda x: x[3:12][4]),
    "results of one call": lambda: readers_of_one_view(lambda x: x.unbind()[3]),
    "a write elsewhere": a_write_elsewhere,
    "views of one view": views_of_one_view,
    "one backward each": lambda: gradients_of_each(6, 8, passes=1, times=400),
    "micro-batches": lambda: gradients_of_each(64, 64, passes=3, times=120),
    "read by another": read_by_another,
    "models": models,
    "specs at new sizes": specs_at_new_sizes,
}

if __name__ == "__main__":
    print(f"threads.py: seed {SEED}")
    CASES[sys.argv[1]]()
    print("ok")
