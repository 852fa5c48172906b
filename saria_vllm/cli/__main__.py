"""`python -m saria_vllm.cli` is `saria`."""

import sys

from saria_vllm.cli import main

sys.exit(main())
