"""What pyproject.toml cannot say: the native code.

    globaltensor/_core*.so     boxing kernel, shared memory, Philox, prices: plain C symbols, no torch, for every torch
    globaltensor/_torch*.so    dispatch and what faces torch: built against the torch that is installed
    globaltensor/_cuda.so      the same kernels for GPUs: where nvcc and a torch with CUDA are

build_backend.py sees to it that torch is there, in an isolated build too. Without torch, or without a compiler, the
package installs and works, slower. A wheel also carries the benchmarks, with the examples that they train.
"""
import importlib.util
import os
import sys
from glob import glob
from pathlib import Path
from subprocess import CalledProcessError
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    torch = None

FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-Wall"]
OPTIONAL = sys.argv[1:2] != ["build_ext"]            # an install works without; who builds it alone wants just that


def kernel_build() -> ModuleType:
    """runtime/kernel_build.py of the package, which is not imported."""
    spec = importlib.util.spec_from_file_location("kernel_build", "globaltensor/runtime/kernel_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(*folders: str) -> list[str]:
    return sorted(file for folder in folders for file in glob(f"csrc/{folder}/*.cpp"))


def together(folder: str) -> str:
    """A file that includes a folder's: torch's headers take longer to read than all that is ours.

    It names torch, so that it changes, and what was made from it is made anew, when torch does.
    """
    file = Path("build", f"{folder}.cpp")
    text = f"// torch {torch.__version__}\n"
    text += "".join(f'#include "../{source}"\n' for source in sources(folder))
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return str(file)


def age(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def headers() -> list[str]:
    return sorted(glob("csrc/**/*.h", recursive=True))


class BuildPy(build_py):
    """Copies into the package what is used without a checkout: benchmarks, and the sources of kernels for GPUs, which
    are compiled at first use where they are not at install."""

    def bundled(self) -> dict[str, str]:
        """What is copied, by its target. Only a checkout has tests/, of which `device.py` takes the calls of
        kernels, and whose programs `faults.py` runs."""
        files = [file for pattern in ("benchmarks/*.py", "benchmarks/*.c", "examples/*.py") for file in glob(pattern)]
        files += map(str, kernel_build().kernel_sources(Path("csrc")))
        return {f"{self.build_lib}/globaltensor/bundled/{file}": file for file in sorted(files)
                if file not in ("benchmarks/device.py", "benchmarks/faults.py")}

    def run(self) -> None:
        super().run()
        for target, source in ({} if self.editable_mode else self.bundled()).items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *({} if self.editable_mode else self.bundled())]


core = Extension("globaltensor._core", sources("kernels", "transport", "philox", "pricing"), depends=headers(),
                 language="c++", extra_compile_args=["-std=c++17", *FLAGS], extra_link_args=["-lpthread"],
                 optional=OPTIONAL)

if torch is None:
    print("globaltensor: no torch to compile against, so native dispatch is left out: an op will take several times as"
          " long.\nTo mend that: pip install torch, and then install globaltensor again.", file=sys.stderr)
    setup(ext_modules=[core], cmdclass={"build_py": BuildPy})
else:
    class Build(BuildExtension):
        """Also compiles the CUDA sources into one library of plain C symbols."""

        def run(self) -> None:
            super().run()
            build = kernel_build()
            nvcc = build.find_nvcc()
            if torch.version.cuda and nvcc:
                target = Path("globaltensor" if self.inplace else f"{self.build_lib}/globaltensor") / "_cuda.so"
                build.compile_kernels(nvcc, Path("csrc"), build.INSTALLED, target)
            made, of = [Path(file) for file in self.get_outputs()], [*core.sources, *face.depends]
            if self.inplace and min(map(age, made)) >= max(age(Path(file)) for file in of):      # not left as it was
                Path("globaltensor/_torch.sources").write_text(build.native_hash(Path("csrc")))

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except CalledProcessError as error:      # torch asks the compiler for its version first
                if not OPTIONAL:
                    raise
                self.warn(f"native code is left out: {error}")

        def build_extension(self, ext: Extension) -> None:
            try:
                super().build_extension(ext)
            except RuntimeError as error:            # torch's own; setuptools forgives only CompileError
                raise CompileError(str(error)) from error

    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    face = CppExtension("globaltensor._torch", [together("torch_ext"), together("process_group")], optional=OPTIONAL,
                        depends=[*headers(), *sources("torch_ext", "process_group")],
                        extra_compile_args=["-fvisibility=hidden", *FLAGS],
                        include_dirs=[str(Path("csrc").absolute())])
    setup(ext_modules=[core, face], cmdclass={"build_ext": Build, "build_py": BuildPy})
