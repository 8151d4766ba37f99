"""`python -m gem_train`, and so `torchrun --nproc_per_node 2 -m gem_train run ...`."""

import sys

from gem_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
