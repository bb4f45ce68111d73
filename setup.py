"""The rest is in pyproject.toml. Here: a wheel carries the CPU kernels, built by the C++ compiler of who makes it.

Without one, and in an editable installation, they are built at the first use. LOWQ_CPU_ISA=off makes the wheel without them.
"""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU = "products/cpu"
spec = importlib.util.spec_from_file_location("building", Path(__file__).parent / "kernels" / CPU / "building.py")
building = importlib.util.module_from_spec(spec)
spec.loader.exec_module(building)
carries = False


class Build(build_py):
    def run(self):
        global carries
        super().run()
        carries = not self.editable_mode and building.carry(Path(self.build_lib) / "lowq_kernels" / CPU)


class Wheel(bdist_wheel):
    def run(self):
        self.run_command("build_py")  # the wheel's name says whether it is for one kind of machine
        self.root_is_pure = not carries
        self.distribution.has_ext_modules = lambda: carries  # where pip puts it: beside the rest
        super().run()

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel})
