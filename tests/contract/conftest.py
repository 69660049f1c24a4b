"""The conformance suite lives in the package; its assertions explain themselves all the same."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("capsule.testing")
