"""Processes in one torch.distributed group that run what a test tells them, one thing after another."""
from __future__ import annotations

import importlib
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import free_port


class Ranks:
    """`size` processes with the backend "globaltensor", until `end`."""

    def __init__(self, size: int, timeout: float = 60) -> None:
        context, port = mp.get_context("spawn"), free_port()
        self.pipes, ends = zip(*(context.Pipe() for _ in range(size)))
        self.processes = [context.Process(target=_serve, args=(r, size, port, end, timeout), daemon=True)
                          for r, end in enumerate(ends)]
        for process, end in zip(self.processes, ends):
            process.start()
            end.close()

    def start(self, function, *args) -> None:
        """Let all run a function of a module."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, args))

    def answers(self, timeout: float = 120) -> list[str]:
        """By rank: "" where it ran to the end, "dead", or the text of what it raised."""
        return [self._answer(pipe, timeout) for pipe in self.pipes]

    def _answer(self, pipe, timeout):
        try:
            assert pipe.poll(timeout), "a rank hangs"
            return pipe.recv()
        except (EOFError, ConnectionError):
            return "dead"

    def run(self, function, *args) -> None:
        """All must run it to the end."""
        self.start(function, *args)
        wrong = [f"rank {r}: {text}" for r, text in enumerate(self.answers()) if text]
        if wrong:
            self.end()
        assert not wrong, "\n".join(wrong)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank, size, port, pipe, timeout):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    importlib.import_module("globaltensor.runtime.process_group")
    dist.init_process_group("globaltensor", timeout=timedelta(seconds=timeout))
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            getattr(importlib.import_module(module), name)(*args)
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc())
