"""Building native libraries: what users and clusters do to a compile cache (C122 to C125)."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from zipscape.errors import BuildError
from zipscape.op_builder import base, lock, toolchain

SOURCE = '#include "sub/answer.h"\nextern "C" int answer() { return ANSWER; }\n'
#: A compiler that notes each call and takes its time, so that processes really meet. It is given as CXX.
SLOW_COMPILER = """#!/bin/sh
case "$*" in *--version*) exec c++ --version;; esac
echo called >> "$COUNT_FILE"
sleep "${SLOW_S:-1}"
exec c++ "$@"
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZIPSCAPE_CACHE", str(tmp_path / "cache"))
    for variable in ("ZIPSCAPE_CXX", "CXX", "ZIPSCAPE_NVCC", "NVCC"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def csrc(tmp_path):
    folder = tmp_path / "csrc"
    (folder / "sub").mkdir(parents=True)
    (folder / "answer.cpp").write_text(SOURCE)
    (folder / "sub" / "answer.h").write_text('#include "value.h"\n')
    (folder / "sub" / "value.h").write_text("#define ANSWER 42\n")
    return folder


@pytest.fixture
def library(csrc):
    return lambda **options: base.NativeLibrary("answer", ["answer.cpp"], csrc=csrc, **options)


@pytest.fixture
def slow_compiler(tmp_path, monkeypatch):
    script, count = tmp_path / "slow-c++", tmp_path / "count"
    script.write_text(SLOW_COMPILER)
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("COUNT_FILE", str(count))
    return lambda: len(count.read_text().splitlines()) if count.exists() else 0


def child(csrc, statement):
    """A process that runs the statement with `library` in hand."""
    code = f"""
        import sys
        from zipscape.op_builder.base import NativeLibrary
        library = NativeLibrary("answer", ["answer.cpp"], csrc={str(csrc)!r})
        {statement}
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def test_builds_once_and_answers(library):
    one = library()
    assert one.available() == (True, "") and one.built() is None
    handle = one.load()
    assert isinstance(handle, ctypes.CDLL) and handle.answer() == 42
    assert one.load() is handle and one.built().exists()
    before = one.built().stat().st_mtime_ns
    assert library().load().answer() == 42
    assert one.built().stat().st_mtime_ns == before


@pytest.mark.parametrize("file", ["answer.cpp", "sub/answer.h", "sub/value.h"])
def test_changed_source_or_header_gives_another_file(library, csrc, file):
    """C125: an upgrade never meets the old version's build."""
    first = library()
    assert first.load().answer() == 42
    before = first.built()
    with open(csrc / file, "a") as source:
        source.write("#undef ANSWER\n#define ANSWER 43\n" if file.endswith(".h") else "// changed\n")
    second = library()
    assert second.built() is None
    assert second.load().answer() == (43 if file.endswith(".h") else 42)
    assert second.built() != before and before.exists()


def test_flags_and_compiler_version_are_part_of_the_key(library, monkeypatch):
    """C125"""
    keys = {library().key(), library(flags=["-DX"]).key()}
    monkeypatch.setattr(toolchain, "version", lambda command: "another version")
    keys.add(library().key())
    assert len(keys) == 3


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-march=native", "--use_fast_math"])
def test_flags_that_break_bit_exactness_are_refused(library, flag):
    with pytest.raises(ValueError, match=flag):
        library(flags=[flag])


def test_standard_flags_are_exact_and_portable():
    for flags in (base.CXX_FLAGS, base.NVCC_FLAGS):
        assert not set(flags) & set(base._FORBIDDEN_FLAGS)
    assert "-ffp-contract=off" in base.CXX_FLAGS and "-fmad=false" in base.NVCC_FLAGS


def test_missing_compiler_is_named_with_what_to_do(library, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    one = library()
    with pytest.raises(BuildError, match=r"No c\+\+ compiler was found.*What to do: .*g\+\+"):
        one.load()
    available, reason = one.available()
    assert not available and "No c++ compiler" in reason


def test_missing_nvcc_is_named_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_nvcc_in_toolkit", lambda: None)
    with pytest.raises(BuildError, match="nvcc.*CUDA toolkit"):
        toolchain.find("nvcc")


def test_wrongly_named_compiler_is_an_error_not_a_fallback(library, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(BuildError, match="variable CXX.*no-such-compiler"):
        library().load()
    monkeypatch.setenv("ZIPSCAPE_CXX", "c++ -DMORE=1")
    assert toolchain.find("c++") == ["c++", "-DMORE=1"], "our own variable goes before CXX"


def test_neither_ninja_nor_the_environments_bin_folder_is_needed(csrc, tmp_path, monkeypatch):
    """C122: a launcher starts Python by its full path, and PATH knows a compiler and nothing else."""
    (tmp_path / "bin").mkdir()
    for tool in ("c++", "as", "ld"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    out, err = child(csrc, "print(library.load().answer())").communicate(timeout=120)
    assert out == "42\n", err


def test_torch_and_its_extensions_folder_have_no_part_in_it(library, tmp_path, monkeypatch):
    """C125: no torch headers, so another torch needs no other build, and what lies in its folder is not looked at."""
    before = library().build()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    assert library().build() == before and tmp_path / "cache" in before.parents


def test_compile_error_shows_the_compilers_words_every_time(library, csrc):
    (csrc / "answer.cpp").write_text("int x = not_declared;\n")
    one = library()
    texts = []
    for _ in range(2):
        with pytest.raises(BuildError) as caught:
            one.load()
        texts.append(str(caught.value))
    assert "not_declared" in texts[0] and "answer.cpp:1" in texts[0] and texts[0] == texts[1]
    assert not list(base.cache_dir().glob("*.so"))


def test_repaired_source_builds_after_a_failure(library, csrc):
    (csrc / "answer.cpp").write_text("broken\n")
    with pytest.raises(BuildError):
        library().load()
    (csrc / "answer.cpp").write_text(SOURCE)
    assert library().load().answer() == 42


def test_failure_of_an_earlier_run_is_not_believed(library, csrc, slow_compiler, monkeypatch):
    """The same source may compile today (a system header was installed): only failures while we waited count."""
    one = library()
    one._target().parent.mkdir(parents=True)
    one._target().with_suffix(".err").write_text("old failure")
    os.utime(one._target().with_suffix(".err"), (1, 1))
    assert one.load().answer() == 42


def test_missing_sources_are_an_error(csrc):
    one = base.NativeLibrary("gone", ["gone.cpp"], csrc=csrc)
    assert not one.available()[0] and one.built() is None
    with pytest.raises(BuildError, match="gone.cpp"):
        one.load()


def test_file_that_cannot_be_loaded_is_an_error(library):
    path = library().build()
    path.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="cannot be loaded.*delete that file"):
        library().load()


def test_many_processes_build_once(csrc, slow_compiler):
    """C123: the eight ranks of a host meet an empty cache."""
    children = [child(csrc, "print(library.load().answer())") for _ in range(8)]
    outputs = [process.communicate(timeout=120) for process in children]
    assert [out for out, _ in outputs] == ["42\n"] * 8, outputs
    assert slow_compiler() == 1


def test_many_processes_share_one_failure(csrc, slow_compiler):
    """C124: while one compiles in vain the others wait; they raise its message instead of failing one after another."""
    (csrc / "answer.cpp").write_text("int x = not_declared;\n")
    children = [child(csrc, "library.load()") for _ in range(4)]
    outputs = [process.communicate(timeout=120) for process in children]
    assert all("BuildError" in err and "not_declared" in err for _, err in outputs), outputs
    assert slow_compiler() < 4


def test_killed_builder_leaves_no_lock(csrc, library, slow_compiler, monkeypatch):
    """C123"""
    monkeypatch.setenv("SLOW_S", "60")
    process = child(csrc, "library.load()")
    deadline = time.monotonic() + 60
    while slow_compiler() == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert slow_compiler() == 1
    process.send_signal(signal.SIGKILL)
    process.communicate()
    monkeypatch.setenv("SLOW_S", "0")
    begin = time.monotonic()
    assert library().load().answer() == 42
    assert time.monotonic() - begin < 20.0


def test_living_but_stuck_owner_is_waited_for_only_so_long(library, caplog):
    """C123: and the log names the lock and the time."""
    one = library(lock_wait_s=0.5)
    target = one._target()
    target.parent.mkdir(parents=True)
    with lock.bounded(target.with_suffix(".lock"), 1.0, lambda: False) as held:
        assert held
        begin = time.monotonic()
        assert one.load().answer() == 42
        assert 0.5 <= time.monotonic() - begin < 20.0
    (record,) = caplog.records
    assert "0.5 s" in record.getMessage() and str(target.with_suffix(".lock")) in record.getMessage()


def test_lock_file_that_cannot_be_opened_does_not_keep_anybody_from_building(library):
    one = library()
    one._target().parent.mkdir(parents=True)
    one._target().with_suffix(".lock").mkdir()          # stands for another user's file in a shared cache
    assert one.load().answer() == 42


def test_full_disk_is_a_build_error(library, monkeypatch):
    """Whoever can do without the library (kernels: best) must be able to catch it."""
    def full(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(base.tempfile, "TemporaryDirectory", full)
    one = library()
    for _ in range(2):
        with pytest.raises(BuildError, match="No space left on device.*ZIPSCAPE_CACHE"):
            one.load()


def test_library_appears_by_rename(library):
    """Whoever has the old file open or mapped keeps it whole: the new one is another file at the same path."""
    one = library()
    target = one._target()
    target.parent.mkdir(parents=True)
    target.write_bytes(b"old")
    with open(target, "rb") as old:
        one.compile(target)
        assert old.read() == b"old"
    assert one.load().answer() == 42
    assert [path.name for path in target.parent.iterdir()] == [target.name], "nothing is left over"


def test_hanging_compiler_is_ended_with_its_children(tmp_path):
    begin = time.monotonic()
    with pytest.raises(BuildError, match="did not finish in 1 s"):
        toolchain.run(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"], what="test", timeout_s=1.0)
    assert time.monotonic() - begin < 20.0
    pid = int((tmp_path / "pid").read_text())
    while time.monotonic() - begin < 20.0 and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_unwritable_cache_is_replaced(library, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZIPSCAPE_CACHE", str(tmp_path / "file" / "cache"))
    one = library()
    assert one.load().answer() == 42


def test_prebuilt_library_wins_while_its_sources_are_the_same(library, csrc, tmp_path, monkeypatch):
    monkeypatch.setattr(base.prebuilt, "folder", lambda: tmp_path / "prebuilt")
    path = library().prebuild()
    assert path.parent == tmp_path / "prebuilt"
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler any more
    one = library()
    assert one.available() == (True, "") and one.built() == path and one.load().answer() == 42
    (csrc / "answer.cpp").write_text(SOURCE + "// changed\n")
    with pytest.raises(BuildError, match="No c"):
        library().load()


def test_forked_names_do_not_meet_deepspeeds_op_builder():
    from zipscape import op_builder
    assert not hasattr(op_builder, "__deepspeed__") and op_builder.__name__ == "zipscape.op_builder"
