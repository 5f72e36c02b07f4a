"""Try out layouts and boxings in a browser: set placement and sbps by mouse, type an expression, see what moves.

    globaltensor play                       prints the address of the page; Ctrl-C ends it
    globaltensor play --export FOLDER       the examples as pages that need no server

The server listens at 127.0.0.1 and answers nobody else. What is typed is not run as Python: an expression is made of
x, y, numbers, operators, indices and torch's functions.
"""
from __future__ import annotations

import argparse
import json

from globaltensor.cli.problem import Problem, unwritable
from globaltensor.playground.server import HOST, export_examples, make_server
from globaltensor.playground.tryout import MOST_RANKS
from globaltensor.runtime.start import init
from globaltensor.runtime.world import started


def command(chosen: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or write pages."""
    if started() is None:
        init(ranks=MOST_RANKS)
    if chosen.export is not None:
        try:
            written = export_examples(chosen.export)
        except OSError as error:
            raise unwritable(chosen.export, error) from None
        print(json.dumps({"pages": list(map(str, written))}, indent=2) if chosen.json else
              "\n".join(map(str, written)))
        return 0
    try:
        server = make_server(chosen.port)
    except OSError as error:
        raise Problem(f"port {chosen.port}: {error.strerror}\n  try: globaltensor play, which takes a free one",
                      1) from None
    with server:
        address = f"http://{HOST}:{server.server_address[1]}/"
        print(json.dumps({"address": address}) if chosen.json else f"{address}   Ctrl-C ends it", flush=True)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            print()
    return 0
