"""What every adapter must do, whatever its framework."""

import pytest

pytest.register_assert_rewrite("conformance.suite", "conformance.records")
