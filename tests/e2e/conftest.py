"""What several end-to-end tests share."""

from __future__ import annotations

import pytest

from tests.support.tflite_builds import Builds


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """TFLite builds of the small model by scheme."""
    return Builds(tmp_path_factory.mktemp("tflite"))
