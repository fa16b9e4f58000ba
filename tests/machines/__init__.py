"""Whatever a user may do, in any order: every adapter beside a reference, after each action."""

import pytest

pytest.register_assert_rewrite("machines.machine")
