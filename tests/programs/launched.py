"""Says who this rank is, after a sum over all ranks; takes the folder to write to."""
import json
import os
import sys

import globaltensor as gt

x = gt.ones(8, placement=gt.placement.all("cpu"), sbp=gt.sbp.split(0))
told = {"rank": gt.rank(), "size": gt.world_size(), "transport": gt.init().transport, "sum": float(x.sum()),
        "local size": int(os.environ["LOCAL_WORLD_SIZE"])}
with open(f"{sys.argv[1]}/{gt.rank()}.json", "w") as file:
    json.dump(told, file)
