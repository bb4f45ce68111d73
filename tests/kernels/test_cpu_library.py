"""The compiled library in the cache: loaded only if it is the user's own and whole, built anew with a word where it is not."""

import multiprocessing
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import forking
import pytest

import emulation
from lowq_kernels.products.cpu import building, native

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"own CPU kernels are not built: {native.why_not()}")
# Asked of a compiler, without its seconds: "compiles" by an empty file, "links" by the library that the tests have built, and
# notes each link.
FAKE = """#!/bin/sh
[ $1 = --version ] && exit 0
linked=; for a in "$@"; do [ "$a" = -shared ] && linked=1; done
while [ "$1" != -o ]; do shift; done
if [ $linked ]; then sleep 0.3; cp {library} "$2"; echo >> {links}; else : > "$2"; fi
"""


class Machine:
    """A cache of its own and a compiler that takes no time; `ask` starts a process that wants the library."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.links, cxx = folder / "cache", folder / "links", folder / "c++"
        self.cache.mkdir()
        cxx.write_text(FAKE.format(library=native.library()._name, links=self.links))
        cxx.chmod(0o755)
        self.env = {k: v for k, v in os.environ.items() if k != "LOWQ_CPU_ISA"}
        self.env |= {"XDG_CACHE_HOME": str(self.cache), "CXX": str(cxx)}

    def start(self, umask: int = 0o022, **env: str) -> multiprocessing.Process:
        return forking.begin(forking.ask_for_library, umask, env=self.env | env)

    def ask(self, umask: int = 0o022, **env: str) -> list[str]:
        """Whether there is a library, why it had to be built, why there is none."""
        done = forking.run(forking.ask_for_library, umask, env=self.env | env)
        assert done.returncode == 0, done  # SIGBUS, when a truncated file was loaded
        there, _, *why = done.stdout.strip().split("|")
        return [there, *why]

    @property
    def library(self) -> Path:
        (result,) = (self.cache / "lowq" / "cpu").glob("*.so")
        return result

    @property
    def built(self) -> int:
        """How many times."""
        return self.links.read_text().count("\n") if self.links.exists() else 0


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    machine = Machine(tmp_path_factory.mktemp("machine"))
    assert machine.ask() == ["True", native.NONE, "None"]
    return machine


@pytest.fixture
def machine(first, tmp_path):
    """One on which the library was built before."""
    result = Machine(tmp_path)
    shutil.copytree(first.cache, result.cache, dirs_exist_ok=True)
    shutil.copy(first.links, result.links)
    return result


def cut(n):
    return lambda path: os.truncate(path, n)


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def replaced(make):
    def bend(path):
        path.unlink()
        make(path)

    return bend


BENT = {
    **{f"cut to {n} bytes": cut(n) for n in (0, 1, 64, 1000, 4096, 100_000, 400_000)},
    "a flipped bit": flip,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "garbage": lambda path: path.write_bytes(b"garbage" * 1000),
    "a fifo": replaced(os.mkfifo),
    "a folder": replaced(lambda path: (path / "sub").mkdir(parents=True)),
    "a dangling link": replaced(lambda path: path.symlink_to("nowhere")),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a sparse file": lambda path: os.truncate(path, 1 << 33),
    "no hash": lambda path: path.with_suffix(native.DIGEST).unlink(),
    "an empty hash": lambda path: path.with_suffix(native.DIGEST).write_text(""),
    "a hash of something else": lambda path: path.with_suffix(native.DIGEST).write_text("0" * 64),
    "a fifo for a hash": lambda path: (path.with_suffix(native.DIGEST).unlink(), os.mkfifo(path.with_suffix(native.DIGEST))),
    "others may write it": lambda path: path.chmod(0o777),
}


@pytest.mark.parametrize("bend", emulation.sampled(BENT.values()), ids=BENT)
def test_a_damaged_library_is_rebuilt_with_a_message(machine, bend):
    bend(machine.library)
    there, why, why_not = machine.ask()
    assert (there, why_not, machine.built) == ("True", "None", 2)
    assert why != "-"
    assert machine.ask() == ["True", "-", "None"]
    assert machine.built == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
def test_another_users_library_is_not_loaded(machine):
    os.chown(machine.library, 12345, 12345)
    assert machine.ask()[0] == "True"
    assert machine.built == 2
    assert machine.library.stat().st_uid == os.getuid()
    os.chown(machine.cache / "lowq", 12345, 12345)
    there, _, why_not = machine.ask()
    assert (there, "belongs to another user; name a folder of your own: XDG_CACHE_HOME=DIR" in why_not) == ("False", True)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_the_cache_is_the_users_alone_whatever_the_umask(tmp_path, umask):
    machine = Machine(tmp_path)
    assert machine.ask(umask)[0] == "True"
    for path in (machine.cache / "lowq", *(machine.cache / "lowq").rglob("*")):
        forbidden = 0o077 if path == machine.cache / "lowq" else 0o022
        assert not stat.S_IMODE(path.stat().st_mode) & forbidden, path
    (machine.cache / "lowq").chmod(0o777)
    assert machine.ask()[0] == "True"
    assert stat.S_IMODE((machine.cache / "lowq").stat().st_mode) == 0o700


def test_two_processes_build_it_once(tmp_path):
    machine = Machine(tmp_path)
    processes = [machine.start() for _ in range(3)]
    for process in processes:
        process.join(forking.SECONDS)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert machine.built == 1
    assert sorted(p.suffix for p in machine.library.parent.iterdir()) == [".sha256", ".so"]


def test_a_killed_build_does_not_block_the_next_one(tmp_path):
    machine = Machine(tmp_path)
    killed = machine.start()
    while not list(machine.cache.rglob("*.o")):
        assert killed.is_alive()
        time.sleep(0.001)
    killed.kill()
    killed.join()
    assert machine.ask()[0] == "True"
    assert sorted(p.suffix for p in machine.library.parent.iterdir()) == [".sha256", ".so"]


def test_a_missing_compiler_is_reported(tmp_path):
    machine = Machine(tmp_path)
    assert machine.ask(PATH="", CXX="")[2] == "no C++ compiler is here; install g++ or clang"


@pytest.fixture
def no_programs(tmp_path):
    """A folder whose file system lets no program run."""
    folder = tmp_path / "noexec"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_cache_folder_mounted_noexec_is_reported(tmp_path, no_programs):
    there, _, why_not = Machine(tmp_path).ask(XDG_CACHE_HOME=str(no_programs))
    assert (there, why_not.endswith("; name another cache folder: XDG_CACHE_HOME=DIR")) == ("False", True), why_not


def test_a_build_says_how_far_it_is(tmp_path):
    cxx, output = tmp_path / "c++", []
    cxx.write_text('#!/bin/sh\n[ $1 = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.5; : > "$2"\n')
    cxx.chmod(0o755)
    building.build(str(cxx), {"bf16.cpp": (), "avx2.cpp": ()}, tmp_path, output.append)
    assert output
    assert output == sorted(output)
    assert 0 < output[0] <= output[-1] < 1


WAITS = """#!/bin/sh
[ $1 = --version ] && exit 0
case "$*" in
*avx2.cpp*) echo $$ > {pid}; exec sleep 60 ;;
*) while [ ! -s {pid} ]; do sleep 0.01; done; echo no >&2; exit 1 ;;
esac
"""


def test_a_failed_build_leaves_no_compiler_running(tmp_path):
    cxx, pid = tmp_path / "c++", tmp_path / "pid"
    cxx.write_text(WAITS.format(pid=pid))
    cxx.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1") as e:
        building.build(str(cxx), {"neon.cpp": (), "avx2.cpp": ()}, tmp_path)
    assert e.value.output == "no\n"
    assert not Path("/proc", pid.read_text().strip()).exists()


def test_a_cache_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").touch()
    there, _, why_not = Machine(tmp_path).ask(XDG_CACHE_HOME=str(tmp_path / "file"))
    place = f"{tmp_path}/file/lowq cannot be written: Not a directory; name another cache folder: XDG_CACHE_HOME=DIR"
    assert (there, why_not.replace("/lowq/cpu", "/lowq")) == ("False", place)
