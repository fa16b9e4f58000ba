"""Many small distributed stories in one job: RANK WORLD INIT_FILE STORY... -> one line of JSON."""

import json
import os
import sys
import traceback
from datetime import timedelta

import stories_fsdp  # noqa: F401  each puts its stories into STORIES
import stories_meshes  # noqa: F401
import stories_pipeline  # noqa: F401
import stories_uneven  # noqa: F401
import stories_whole  # noqa: F401
import torch.distributed as dist
from rank_stories import STORIES, rank, world


def main():
    init, limit = sys.argv[3], timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{init}", rank=rank, world_size=world, timeout=limit
    )
    said = {}
    for name in sys.argv[4:]:
        try:
            said[name] = STORIES[name]()
        except Exception:
            said[name] = {"failed": traceback.format_exc()}
        dist.barrier()
    print(json.dumps(said), flush=True)
    dist.barrier()  # nobody leaves while another still talks
    # torch's own threads may abort the interpreter's teardown, now and then; everything was said.
    os._exit(0)


main()
