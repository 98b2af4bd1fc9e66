"""What the server says of itself in `/openapi.json` is true, whatever it is sent."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from nnsight_core.wire.frames import MEDIA_TYPE
from nnsight_serve import Settings, create_app
from tests.fixtures.server import KEY, Server

PATHS = create_app(Settings("m")).openapi()["paths"]
OPERATIONS = [(path, method) for path, methods in PATHS.items() for method in methods]
# That bytes are bytes says nothing of whether they are a frame.
NOT_TRUE_OF_BYTES = [positive_data_acceptance]
schemathesis.serializer.alias(MEDIA_TYPE, "application/octet-stream")


@pytest.fixture(scope="module")
def described(keyed_server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{keyed_server.url}/openapi.json")


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_one_that_is_described(described: Any, path: str, method: str) -> None:
    @settings(
        max_examples=25, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    @given(case=described[path][method.upper()].as_strategy())
    def answers(case: Any) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        case.call_and_validate(headers=headers, excluded_checks=NOT_TRUE_OF_BYTES)

    answers()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_route_says_what_it_needs_and_how_it_refuses(path: str, method: str) -> None:
    route = PATHS[path][method]
    keyed = path.startswith("/v1/")
    assert bool(route.get("security")) is keyed
    assert not keyed or {"401", "503"} <= route["responses"].keys()
    assert route["description"].strip() and route["responses"]["200"]["content"]
