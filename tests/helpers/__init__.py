"""What tests share: one module a framework, so that none imports another's."""

import os
from pathlib import Path

TESTS = str(Path(__file__).parents[1])

# For a job that a test starts, so that it finds this package as the tests do.
PYTHONPATH = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
