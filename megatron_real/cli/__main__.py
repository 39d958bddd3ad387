"""``python -m megatron_real.cli`` is ``megatron-real``."""

import sys

from megatron_real.cli.main import main

sys.exit(main())
