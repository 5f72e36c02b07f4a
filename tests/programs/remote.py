"""Every rank saves into a URL twice, loads under another layout, and writes what it sees to FOLDER/<rank>.json."""
import json
import sys
from pathlib import Path

import globaltensor as gt

url, folder = sys.argv[1], Path(sys.argv[2])
where = gt.placement.all("cpu")
x = gt.arange(12.0, placement=where, sbp=gt.sbp.split(0)).view(6, 2)
into = gt.zeros(6, 2, placement=where, sbp=gt.sbp.split(1))
seen = {}
try:
    for number in (1, 2):
        seen["path"] = str(gt.save({"x": x * number, "number": number}, url, keep=1, asynchronous=True).wait())
    seen["number"] = gt.resume({"x": into, "number": 0}, url)["number"]
    seen["x"] = into.full_tensor().tolist()
except gt.CheckpointError as error:
    seen["error"] = str(error)
(folder / f"{gt.rank()}.json").write_text(json.dumps(seen))
