"""The set-up script: which torch it takes, and that it can be interrupted and repeated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    import setup_env
    import torch_extensions
    return setup_env, torch_extensions


@pytest.fixture
def setup_env(modules):
    return modules[0]


@pytest.fixture
def asked(setup_env, monkeypatch):
    """What pip is asked to install, in place of installing it."""
    calls = []
    monkeypatch.setattr(setup_env, "_pip", lambda python, *arguments: calls.append([*map(str, arguments)]) or True)
    monkeypatch.setattr(setup_env, "_SMOKE", "pass")
    return calls


@pytest.fixture
def venv(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv"


def put_torch(venv, version):
    (purelib,) = venv.glob("lib/python*/site-packages")
    info = purelib / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


@pytest.mark.parametrize("version, expected", [
    ("2.11.0", True), ("2.13.0+cpu", True), ("2.13.1+cu130", True), ("2.12.0a0+gitabc", True),
    ("2.10.1", False), ("2.14.0", False), ("1.13.1", False), ("3.0.0", False), ("", False)])
def test_range_of_suitable_torch(setup_env, version, expected):
    assert setup_env._is_suitable(version) is expected


def test_range_is_the_one_of_the_package(setup_env):
    assert f'"torch{setup_env._range()}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("version", ["2.11.0+cu126", "2.13.0"])
def test_suitable_torch_is_kept(setup_env, asked, venv, version):
    put_torch(venv, version)
    setup_env._install(venv)
    named = {word for call in asked for word in call if word.startswith("torch")}
    assert named == {f"torch=={version}"}, "pinned to what is there, so that nothing replaces it"
    assert asked[0][0] == "setuptools"


@pytest.mark.parametrize("has_gpu, expected", [(False, "torch==2.13.0+cpu"), (True, "torch==2.13.0")])
@pytest.mark.parametrize("there", [None, "2.9.1"])
def test_torch_that_is_installed_suits_the_machine(setup_env, asked, venv, monkeypatch, has_gpu, expected, there):
    monkeypatch.setattr(setup_env, "_has_nvidia_gpu", lambda: has_gpu)
    if there:
        put_torch(venv, there)
    setup_env._install(venv)
    assert asked[0][0] == expected


@pytest.mark.slow                           # 20 s of pip; the other tests have its parts, and `make test` itself makes such an environment
def test_new_environment_sees_a_suitable_torch_of_the_machine(setup_env, tmp_path, monkeypatch):
    for number, (version, expected) in enumerate((("2.12.0", "true"), ("2.9.1", "false"), ("", "false"))):
        monkeypatch.setattr(setup_env, "_torch_version", lambda python, version=version: version)
        monkeypatch.setattr(sys, "prefix", sys.base_prefix)
        setup_env._make_venv(tmp_path / str(number))
        config = (tmp_path / str(number) / "pyvenv.cfg").read_text()
        assert f"include-system-site-packages = {expected}" in config


def test_half_made_environment_is_made_again(setup_env, tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)  # but no pip: interrupted
    (tmp_path / "venv" / "left-over").touch()
    setup_env._make_venv(tmp_path / "venv")
    assert setup_env._ok([tmp_path / "venv" / "bin" / "python", "-m", "pip", "--version"])
    assert not (tmp_path / "venv" / "left-over").exists()


def test_cpu_torch_that_is_not_offered_gives_one_clear_message(setup_env, venv, monkeypatch):
    """Really run, with pip cut off from every source."""
    subprocess.run([venv / "bin" / "python", "-m", "ensurepip"], check=True, capture_output=True)
    program = "import setup_env; setup_env._has_nvidia_gpu = lambda: False; setup_env.main()"
    cut_off = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "VIRTUAL_ENV": str(venv)}
    done = subprocess.run([venv / "bin" / "python", "-c", program], cwd=ROOT / "requirements", capture_output=True,
                          text=True, timeout=120, env={**os.environ, **cut_off})
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert "torch 2.13.0+cpu" in message and "PIP_EXTRA_INDEX_URL" in message and "active virtual environment" in message
    assert not (venv / setup_env.STAMP).exists()


def test_second_run_does_nothing(modules, tmp_path, monkeypatch):
    setup_env, torch_extensions = modules
    done = []
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "_fingerprint", lambda: "pins 1\n")
    monkeypatch.setattr(setup_env, "_install", lambda venv: done.append(venv))
    monkeypatch.setattr(torch_extensions, "prepare", lambda *_: None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    setup_env.main()
    setup_env.main()
    assert len(done) == 1
    monkeypatch.setattr(setup_env, "_fingerprint", lambda: "pins 2\n")
    setup_env.main()
    assert len(done) == 2, "changed pins are installed"
    monkeypatch.setattr(setup_env, "_fingerprint", lambda: "pins 3\n")
    monkeypatch.setattr(setup_env, "_install", lambda venv: sys.exit("interrupted"))
    with pytest.raises(SystemExit):
        setup_env.main()
    monkeypatch.setattr(setup_env, "_install", lambda venv: done.append(venv))
    setup_env.main()
    assert len(done) == 3, "an interrupted installation is not taken for a finished one"


def test_fingerprint_covers_the_pins(setup_env, monkeypatch, tmp_path):
    (tmp_path / "requirements").mkdir()
    for name in ("pyproject.toml", "setup.py", "requirements/constraints.txt"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    before = setup_env._fingerprint()
    assert setup_env._fingerprint() == before
    for name in ("pyproject.toml", "setup.py", "requirements/constraints.txt"):
        (tmp_path / name).write_text("2")
        assert setup_env._fingerprint() != before
        before = setup_env._fingerprint()


def test_every_requirement_has_an_exact_pin():
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pins = [line.split(";")[0].strip() for line in lines if line and not line.startswith("#")]
    assert all(pin.count("==") == 1 for pin in pins)
    pinned = {pin.split("==")[0].lower() for pin in pins}
    for name in ("runtime.txt", "dev.txt"):
        wanted = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if line[0] not in "#-"]
        assert wanted and {word.lower() for word in wanted} <= pinned
    # Not among the constraints: they hold for CUDA builds of torch too, and those want the Triton of their own.
    cpu = [line for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines() if line[0] != "#"]
    assert cpu and all(line.count("==") == 1 and line.split("==")[0] not in pinned for line in cpu)


def test_stale_locks_of_torch_are_dropped_and_live_ones_kept(modules, tmp_path):
    _, torch_extensions = modules
    stale, live = tmp_path / "one" / "lock", tmp_path / "two" / "lock"
    for lock in (stale, live):
        lock.parent.mkdir()
        lock.touch()
    (tmp_path / torch_extensions._BUILT).touch()
    with open(live):
        torch_extensions.prepare(Path(sys.executable), tmp_path, print)
    assert not stale.exists() and live.exists()
