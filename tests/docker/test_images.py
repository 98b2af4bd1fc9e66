"""The image of the server, run by a Docker engine as users run it; skipped where none runs.

Of the environment: `NNSIGHT_IMAGE` names the image. With `NNSIGHT_IMAGE=build` the CPU image is
built first, from the base image `NNSIGHT_BASE` and with the options for pip `NNSIGHT_PIP_ARGS`, if
given; that takes minutes and some gigabytes. Containers share the host's network.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import docker
import httpx
import pytest
from docker.errors import DockerException
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer, ExecConfig
from testcontainers.core.image import DockerImage

from nnsight_client import VLLM
from tests.fixtures.server import ENVIRONMENT

ROOT = Path(__file__).parents[2]
PROMPT = "The Eiffel Tower is in the city of"
KEY = "a key of the tests"
PATIENCE = 600
# The engine is vLLM's own default, so compiled: the image must hold what compiling takes.
FLAGS = ("--dtype", "float32", "--max-model-len", "256")
COMPILED = {k: v for k, v in ENVIRONMENT.items() if k != "TORCH_COMPILE_DISABLE"}

INSTALLED = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"

# Nothing here outlives its context, so nobody needs to come and clean up.
testcontainers_config.ryuk_disabled = True


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    """The Docker engine of this machine."""
    try:
        client = docker.from_env(timeout=10)
        client.ping()
    except DockerException as error:
        pytest.skip(f"no Docker engine answers: {error}")
    with closing(client):
        yield client


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient) -> Iterator[str]:
    """The name of the image."""
    name = os.environ.get("NNSIGHT_IMAGE")
    if name is None:
        pytest.skip("NNSIGHT_IMAGE names no image; NNSIGHT_IMAGE=build builds the CPU image first")
    if name != "build":
        yield name
        return
    given = {"BASE": "NNSIGHT_BASE", "PIP_ARGS": "NNSIGHT_PIP_ARGS"}
    arguments = {arg: os.environ[name] for arg, name in given.items() if name in os.environ}
    building = DockerImage(
        path=ROOT,
        dockerfile_path="docker/serve-cpu.Dockerfile",
        tag="nnsight-serve-cpu:tested",
        buildargs=arguments,
        network_mode="host",
        rm=True,
    )
    with building as built:
        yield str(built)


@pytest.fixture(scope="module")
def model_folder(gpt2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the GPT-2 that everyone may read."""
    folder = Path(shutil.copytree(gpt2_path, tmp_path_factory.mktemp("models") / "gpt2"))
    for path in (folder, *folder.iterdir()):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    return folder


@contextmanager
def running(image: str, model: Path, *flags: str, **options: str) -> Iterator[DockerContainer]:
    """A container that serves the model under `/model`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    container = DockerContainer(image, network_mode="host", shm_size="1g", **options)
    container.with_volume_mapping(model, "/model", "ro").with_command(["/model", *FLAGS, *flags])
    environment = {**COMPILED, "NNSIGHT_API_KEY": KEY, "NNSIGHT_PORT": port}
    with container.with_envs(**environment):
        yield container


def healthy(container: DockerContainer) -> None:
    """Wait until the engine's own health check calls the container healthy."""
    wrapped = container.get_wrapped_container()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        wrapped.reload()
        if wrapped.attrs["State"]["Health"]["Status"] == "healthy":
            return
        if wrapped.status == "exited":
            break
        time.sleep(0.5)
    raise AssertionError(f"The server did not become healthy:\n{wrapped.logs().decode()}")


def url(container: DockerContainer) -> str:
    return f"http://127.0.0.1:{container.env['NNSIGHT_PORT']}"


def said(container: DockerContainer, *command: str, user: str = "", **environment: str) -> str:
    """What a command says that succeeds in the container."""
    config = ExecConfig([*command], user=user, environment=environment)
    result = container.exec(config)
    assert result.exit_code == 0, result.output.decode()
    return result.output.decode()


