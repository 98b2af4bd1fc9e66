"""What the server says of itself in `/openapi.json` is true, whatever it is sent."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from nnsight_core.wire.frames import MEDIA_TYPE
from nnsight_serve import Settings, create_app
from tests.fixtures.server import KEY, Server

schemathesis.serializer.alias(MEDIA_TYPE, "application/octet-stream")
schema: Any = schemathesis.pytest.from_fixture("described")
# That bytes are bytes says nothing of whether they are a frame.
_NOT_TRUE_OF_BYTES = [positive_data_acceptance]


@pytest.fixture(scope="module")
def described(keyed_server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{keyed_server.url}/openapi.json")


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_one_that_is_described(case: Any) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    case.call_and_validate(headers=headers, excluded_checks=_NOT_TRUE_OF_BYTES)


def test_every_route_says_what_it_needs_and_how_it_refuses() -> None:
    paths = create_app(Settings("m")).openapi()["paths"]
    assert {"/health", "/ready", "/metrics", "/v1/model", "/v1/trace"} <= paths.keys()
    for path, methods in paths.items():
        for route in methods.values():
            keyed = path.startswith("/v1/")
            assert bool(route.get("security")) is keyed, path
            assert not keyed or {"401", "503"} <= route["responses"].keys(), path
            assert route["description"].strip() and route["responses"]["200"]["content"], path
