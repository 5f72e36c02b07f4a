"""A rank of one of two hosts fails once. Its launcher starts it again and counts that; the other host's launcher starts
its own again because of that, and counts nothing. Each rank notes its counts and the value that all then had."""
import json
import os
import sys
import time
from pathlib import Path

import globaltensor as gt

folder = Path(sys.argv[1])
where = gt.placement.all("cpu")
x = gt.arange(8, placement=where, sbp=gt.sbp.split(0))
is_first = not (folder / "failed").exists()          # before the ranks meet: then one of them fails
value = x.full_tensor().sum().item()
if is_first:
    if gt.rank() == 1:
        (folder / "failed").touch()
        raise ValueError("bad luck")
    try:
        x.full_tensor()
    except gt.GlobalTensorError:
        time.sleep(60)                               # until its launcher ends it
for _ in range(20):
    value += x.sum().item()
(folder / f"{gt.rank()}.json").write_text(json.dumps(
    {"restarts": os.environ["TORCHELASTIC_RESTART_COUNT"], "value": value}))
