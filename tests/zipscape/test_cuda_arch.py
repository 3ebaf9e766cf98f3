"""TORCH_CUDA_ARCH_LIST and what a CUDA build is for (C126); a list of fake GPUs stands for real ones."""
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from zipscape.errors import BuildError
from zipscape.op_builder import base, cuda_arch


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.delenv(cuda_arch.VARIABLE, raising=False)
    monkeypatch.setattr(cuda_arch, "visible", lambda: [])


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A CUDA library whose compiler writes its arguments in place of code."""
    (tmp_path / "a.cu").write_text("// nothing\n")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\ncase \"$*\" in *--version*) echo 'release 13.0, V13.0.88'; exit;; esac\n"
                    'for last; do :; done\necho "$@" > "$last"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("ZIPSCAPE_NVCC", str(nvcc))
    monkeypatch.setenv("ZIPSCAPE_CACHE", str(tmp_path / "cache"))
    return base.NativeLibrary("a", ["a.cu"], compiler="nvcc", csrc=tmp_path)


def gencode(library) -> list:
    words = shlex.split(library.build().read_text())
    return [words[i + 1] for i, word in enumerate(words) if word == "-gencode"]


@pytest.mark.parametrize("text, expected", [
    ("8.0", "8.0"), ("8.0;9.0+PTX", "8.0, 9.0+PTX"), ("9.0+PTX 8.0", "8.0, 9.0+PTX"), (" 8.0 ; 9.0;; ", "8.0, 9.0"),
    ("9.0;9.0+PTX", "9.0+PTX"), ("Ampere Hopper", "8.0, 8.6+PTX, 9.0+PTX"), ("Ampere+Tegra;Ada", "8.7, 8.9+PTX"), ("9.0a", "9.0a"),
    ("5.2 6.0 7.5 8.0 9.0 10.0+PTX", "8.0, 9.0, 10.0+PTX"), ("Turing;12.1", "12.1")])
def test_lists_as_torch_takes_them(text, expected):
    """C126"""
    assert cuda_arch.text(cuda_arch.parse(text)) == expected


def test_names_mean_what_they_mean_to_torch(monkeypatch):
    """C126: torch's own function gives the same flags for lists that need no leaving out."""
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    for text in ("8.0", "8.0;9.0+PTX", "9.0a 10.0", "Ampere", "Hopper Ada", "Ampere+Tegra;Blackwell", "Blackwell+Tegra"):
        monkeypatch.setenv(cuda_arch.VARIABLE, text)
        theirs = {flag.removeprefix("-gencode=") for flag in cpp_extension._get_cuda_arch_flags()}
        ours = set()
        for flag in cuda_arch.flags(cuda_arch.for_this_machine())[1::2]:
            arch, _, codes = flag.partition(",code=")
            ours |= {f"{arch},code={code}" for code in codes.strip("[]").split(",")}
        assert ours == theirs, text


@pytest.mark.parametrize("text", ["8", "8,0", "sm_90", "8.0,9.0", "9.0+ptx", "Amper", "Ampere+PTX", "8.0;nonsense", "90", "8.0 +PTX"])
def test_malformed_lists_are_one_clear_error(library, monkeypatch, text):
    """C126: the value is named, whoever asks."""
    monkeypatch.setenv(cuda_arch.VARIABLE, text)
    with pytest.raises(BuildError, match="TORCH_CUDA_ARCH_LIST") as caught:
        library.load()
    assert repr(text) in str(caught.value) and "What to do" in str(caught.value)
    assert library.available() == (False, str(caught.value))


def test_lists_with_nothing_for_us_are_an_error():
    with pytest.raises(BuildError, match="'5.2 7.5'.*8.0 or newer"):
        cuda_arch.parse("5.2 7.5")


def test_the_build_follows_the_variable_and_so_does_its_file(library, monkeypatch):
    """C126: sm_80 and sm_90 with PTX without a GPU; each list has its own file."""
    assert gencode(library) == ["arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]"]
    first = library.build()
    monkeypatch.setenv(cuda_arch.VARIABLE, "8.6+PTX")
    assert gencode(library) == ["arch=compute_86,code=[sm_86,compute_86]"] and library.build() != first
    monkeypatch.setenv(cuda_arch.VARIABLE, "9.0+PTX;8.0")
    assert library.build() == first, "the same list in other words"


def test_without_the_variable_it_is_for_the_visible_devices(library, monkeypatch):
    """C126; a device that is too old for the kernels (a display's, say) changes nothing."""
    monkeypatch.setattr(cuda_arch, "visible", lambda: [(7, 5), (8, 6), (9, 0)])
    assert gencode(library) == ["arch=compute_86,code=sm_86", "arch=compute_90,code=sm_90"]
    monkeypatch.setenv(cuda_arch.VARIABLE, "native")
    assert cuda_arch.text(library.arches()) == "8.6, 9.0"
    monkeypatch.setenv(cuda_arch.VARIABLE, "8.0")
    assert gencode(library) == ["arch=compute_80,code=sm_80"], "the variable wins"
    monkeypatch.delenv(cuda_arch.VARIABLE)
    monkeypatch.setattr(cuda_arch, "visible", lambda: [(7, 5)])
    assert cuda_arch.text(library.arches()) == "8.0, 9.0+PTX"


@pytest.mark.parametrize("built, capability, runs", [
    ("8.0", (8, 0), True), ("8.0", (8, 9), True), ("8.6", (8, 0), False), ("8.0", (9, 0), False), ("8.0+PTX", (9, 0), True),
    ("9.0+PTX", (8, 0), False), ("9.0a+PTX", (9, 0), True), ("9.0a+PTX", (10, 0), False), ("8.0;9.0+PTX", (12, 0), True),
    ("8.0;9.0", (10, 0), False)])
def test_what_runs_where(built, capability, runs):
    arches = cuda_arch.parse(built)
    if runs:
        cuda_arch.check(arches, capability, "cuda:0")
    else:
        with pytest.raises(BuildError, match=rf"not built for cuda:0.*{capability[0]}\.{capability[1]}.*TORCH_CUDA_ARCH_LIST"):
            cuda_arch.check(arches, capability, "cuda:0")


def test_devices_are_asked_of_torch_once_it_has_started_cuda(monkeypatch):
    monkeypatch.undo()
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 3, get_device_capability=lambda i: [(9, 0), (8, 0), (9, 0)][i])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert cuda_arch.visible() == [(8, 0), (9, 0)]


def test_devices_are_asked_of_the_driver_in_another_process_before(monkeypatch, tmp_path):
    """So that this process can still be forked; the answer is kept for each CUDA_VISIBLE_DEVICES. No driver, no device."""
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    calls = []
    monkeypatch.setattr(cuda_arch, "_DEVICE_FILES", (str(tmp_path),))
    monkeypatch.setattr(cuda_arch.subprocess, "run",
                        lambda *args, **options: calls.append(args) or SimpleNamespace(stdout="9 0\n8 0\n9 0\n"))
    for devices in ("3,1", "3,1", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        assert cuda_arch.visible() == [(8, 0), (9, 0)]
    assert len(calls) == 2
    cuda_arch._ask_driver.cache_clear()
    monkeypatch.undo()
    done = subprocess.run([sys.executable, "-S", "-c", cuda_arch._QUERY.replace("libcuda.so.1", "libno-such.so")], capture_output=True)
    assert done.returncode == 1 and done.stdout == b""