@pytest.fixture(scope="module")
def container(image: str, model_folder: Path) -> Iterator[DockerContainer]:
    """A server in a container, as the image has it."""
    with running(image, model_folder) as started:
        healthy(started)
        yield started


def test_a_trace_is_answered(container, gpt2_path, hf_gpt2, near):
    model = VLLM(gpt2_path, serve=url(container), api_key=KEY)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        hidden = model.transformer.h[6].output.save()
        model.transformer.h[8].mlp.output[:] = 0
        logits = model.logits.save()
        text = tracer.result.outputs[0].text.save()
    with hf_gpt2.trace(PROMPT):
        there = hf_gpt2.transformer.h[6].output.save()
        hf_gpt2.transformer.h[8].mlp.output[:] = 0
        expected = hf_gpt2.logits.save()
    there, expected = (value[0] if value.dim() == 3 else value for value in (there, expected))
    near(hidden, there)
    near(logits[-1], expected[-1])
    assert text == model.tokenizer.decode(expected[-1:].argmax(-1))


def test_the_key_of_the_environment_is_wanted(container):
    assert httpx.get(f"{url(container)}/v1/model").status_code == 401
    assert httpx.get(f"{url(container)}/health").status_code == 200


def test_no_process_belongs_to_root(container):
    found = container.get_wrapped_container().top(ps_args="-eo uid,pid,args")
    assert found["Titles"][0] == "UID" and len(found["Processes"]) > 1
    assert {process[0] for process in found["Processes"]} == {"10001"}


def test_signals_reach_the_server_itself(container):
    first = said(container, "cat", "/proc/1/cmdline").split("\0")
    assert first[1].endswith("/nnsight-serve") and first[2] == "/model"


def test_the_health_check_tells_a_server_that_is_not_there(container):
    check = container.get_wrapped_container().attrs["Config"]["Healthcheck"]["Test"]
    assert check[0] == "CMD"
    assert said(container, *check[1:]) == ""
    result = container.exec(ExecConfig(check[1:], environment={"NNSIGHT_PORT": "1"}))
    assert result.exit_code == 1 and b"does not answer" in result.output


def test_nothing_of_the_build_is_left(container, engine, image):
    look = (
        "find /root /home/nnsight /build /tmp /var/lib/apt/lists /var/cache/apt -type f "
        "( -path */pip/* -o -path */lists/* -o -name *.deb -o -name *.whl )"
    )
    found = container.exec(ExecConfig(look.split(), user="0")).output.decode().splitlines()
    assert [line for line in found if "No such file" not in line] == []
    names = set(said(container, "python3", "-c", INSTALLED).split())
    assert "nnsight-serve" in names and names.isdisjoint({"hatchling", "pytest", "nnsight-client"})
    steps = " ".join(step["CreatedBy"] for step in engine.images.get(image).history())
    assert "nnsight-serve" in steps and not re.search(r"PIP_ARGS|--find-links|--index-url", steps)


def test_what_the_image_says_of_itself(engine, image):
    config = engine.images.get(image).attrs["Config"]
    assert (config["User"], config["StopSignal"]) == ("10001:0", "SIGTERM")
    assert config["Entrypoint"] == ["nnsight-serve"]
    assert config["ExposedPorts"] == {"6677/tcp": {}} and config["Volumes"] == {"/cache": {}}
    assert "HF_HOME=/cache/huggingface" in config["Env"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_it_ends_with_zero_when_it_is_told_to_as_any_user_of_group_0(image, model_folder):
    with running(image, model_folder, "--enforce-eager", user="12345:0") as other:
        healthy(other)
        said(other, "sh", "-c", "touch /cache/mine ~/mine")
        assert (
            said(other, "python3", "-c", "import getpass; print(getpass.getuser())") == "nnsight\n"
        )
        wrapped = other.get_wrapped_container()
        wrapped.stop(timeout=60)
        assert wrapped.wait()["StatusCode"] == 0, wrapped.logs().decode()
