"""A campaign whose engine is real and metered, and whose scorer and trainer do next to nothing.

python -m benchmarks.engine_share.campaign, with the arguments of `millrace`.
"""

import sys

import flows.cli.main
from benchmarks.sleeping.campaign import sleepers

if __name__ == "__main__":
    with sleepers(generate="benchmarks.engine_share.generate"):
        sys.exit(flows.cli.main.main())
