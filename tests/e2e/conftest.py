"""What several end-to-end tests share."""

from __future__ import annotations

import pytest

from tests.support import coreml_builds
from tests.support.demo_builds import DemoBuilds
from tests.support.tflite_builds import Builds


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """TFLite builds of the small model by scheme."""
    return Builds(tmp_path_factory.mktemp("tflite"))


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> coreml_builds.Builds:
    """Core ML builds of the small model by what they were asked for."""
    return coreml_builds.Builds(tmp_path_factory.mktemp("coreml"))


@pytest.fixture(scope="session")
def demos(tmp_path_factory: pytest.TempPathFactory) -> DemoBuilds:
    """Builds of the model that comes along by target."""
    return DemoBuilds(tmp_path_factory.mktemp("demo"))
