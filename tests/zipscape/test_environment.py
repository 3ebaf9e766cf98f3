"""Environment variables that are wrong: one error that says so, before anything is used; and docs/config.md names all that there are."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_zipccl.backend import torch_session
from ds_zipccl.cli.main import main
from zipscape import environment
from zipscape.environment import NUMBERS, SWITCHES
from zipscape.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for folder in ("ds_zipccl", "ds_scape", "zipscape", "op_builder") for path in sorted((ROOT / folder).rglob("*.py"))]
OURS = re.compile(r"\b(?:ZIPCCL|SCAPE|ZIPSCAPE)_[A-Z_]+\b")
LAUNCHERS = "RANK", "OMPI_COMM_WORLD_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in (*NUMBERS, *SWITCHES, *LAUNCHERS):
        monkeypatch.delenv(name, raising=False)


def wrong_values(name: str) -> tuple:
    return ("true", "1.5", "1e3", "-1", "x", str(NUMBERS[name].least - 1)) if name in NUMBERS else ("true", "off", "2", "-0")


WRONG = [(name, value) for name in (*NUMBERS, *SWITCHES) for value in wrong_values(name)]


@pytest.mark.parametrize("name, value", WRONG)
def test_a_wrong_value_is_one_error_and_counts_as_unset(name, value, monkeypatch):
    environment.check()
    monkeypatch.setenv(name, value)
    expected = f"an integer >= {NUMBERS[name].least}" if name in NUMBERS else "0 (off) or 1 (on)"
    with pytest.raises(ConfigError) as error:
        environment.check()
    assert f"variable {name} " in str(error.value) and f"Got: {value}. Expected: {expected}. What to do: unset it" in str(error.value)
    assert environment.number(name) == NUMBERS[name].default if name in NUMBERS else environment.is_on(name)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name, monkeypatch):
    for text, value in (("", NUMBERS[name].default), ("37", 37), (" 5 ", 5), (str(NUMBERS[name].least), NUMBERS[name].least)):
        monkeypatch.setenv(name, text)
        environment.check()
        assert environment.number(name) == value


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name, monkeypatch):
    assert environment.is_on(name)
    for text in ("", "1", "0", " 0 "):
        monkeypatch.setenv(name, text)
        environment.check()
        assert environment.is_on(name) == ("0" not in text)


@pytest.mark.parametrize("name, value", [("RANK", "first"), ("OMPI_COMM_WORLD_RANK", "-1"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "")])
def test_a_launchers_variables(name, value, monkeypatch, capsys):
    """RANK is there, so the command takes all others from where it comes from."""
    monkeypatch.setenv("RANK", "0") if "RANK" not in name else None
    monkeypatch.setenv("LOCAL_RANK", "")                    # undone afterwards: the command sets it
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29517")
    monkeypatch.setenv(name, value)
    assert main(["bench", "collectives", "--device", "cpu"]) == 2
    written = capsys.readouterr().err
    assert f"variable {name} " in written and f"Got: {value or 'nothing'}. Expected: an integer" in written and "torchrun" in written


def test_commands_check_too(monkeypatch, capsys):
    monkeypatch.setenv("ZIPCCL_LATE", "true")
    assert main(["bench", "collectives", "--device", "cpu", "--ranks", "2"]) == 2
    assert "variable ZIPCCL_LATE " in capsys.readouterr().err


def test_a_group_is_not_made(monkeypatch):
    monkeypatch.setenv("ZIPCCL_AGAIN", "no")
    with pytest.raises(ConfigError, match="variable ZIPCCL_AGAIN "):
        torch_session._prepare(None)


def test_an_engine_is_not_made():
    """Nor is its module's import broken, or the hooks of that, which would leave DeepSpeed to train without us."""
    script = """
import deepspeed, torch
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "zipccl": {"enabled": True}}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
"""
    settings = {"ZIPCCL_LATE": "true", "DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    code = f"import os; os.environ.update({settings!r})\n{script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "Error: " in last, done.stderr[-2000:]
    assert "variable ZIPCCL_LATE is not what it may be. Got: true. Expected: an integer >= 0. What to do: unset it" in last, last


def _reads(node) -> bool:
    """Whether it has ``os.environ`` or ``os.getenv`` in it."""
    return any(isinstance(part, ast.Attribute) and part.attr in ("environ", "getenv") for part in ast.walk(node))


def _called(node) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def test_numbers_are_read_in_one_place():
    found = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in FILES if path != ROOT / "zipscape/environment.py"
             for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call) and _called(node) in ("int", "float") and any(map(_reads, node.args))]
    assert not found, f"int() or float() of an environment variable: {found}"
    assert _reads(ast.parse("int(os.environ.get('ZIPCCL_LATE') or 0)"))         # it can be found


def test_the_documents_name_all_variables():
    """Those whose whole name stands in the packages, or in setup.py."""
    used = {node.value for path in (*FILES, ROOT / "setup.py") for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS.fullmatch(node.value)}
    text = (ROOT / "docs" / "config.md").read_text()
    documented = set(OURS.findall(text[text.index("## Environment"):]))
    for_tests = {name for name, known in NUMBERS.items() if known.is_for_tests}
    assert {*NUMBERS, *SWITCHES} <= used
    assert used - for_tests - documented == set() and documented - used == set() and not for_tests & documented
