"""The four packages as users get them: what their wheels hold, what they need, what they export."""

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORTS = {
    "nnsight-core": "nnsight_core",
    "nnsight-vllm-worker": "nnsight_vllm_worker",
    "nnsight-serve": "nnsight_serve",
    "nnsight-client": "nnsight_client",
}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """One wheel per import name, built from this tree without asking any index."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder]
    sources = [ROOT / "packages" / name for name in IMPORTS]
    run(sys.executable, "-m", "pip", "wheel", *options, *sources)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def client_python(tmp_path_factory) -> Path:
    """The Python of an environment that holds what client and core need, and no vLLM."""
    python = ROOT / ".venv-client/bin/python"
    if not python.exists():
        folder = tmp_path_factory.mktemp("client")
        run(sys.executable, "-m", "venv", folder)
        python = folder / "bin/python"
        pins = ROOT / "requirements/client.txt"
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", pins)
    return python


def install(python: Path, target: Path, *wheels: Path) -> str:
    """Installs into a folder of its own; what it returns puts that folder first on the path."""
    options = ["--quiet", "--no-deps", "--no-index", "--target", target]
    run(python, "-m", "pip", "install", *options, *wheels)
    return f"import sys; sys.path.insert(0, {str(target)!r})\n"


REFUSED = """
for name in {names}:
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(name + " can be imported here")
"""


@pytest.mark.parametrize("name", IMPORTS.values())
def test_a_wheel_holds_its_own_package_and_is_typed(wheels, name):
    with zipfile.ZipFile(wheels[name]) as archive:
        files = archive.namelist()
    assert f"{name}/__init__.py" in files
    assert f"{name}/py.typed" in files
    assert {file.split("/")[0] for file in files} == {name, f"{name}-0.1.0.dist-info"}
    assert any(file.endswith("licenses/LICENSE") for file in files)


def test_the_servers_wheel_holds_its_page(wheels):
    here = ROOT / "packages/nnsight-serve/src"
    page = {file.relative_to(here).as_posix() for file in (here / "nnsight_serve/page").iterdir()}
    with zipfile.ZipFile(wheels["nnsight_serve"]) as archive:
        assert len(page) >= 5 and page <= set(archive.namelist())


@pytest.mark.slow
def test_client_and_core_install_without_vllm(wheels, client_python, tmp_path):
    path = install(
        client_python, tmp_path / "site", wheels["nnsight_core"], wheels["nnsight_client"]
    )
    names = ["vllm", "nnsight_vllm_worker", "nnsight_serve", "fastapi"]
    check = f"{path}import nnsight_client, nnsight_core\n{REFUSED.format(names=names)}"
    check += "print(nnsight_client.__file__)"
    assert str(tmp_path) in run(client_python, "-I", "-c", check, cwd=tmp_path)


@pytest.mark.slow
def test_core_stands_alone(wheels, client_python, tmp_path):
    path = install(client_python, tmp_path / "site", wheels["nnsight_core"])
    # The environment may hold the client and what it needs; here they are as if they were absent.
    absent = "sys.modules.update(dict.fromkeys(['nnsight_client', 'httpx']))\n"
    check = f"{path}{absent}import nnsight_core; print(nnsight_core.__file__)"
    assert str(tmp_path) in run(client_python, "-I", "-c", check, cwd=tmp_path)


def test_imports_point_one_way():
    run(Path(sys.executable).with_name("lint-imports"), "--no-cache")


@pytest.mark.parametrize("name", IMPORTS.values())
def test_exports_are_sorted_and_exist(name):
    package = importlib.import_module(name)
    assert list(package.__all__) == sorted(set(package.__all__))
    assert [n for n in package.__all__ if not hasattr(package, n)] == []
